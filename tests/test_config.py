"""Settings: what is accepted; each refusal is one line, before a model loads."""

import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from mrv2_spec.config import Settings, SettingsError, parse_settings
from mrv2_spec.integration.methods import is_served

MAX_MODEL_LEN = 128
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize("additional_config", [None, 7, {}, {"other": {"tie": 1}}])
def test_defaults(additional_config: Any) -> None:
    settings = parse_settings(additional_config)
    assert settings == Settings()
    assert (settings.tie, settings.scoring) == ("latest", "learned")
    assert (settings.trim, settings.trim_explain) == (True, False)
    assert settings.memory_file is None


def test_all_settings() -> None:
    given = {
        "tie": "earliest",
        "scoring": "reference",
        "corpus_tokens": 1,
        "memory_file": "memory.bin",
        "trim": False,
        "cost_file": "costs.json",
        "trim_explain": True,
    }
    assert set(given) == {field.name for field in fields(Settings)}
    assert asdict(parse_settings({"mrv2_spec": given})) == given


BAD_SETTINGS = [
    (
        {"tei": "latest"},
        "additional_config['mrv2_spec'] has the unknown key 'tei'; did you mean 'tie'? "
        "Known keys: ",
    ),
    ({"trim_explane": True}, "did you mean 'trim_explain'?"),
    ({"TRIM": True}, "has the unknown key 'TRIM'; did you mean 'tr"),
    ({3: True}, "has the unknown key 3; did you mean"),
    ({"tie": "last"}, "mrv2_spec.tie='last' must be one of earliest, latest"),
    ({"tie": None}, "mrv2_spec.tie=None must be one of earliest, latest"),
    ({"trim": "no"}, "mrv2_spec.trim='no' must be true or false"),
    ({"trim": 1}, "mrv2_spec.trim=1 must be true or false"),
    ({"trim_explain": 1}, "mrv2_spec.trim_explain=1 must be true or false"),
    ({"corpus_tokens": 1.5}, "mrv2_spec.corpus_tokens=1.5 must be a whole number"),
    ({"corpus_tokens": True}, "mrv2_spec.corpus_tokens=True must be a whole number"),
    ({"scoring": "best"}, "mrv2_spec.scoring='best' must be one of learned, reference"),
    ({"corpus_tokens": 0}, "mrv2_spec.corpus_tokens=0 must be a whole number of at"),
    ({"memory_file": ""}, "mrv2_spec.memory_file='' must be the path of a file"),
    ({"cost_file": ""}, "mrv2_spec.cost_file='' must be the path of a file"),
    ({"memory_file": 3}, "mrv2_spec.memory_file=3 must be the path of a file"),
    (["tie"], "additional_config['mrv2_spec']=['tie'] must be an object"),
    (None, "additional_config['mrv2_spec']=None must be an object"),
]


@pytest.mark.parametrize(("given", "message"), BAD_SETTINGS)
def test_bad_settings_are_named(given: Any, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings({"mrv2_spec": given})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def configure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Return a function that makes vLLM's configuration of a model without weights."""
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    from mrv2_spec import integration

    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 20,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_MODEL_LEN,
    }
    (tmp_path / "config.json").write_text(json.dumps(model))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def make(
        speculative_config: dict[str, Any], settings: Any = None, **kwargs: Any
    ) -> Any:
        return arg_utils.EngineArgs(
            model=str(tmp_path),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=MAX_MODEL_LEN,
            dtype="float32",
            speculative_config=speculative_config,
            additional_config={} if settings is None else {"mrv2_spec": settings},
            **kwargs,
        ).create_engine_config()

    integration.install()
    yield make
    integration.uninstall()


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix"])
def test_methods_run_on_v2(method: str, configure: Callable[..., Any]) -> None:
    config = configure({**NGRAM, "method": method})
    assert config.use_v2_model_runner
    assert config._get_v2_model_runner_unsupported_features() == []
    # The mark goes along to other processes.
    there = pickle.loads(pickle.dumps(config))
    assert is_served(config.speculative_config)
    assert is_served(there.speculative_config)


@pytest.mark.parametrize(("asked", "served"), [(None, True), ("0", False)])
def test_the_runner_decides_whether_the_plugin_serves(
    asked: str | None,
    served: bool,
    configure: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Left alone, vLLM takes its V2 runner for n-grams.
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    if asked is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    config = configure(NGRAM)
    assert config.use_v2_model_runner is served
    assert is_served(config.speculative_config) is served
    assert not is_served(None)


def test_without_the_flag_the_v1_runner_goes_on_to_serve_its_own(
    configure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM picks a runner by what V2 does not support.
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    config = configure(
        {"method": "custom_class", "model": "a.B", "num_speculative_tokens": 2}
    )
    unsupported = config._get_v2_model_runner_unsupported_features()
    assert "speculative method 'custom_class'" in unsupported
    assert not config.use_v2_model_runner
    assert not is_served(config.speculative_config)


@pytest.mark.parametrize(
    ("speculative_config", "message"),
    [
        (
            {**NGRAM, "num_speculative_tokens": MAX_MODEL_LEN + 1},
            "num_speculative_tokens=129 exceeds max_model_len=128; lower it",
        ),
        (
            {**NGRAM, "prompt_lookup_max": 65},
            "prompt_lookup_max=65 exceeds 64; longer matches find nothing",
        ),
        (
            {**NGRAM, "enable_adaptive_verification": True},
            "enable_adaptive_verification=true is for drafters with a model; remove",
        ),
        (
            {
                "method": "custom_class",
                "model": "no_such_package.Class",
                "num_speculative_tokens": 2,
            },
            "model='no_such_package.Class' of method 'custom_class' cannot be loaded",
        ),
        (
            {"method": "suffix", "num_speculative_tokens": MAX_MODEL_LEN},
            "num_speculative_tokens=128 exceeds ",
        ),
    ],
)
def test_refused_in_one_line(
    speculative_config: dict[str, Any], message: str, configure: Callable[..., Any]
) -> None:
    with pytest.raises(SettingsError) as caught:
        configure(speculative_config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"prompt_lookup_min": 5, "prompt_lookup_max": 4},
            "prompt_lookup_min=5 exceeds prompt_lookup_max=4",
        ),
        ({"prompt_lookup_min": 0, "prompt_lookup_max": 4}, "prompt_lookup_min=0 must"),
        ({"prompt_lookup_min": -2, "prompt_lookup_max": 4}, "prompt_lookup_min=-2"),
        ({"prompt_lookup_min": -2, "prompt_lookup_max": -1}, "prompt_lookup_min=-2"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0 must"),
        ({"num_speculative_tokens": -3}, "num_speculative_tokens=-3 must"),
    ],
)
def test_options_out_of_range_stop_the_start(
    changes: dict[str, int], message: str, configure: Callable[..., Any]
) -> None:
    with pytest.raises(SettingsError) as caught:
        configure({**NGRAM, **changes})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("speculative_config", "settings", "message"),
    [
        (NGRAM, {"scoring": "reference"}, "mrv2_spec.scoring='reference' is read by"),
        (NGRAM, {"corpus_tokens": 7}, "mrv2_spec.corpus_tokens=7 is read by method"),
        (
            {"method": "suffix", "num_speculative_tokens": 4},
            {"tie": "latest"},
            "mrv2_spec.tie='latest' is read by method 'ngram' only",
        ),
    ],
)
def test_settings_of_another_method_stop_the_start(
    speculative_config: dict[str, Any],
    settings: dict[str, Any],
    message: str,
    configure: Callable[..., Any],
) -> None:
    with pytest.raises(SettingsError) as caught:
        configure(speculative_config, settings)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [bad for bad in BAD_SETTINGS if bad[0] not in (None, {3: True})],
)
def test_bad_settings_stop_the_start(
    given: Any, message: str, configure: Callable[..., Any]
) -> None:
    with pytest.raises(SettingsError) as caught:
        configure(NGRAM, given)
    assert message in str(caught.value)


class Namespace(dict[str, Any]):
    """Attributes by name, None for those not given."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0 must be at least 1"),
        ({"num_speculative_tokens": None}, "num_speculative_tokens=None must be at"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min=0 and prompt_lookup_max=4 must"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_min=5 and prompt_lookup_max=4 must"),
    ],
)
def test_refused_even_if_vllm_did_not(changes: dict[str, Any], message: str) -> None:
    from mrv2_spec.integration.methods import check_settings

    spec_config = Namespace(NGRAM, prompt_lookup_min=2, prompt_lookup_max=4)
    vllm_config = Namespace(
        speculative_config=spec_config,
        model_config=Namespace(max_model_len=MAX_MODEL_LEN),
    )
    check_settings(vllm_config)
    spec_config.update(changes)
    with pytest.raises(SettingsError) as caught:
        check_settings(vllm_config)
    assert message in str(caught.value)


def test_watermarking_is_refused() -> None:
    from mrv2_spec.integration.methods import check_settings

    spec_config = Namespace(NGRAM, prompt_lookup_min=2, prompt_lookup_max=4)
    vllm_config = Namespace(
        speculative_config=spec_config,
        model_config=Namespace(max_model_len=MAX_MODEL_LEN),
        watermark_config=object(),
    )
    with pytest.raises(SettingsError, match="'ngram' does not support watermarking"):
        check_settings(vllm_config)
