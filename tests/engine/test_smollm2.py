"""A trained model: speculation a step ahead changes no token of real text."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from mrv2_spec.demo import smollm2
from tests.engine.harness import add, ngram, outputs

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TEXTS = [
    "Repeat this list: red apple, green apple, red pear, green pear.\n"
    "red apple, green apple, red pear, green pear.\nred apple,",
    '{"name": "Ada", "born": 1815}\n{"name": "Alan", "born": 1912}\n{"name":',
]
NUM_TOKENS = 24


@pytest.mark.skipif(
    importlib.util.find_spec(smollm2.PACKAGE) is None,
    reason=f"{smollm2.REQUIREMENT} is not installed",
)
def test_identical(run: Callable[..., dict[str, Any]]) -> None:
    from tokenizers import Tokenizer

    model = smollm2.ensure_model()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    actions = [
        add(f"r{i}", tokenizer.encode(text).ids, NUM_TOKENS)
        for i, text in enumerate(TEXTS)
    ]
    job = {"model": str(model), "async_scheduling": True}
    plain = run(actions, engine={}, **job)
    assert {len(text) for text in outputs(plain)} == {NUM_TOKENS}
    for trim in (True, False):
        speculated = run(actions, engine=ngram(8, trim), **job)
        assert outputs(speculated) == outputs(plain)
        assert speculated["counters"]["accepted"] > NUM_TOKENS / 4
        assert speculated["steps"] < plain["steps"]
