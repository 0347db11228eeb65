"""Which speculative methods this plugin serves, and what it refuses before a start."""

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from mrv2_spec.config import KEY, SettingsError, parse_settings
from mrv2_spec.corpus.errors import CorpusError
from mrv2_spec.integration.patching import Patch

NGRAM_METHODS = ("ngram", "ngram_gpu")
SERVED_METHODS = (*NGRAM_METHODS, "suffix", "custom_class")


def served_method(vllm_config: Any) -> str | None:
    """Return the engine's speculative method if this plugin drafts for it on V2."""
    spec_config = vllm_config.speculative_config
    if spec_config is None or spec_config.method not in SERVED_METHODS:
        return None
    method: str = spec_config.method
    return method if vllm_config.use_v2_model_runner else None


# On a speculative config: that this plugin drafts for its engine.
_SERVED = "_mrv2_spec_served"


def mark_served(vllm_config: Any) -> None:
    """Note on the speculative config that this plugin drafts for its engine.

    Where vLLM shows metrics and checks requests it has nothing else, and the user's
    environment does not tell: vLLM also chooses V2 by itself.
    """
    setattr(vllm_config.speculative_config, _SERVED, True)


def is_served(spec_config: Any) -> bool:
    """Tell whether this plugin drafts for the engine of a speculative config."""
    return getattr(spec_config, _SERVED, False)


def speculator_class(vllm_config: Any) -> type[Any]:
    """Return the speculator class for a served method.

    Raises:
        SettingsError: a ``custom_class`` that cannot be loaded, or is no
            ``BaseSpeculator``.
    """
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    spec_config = vllm_config.speculative_config
    if spec_config.method in NGRAM_METHODS:
        from mrv2_spec.ngram import NgramSpeculator

        return NgramSpeculator
    if spec_config.method == "suffix":
        from mrv2_spec.suffix import SuffixSpeculator

        return SuffixSpeculator
    cls = _load_custom_class(spec_config.model)
    if not (isinstance(cls, type) and issubclass(cls, BaseSpeculator)):
        raise SettingsError(
            f"model={spec_config.model!r} of method 'custom_class' is no subclass of "
            "vllm.v1.worker.gpu.spec_decode.speculator.BaseSpeculator; the V2 model "
            "runner takes only such speculators"
        )
    return cls


def _load_custom_class(path: str) -> Any:
    module_name, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"model={path!r} of method 'custom_class' cannot be loaded ({error}); it "
            "must be the dotted path of a class, such as 'my_package.MySpeculator'"
        ) from error


def check_settings(vllm_config: Any) -> None:
    """Refuse what cannot work, before any model is loaded.

    Raises:
        SettingsError: one line that names the setting and the remedy.
    """
    settings = parse_settings(vllm_config.additional_config)
    spec_config = vllm_config.speculative_config
    num_drafts = spec_config.num_speculative_tokens
    max_model_len = vllm_config.model_config.max_model_len
    if num_drafts is None or num_drafts < 1:
        raise SettingsError(
            f"num_speculative_tokens={num_drafts} must be at least 1; set it in the "
            "speculative config"
        )
    if num_drafts > max_model_len:
        raise SettingsError(
            f"num_speculative_tokens={num_drafts} exceeds max_model_len="
            f"{max_model_len}; lower it to what a response can hold, such as 8"
        )
    if num_drafts > MAX_DRAFTS:
        raise SettingsError(
            f"num_speculative_tokens={num_drafts} exceeds {MAX_DRAFTS}; lower it, "
            "16 is plenty"
        )
    if spec_config.enable_adaptive_verification:
        raise SettingsError(
            "enable_adaptive_verification=true is for drafters with a model; remove "
            f"it, mrv2_spec.trim does this for method {spec_config.method!r}"
        )
    _check_keys_fit(vllm_config.additional_config, spec_config.method)
    if spec_config.method == "custom_class":
        _check_custom_module(spec_config.model)
    if spec_config.method in NGRAM_METHODS:
        _check_ngram(spec_config)
    if spec_config.method == "suffix":
        _check_suffix(spec_config)
    if getattr(vllm_config, "watermark_config", None) is not None:
        raise SettingsError(
            f"method {spec_config.method!r} does not support watermarking; remove one"
        )
    if settings.memory_file is not None:
        _check_memory_file(settings.memory_file, vllm_config)


def check_scheduling(vllm_config: Any) -> None:
    """Refuse what cannot work, once it is known whether steps are scheduled ahead.

    Raises:
        SettingsError: as for `check_settings`.
    """
    num_stages = vllm_config.parallel_config.pipeline_parallel_size
    if num_stages > 1 and not vllm_config.scheduler_config.async_scheduling:
        # vLLM hands the drafts over before the tokens they follow, and then fails.
        raise SettingsError(
            f"pipeline_parallel_size={num_stages} needs async scheduling with method "
            f"{vllm_config.speculative_config.method!r}; set --async-scheduling"
        )


def _check_ngram(spec_config: Any) -> None:
    shortest, longest = spec_config.prompt_lookup_min, spec_config.prompt_lookup_max
    if not 1 <= shortest <= longest:
        raise SettingsError(
            f"prompt_lookup_min={shortest} and prompt_lookup_max={longest} must "
            "satisfy 1 <= min <= max"
        )
    if longest > MAX_PROMPT_LOOKUP:
        raise SettingsError(
            f"prompt_lookup_max={longest} exceeds {MAX_PROMPT_LOOKUP}; longer "
            "matches find nothing that shorter ones do not"
        )


def _check_suffix(spec_config: Any) -> None:
    num_drafts = spec_config.num_speculative_tokens
    if num_drafts > MAX_SUFFIX_DRAFTS:
        raise SettingsError(
            f"num_speculative_tokens={num_drafts} exceeds {MAX_SUFFIX_DRAFTS}, the "
            "most that method 'suffix' drafts; lower it"
        )
    depth = spec_config.suffix_decoding_max_tree_depth
    if depth > MAX_TREE_DEPTH:
        raise SettingsError(
            f"suffix_decoding_max_tree_depth={depth} exceeds {MAX_TREE_DEPTH}; lower it"
        )
    _check_cupy()


def _check_keys_fit(additional_config: Any, method: str) -> None:
    given = additional_config.get(KEY, {}) if additional_config else {}
    for name in given:
        readers = _KEY_READERS.get(name)
        if readers is not None and method not in readers:
            raise SettingsError(
                f"{KEY}.{name}={given[name]!r} is read by method {readers[0]!r} only; "
                f"remove it, or use that method in place of {method!r}"
            )


def _check_custom_module(path: str) -> None:
    module_name = path.rpartition(".")[0]
    try:
        found = bool(module_name) and find_spec(module_name) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        raise SettingsError(
            f"model={path!r} of method 'custom_class' cannot be loaded (no module "
            f"{module_name!r}); it must be the dotted path of a class, such as "
            "'my_package.MySpeculator'"
        )


def _check_memory_file(path: str, vllm_config: Any) -> None:
    spec_config = vllm_config.speculative_config
    if spec_config.suffix_decoding_max_cached_requests < 1:
        raise SettingsError(
            f"mrv2_spec.memory_file={path!r} needs a memory, and "
            "suffix_decoding_max_cached_requests=0 keeps none; remove one"
        )
    from mrv2_spec.corpus.engine import read_for

    try:
        read_for(vllm_config.model_config, path)
    except CorpusError as error:
        raise SettingsError(f"mrv2_spec.memory_file: {error}") from error


def _check_cupy() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cuda() and find_spec("cupy") is None:
        raise SettingsError(
            "method 'suffix' needs CuPy on a GPU, which is not installed; install "
            "mrv2-spec[cuda13], or mrv2-spec[cuda12] with CUDA 12"
        )


# Settings that only some methods read.
_KEY_READERS = {
    "tie": NGRAM_METHODS,
    "scoring": ("suffix",),
    "corpus_tokens": ("suffix",),
    "memory_file": ("suffix",),
}
# The trimmer holds the drafts of many requests in registers.
MAX_DRAFTS = 128
# The match length is unrolled in the kernel.
MAX_PROMPT_LOOKUP = 64
# A draft's votes are kept in shared memory.
MAX_SUFFIX_DRAFTS = 48
MAX_TREE_DEPTH = 64


def _wrap_unsupported(original: Callable[[Any], list[str]]) -> Callable[..., list[str]]:
    def _get_v2_model_runner_unsupported_features(self: Any) -> list[str]:
        import vllm.envs as envs

        features = original(self)
        spec_config = self.speculative_config
        # vLLM also picks a runner by this list: where the user did not ask for V2, an
        # engine that ran on V1 without this plugin goes on to do so.
        if (
            not envs.VLLM_USE_V2_MODEL_RUNNER
            or spec_config is None
            or spec_config.method not in SERVED_METHODS
        ):
            return features
        served = f"speculative method '{spec_config.method}'"
        return [feature for feature in features if feature != served]

    return _get_v2_model_runner_unsupported_features


def _wrap_validate_suffix(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def _validate_suffix_decoding(self: Any) -> None:
        import vllm.config.speculative as module
        import vllm.envs as envs

        if not envs.VLLM_USE_V2_MODEL_RUNNER:
            original(self)
            return
        # vLLM's own suffix decoding needs a package; on the V2 runner ours runs.
        needed = module.has_arctic_inference
        module.has_arctic_inference = lambda: True
        try:
            original(self)
        finally:
            module.has_arctic_inference = needed

    return _validate_suffix_decoding


SPECULATIVE_PATCHES = (
    Patch(
        "SpeculativeConfig._validate_suffix_decoding",
        (("self",),),
        _wrap_validate_suffix,
    ),
)

PATCHES = (
    Patch(
        "VllmConfig._get_v2_model_runner_unsupported_features",
        (("self",),),
        _wrap_unsupported,
    ),
)
