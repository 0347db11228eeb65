"""Checks the speculative options as typed: vLLM's own refusals take many lines."""

from collections.abc import Callable, Mapping
from typing import Any

from mrv2_spec.config import SettingsError
from mrv2_spec.integration.methods import NGRAM_METHODS
from mrv2_spec.integration.patching import Patch

# key -> (whole number, least, most)
_RANGES: dict[str, tuple[bool, float, float | None]] = {
    "num_speculative_tokens": (True, 1, None),
    "prompt_lookup_min": (True, 1, None),
    "prompt_lookup_max": (True, 1, None),
    "suffix_decoding_max_tree_depth": (True, 1, None),
    "suffix_decoding_max_cached_requests": (True, 0, None),
    "suffix_decoding_max_spec_factor": (False, 0, None),
    "suffix_decoding_min_token_prob": (False, 0, 1),
}


def check_options(options: Mapping[str, Any]) -> None:
    """Check the options of one of this plugin's methods.

    Args:
        options: the speculative config as the user gave it.

    Raises:
        SettingsError: one line that names the option and what it may be.
    """
    if options.get("method") not in (*NGRAM_METHODS, "suffix"):
        return
    for key, (whole, least, most) in _RANGES.items():
        value = options.get(key)
        if value is None:
            continue
        kinds = (int,) if whole else (int, float)
        fits = isinstance(value, kinds) and not isinstance(value, bool)
        # Written so that NaN does not fit.
        if not (fits and value >= least and (most is None or value <= most)):
            number = "a whole number" if whole else "a number"
            bounds = f"of at least {least}" if most is None else f"in [{least}, {most}]"
            raise SettingsError(
                f"{key}={value!r} must be {number} {bounds}; change it in the "
                "speculative config"
            )
    shortest = options.get("prompt_lookup_min")
    longest = options.get("prompt_lookup_max")
    if shortest is not None and longest is not None and shortest > longest:
        raise SettingsError(
            f"prompt_lookup_min={shortest} exceeds prompt_lookup_max={longest}; lower "
            "the one or raise the other in the speculative config"
        )


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_speculative_config(
        self: Any, target_model_config: Any, target_parallel_config: Any
    ) -> Any:
        import vllm.envs as envs

        options = dict(self.speculative_config or {})
        if self.spec_method is not None:
            options.setdefault("method", self.spec_method)
        if self.spec_tokens is not None:
            options.setdefault("num_speculative_tokens", self.spec_tokens)
        if envs.VLLM_USE_V2_MODEL_RUNNER is not False:
            check_options(options)
        return original(self, target_model_config, target_parallel_config)

    return create_speculative_config


PATCHES = (
    Patch(
        "EngineArgs.create_speculative_config",
        (("self", "target_model_config", "target_parallel_config"),),
        _wrap,
    ),
)
