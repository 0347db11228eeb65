"""The end of a request inside a run of accepted drafts, and at the length limit."""

import random
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest

from tests.engine.harness import TOKENS, Texts, add, ngram, outputs, rounds, walk

pytestmark = pytest.mark.vllm

K = 5
NUM_TOKENS = 24
Run = Callable[..., dict[str, Any]]


def inside_runs(prompt: list[int], text: list[int]) -> list[int]:
    """Return the places in a text that are neither the first nor last of a run."""
    inside = []
    emitted = rounds(prompt, text, K)
    for length, end in zip(emitted, accumulate(emitted), strict=True):
        inside += range(end - length + 1, end - 1)
    return inside


def stops_inside_runs(prompt: list[int], text: list[int]) -> list[int]:
    """Return those of the places where a token is in the text for the first time."""
    return [i for i in inside_runs(prompt, text) if text[i] not in text[:i]]


@pytest.mark.parametrize(("async_scheduling", "trim"), [(True, True), (False, False)])
def test_token_cap_inside_an_accepted_run(
    async_scheduling: bool, trim: bool, rng: random.Random, texts: Texts, run: Run
) -> None:
    prompts, expected = texts.draw(
        lambda: walk(rng, 40),
        2,
        NUM_TOKENS,
        lambda prompt, text: bool(inside_runs(prompt, text)),
    )
    caps = [
        rng.choice(inside_runs(prompt, text)) + 1
        for prompt, text in zip(prompts, expected, strict=True)
    ]
    # One at a time and all drafts verified: the runs are those that were foreseen.
    result = run(
        [add(f"r{i}", prompt, caps[i]) for i, prompt in enumerate(prompts)],
        engine={**ngram(K, trim), "max_num_seqs": 1},
        async_scheduling=async_scheduling,
    )
    assert outputs(result) == [
        text[:cap] for text, cap in zip(expected, caps, strict=True)
    ]
    assert [r["finish_reason"] for r in result["requests"]] == ["length"] * 2
    assert result["longest_run"] > 1


@pytest.mark.parametrize(("async_scheduling", "trim"), [(True, True), (False, False)])
def test_stop_token_inside_an_accepted_run(
    async_scheduling: bool, trim: bool, rng: random.Random, texts: Texts, run: Run
) -> None:
    prompts, expected = texts.draw(
        lambda: walk(rng, 40),
        2,
        NUM_TOKENS,
        lambda prompt, text: bool(stops_inside_runs(prompt, text)),
    )
    ends = [
        rng.choice(stops_inside_runs(prompt, text))
        for prompt, text in zip(prompts, expected, strict=True)
    ]
    result = run(
        [
            # The cap comes later, inside the same run or behind it.
            add(f"r{i}", prompt, ends[i] + 1 + i, stop_token_ids=[text[ends[i]]])
            for i, (prompt, text) in enumerate(zip(prompts, expected, strict=True))
        ],
        engine={**ngram(K, trim), "max_num_seqs": 1},
        async_scheduling=async_scheduling,
    )
    assert outputs(result) == [
        text[: end + 1] for text, end in zip(expected, ends, strict=True)
    ]
    assert [r["finish_reason"] for r in result["requests"]] == ["stop"] * 2


@pytest.mark.parametrize(("async_scheduling", "trim"), [(True, True), (False, False)])
def test_length_limit(
    async_scheduling: bool, trim: bool, rng: random.Random, texts: Texts, run: Run
) -> None:
    limit = 100
    lengths = iter(range(1 << 30))

    def prompt() -> list[int]:
        pair = rng.sample(TOKENS, 2)
        return (pair * limit)[: 95 + next(lengths) % 5]

    prompts, expected = texts.draw(prompt, 10, 5)
    result = run(
        [add(f"r{i}", prompt, 50) for i, prompt in enumerate(prompts)],
        engine={**ngram(8, trim), "max_model_len": limit, "max_num_seqs": 10},
        async_scheduling=async_scheduling,
        record=True,
    )
    assert {len(prompt) for prompt in prompts} == set(range(95, 100))
    for request, prompt, text in zip(
        result["requests"], prompts, expected, strict=True
    ):
        assert request["finish_reason"] == "length"
        assert request["token_ids"] == text[: limit - len(prompt)]
    for step in result["records"]:
        for entry in step:
            assert len(entry["drafts"]) <= 4
