"""Options that cannot work are refused in one line, before vLLM looks at them."""

from types import SimpleNamespace
from typing import Any

import pytest

from mrv2_spec.config import SettingsError
from mrv2_spec.integration.user_input import PATCHES, check_options

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens=0 must be"),
        ({**NGRAM, "num_speculative_tokens": "x"}, "num_speculative_tokens='x' must"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens=True"),
        ({**NGRAM, "prompt_lookup_min": 0}, "prompt_lookup_min=0 must be a whole"),
        ({**NGRAM, "prompt_lookup_max": -1}, "prompt_lookup_max=-1 must be a whole"),
        ({**NGRAM, "prompt_lookup_min": 2.5}, "prompt_lookup_min=2.5 must be a whole"),
        (
            {**NGRAM, "prompt_lookup_min": 5, "prompt_lookup_max": 4},
            "prompt_lookup_min=5 exceeds prompt_lookup_max=4",
        ),
        (
            {**SUFFIX, "suffix_decoding_max_tree_depth": 0},
            "suffix_decoding_max_tree_depth=0 must be a whole number of at least 1",
        ),
        (
            {**SUFFIX, "suffix_decoding_max_cached_requests": -1},
            "suffix_decoding_max_cached_requests=-1 must be",
        ),
        (
            {**SUFFIX, "suffix_decoding_max_spec_factor": -0.5},
            "suffix_decoding_max_spec_factor=-0.5 must be a number of at least 0",
        ),
        (
            {**SUFFIX, "suffix_decoding_min_token_prob": 1.5},
            r"suffix_decoding_min_token_prob=1.5 must be a number in \[0, 1\]",
        ),
        (
            {**SUFFIX, "suffix_decoding_min_token_prob": float("nan")},
            "suffix_decoding_min_token_prob=nan must be",
        ),
    ],
)
def test_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        check_options(options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        NGRAM,
        {**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 4},
        {**SUFFIX, "suffix_decoding_max_cached_requests": 0},
        {**SUFFIX, "suffix_decoding_min_token_prob": 1},
        # Another drafter's options are vLLM's business.
        {"method": "eagle", "num_speculative_tokens": 0},
    ],
)
def test_taken(options: dict[str, Any]) -> None:
    check_options(options)


def test_the_hook_sees_options_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    seen: list[Any] = []
    hook = PATCHES[0].wrap(lambda *args: seen.append(args) or "config")
    args = SimpleNamespace(
        speculative_config={"prompt_lookup_max": 4}, spec_method="ngram", spec_tokens=0
    )
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(SettingsError, match="num_speculative_tokens=0"):
        hook(args, None, None)
    assert not seen
    args.spec_tokens = 3
    assert hook(args, None, None) == "config"
    # On the V1 runner vLLM's own drafters run, and vLLM's own checks.
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    args.spec_tokens = 0
    assert hook(args, None, None) == "config"
