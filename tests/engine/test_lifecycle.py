"""Requests that end early, ids that come back, slots that pass on."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.harness import TOKENS, Texts, add, ngram, outputs, rounds, walk

pytestmark = pytest.mark.vllm

Run = Callable[..., dict[str, Any]]


@pytest.mark.parametrize(("async_scheduling", "trim"), [(True, True), (False, False)])
def test_abort_and_reuse_of_the_same_id(
    async_scheduling: bool, trim: bool, rng: random.Random, texts: Texts, run: Run
) -> None:
    # A late result of the first "x" must not reach the second one. A step ahead, vLLM
    # keeps them apart by a random part of the id that the scheduler sees; without that,
    # it mixes them up with or without speculation.
    prompts, expected = texts.draw(lambda: walk(rng, 24), 6, 8)
    actions = [add("bystander", prompts[0], 8)]
    want = [expected[0]]
    for i in range(8):
        aborted, kept = prompts[1 + i % 5], prompts[1 + (i + 2) % 5]
        actions.append(add("x", aborted, 8))
        actions.append(["step", 1 + i % 3])
        actions.append(["abort", "x"])
        if i % 2:
            actions.append(["step", 1])
        actions.append(add("x", kept, 4))
        actions.append(["step", 5])
        want.append(expected[1 + (i + 2) % 5][:4])
    result = run(
        actions,
        engine={**ngram(3, trim), "max_num_seqs": 3},
        async_scheduling=async_scheduling,
        same_ids=not async_scheduling,
    )
    found = outputs(result)
    assert [found[0], *found[2::2]] == want
    reasons = [request["finish_reason"] for request in result["requests"]]
    assert [reasons[0], *reasons[2::2]] == ["length"] * 9
    for number, token_ids in enumerate(found[1::2]):
        text = expected[1 + number % 5]
        assert token_ids == text[: len(token_ids)]


def test_slot_passes_on_without_its_history(
    rng: random.Random, texts: Texts, run: Run
) -> None:
    # One slot. The first request fills its row with a phrase; the second is the start
    # of that phrase and must not see the rest of it.
    phrase = rng.sample(TOKENS, 4)
    (short,), (short_text,) = texts.draw(lambda: rng.sample(TOKENS, 2), 1, 6)
    long = [*short, *phrase] * 30
    (long,), (long_text,) = texts.draw(lambda: long[rng.randrange(len(short)) :], 1, 6)
    for trim in (True, False):
        result = run(
            [add("long", long, 6), add("short", short, 6)],
            engine={**ngram(4, trim), "max_num_seqs": 1},
            async_scheduling=True,
            record=True,
        )
        assert outputs(result) == [long_text, short_text]
        entries = [e for step in result["records"] for e in step if e["id"] == "short"]
        row = list(short)
        for entry in entries:
            row += entry["emitted"]
            assert set(entry["drafts"]) <= set(row)
        first = entries[0]
        assert first["first_token"]
        if first["emitted"][0] not in short:
            assert first["drafts"] == []


def test_more_drafts_than_a_step_has_room_for(
    rng: random.Random, texts: Texts, run: Run
) -> None:
    # A step holds nine tokens: four requests cannot all have four drafts scheduled.
    prompts, expected = texts.draw(
        lambda: walk(rng, 20),
        4,
        10,
        lambda prompt, text: len(rounds(prompt, text, 4)) < 10,
    )
    result = run(
        [add(f"r{i}", prompt, 10) for i, prompt in enumerate(prompts)],
        engine={**ngram(4), "max_num_batched_tokens": 9},
        async_scheduling=True,
    )
    assert outputs(result) == expected
    assert result["counters"]["verified"] > 0
