"""Drafting that does not pay sleeps, wakes when it would, and changes no token."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import Texts, add, ngram, outputs, rounds, suffix, walk
from tests.engine.recount import check

pytestmark = pytest.mark.vllm

K = 4
NUM_TOKENS = 40
POLICY = "mrv2_spec.policy."
DATA = Path(__file__).resolve().parents[1] / "data" / "restless.json"
# By dotted path: one that is no longer there is an error here, not where the file is
# read on a GPU.
RESTLESS = {
    POLICY + name: value
    for name, value in json.loads(DATA.read_text())["policy"].items()
} | {
    # So dear a row that only drafts which come true more often than not pay.
    "mrv2_spec.step_costs._TOKENS_OF_TWICE_THE_COST": {"cpu": 2.0, "cuda": 2.0},
}


def sleeps(log: list[str]) -> tuple[int, int]:
    """Return how often drafting fell asleep and how often it woke."""
    return (
        sum("drafting sleeps" in line for line in log),
        sum("drafting wakes" in line for line in log),
    )


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_sleeping_changes_no_token(
    async_scheduling: bool,
    rng: random.Random,
    texts: Texts,
    run: Callable[..., dict[str, Any]],
) -> None:
    num_tokens = 2 * NUM_TOKENS
    prompts, expected = texts.draw(
        lambda: walk(rng, 40),
        3,
        num_tokens,
        lambda prompt, text: len(rounds(prompt, text, K)) < num_tokens - 16,
    )
    engine = ngram(K)
    engine["additional_config"]["mrv2_spec"]["trim_explain"] = True
    # The second look is in the eighth step asleep: those between have no drafts.
    two_looks = {POLICY + "_MIN_STEPS_TO_WAKE": 2, POLICY + "_MAX_STEPS_TO_WAKE": 2}
    result = run(
        [add(f"r{i}", prompt, num_tokens) for i, prompt in enumerate(prompts)],
        engine=engine,
        async_scheduling=async_scheduling,
        constants=RESTLESS | two_looks,
        record=True,
    )
    assert outputs(result) == expected
    fell_asleep, woke = sleeps(result["log"])
    assert fell_asleep > 0 and woke > 0, result["log"]
    totals = result["counters"]
    assert totals["accepted"] > 0
    # Most steps asleep do not ask the drafter at all; without async scheduling all do.
    assert (result["idle_records"] > 0) == async_scheduling
    # Steps without any draft count too, though nothing is gathered for them. A filler
    # may be right, and what is accepted past a request's end nobody gets.
    decoded = sum(len(tokens) - 1 for tokens in expected)
    most_saved = totals["accepted"] + totals["fillers"]
    assert decoded - most_saved <= totals["rounds"] <= decoded
    settled = ("verified", "invalid", "never_issued")
    assert totals["proposed"] == sum(totals[name] for name in settled)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_asleep_every_draft_is_counted_once(
    method: str, rng: random.Random, texts: Texts, run: Callable[..., dict[str, Any]]
) -> None:
    # Requests end one by one, some of them while drafting sleeps, and leave drafts.
    num_tokens = [rng.randrange(6, NUM_TOKENS) for _ in range(7)]
    prompts, expected = texts.draw(lambda: walk(rng, 40), 7, NUM_TOKENS)
    result = run(
        [
            add(f"r{i}", prompt, number)
            for i, (prompt, number) in enumerate(zip(prompts, num_tokens, strict=True))
        ],
        engine=(ngram(8) if method == "ngram" else suffix(8)) | {"max_num_seqs": 4},
        async_scheduling=True,
        constants=RESTLESS,
        record=True,
    )
    assert outputs(result) == [
        text[:number] for text, number in zip(expected, num_tokens, strict=True)
    ]
    check(result, 8, [f"r{i}" for i in range(7)])


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_places_cost_a_long_prompt_no_step(
    async_scheduling: bool,
    rng: random.Random,
    texts: Texts,
    run: Callable[..., dict[str, Any]],
) -> None:
    # 48 tokens of each step are the prompt's while two requests decode, but of the
    # first, in which both still have all their places: 16 + 48 + 48 + 38. With an
    # eighth of the steps for places it would take one step more.
    first, told = texts.draw(lambda: walk(rng, 20), 2, 2 * NUM_TOKENS)
    (late,), (answer,) = texts.draw(lambda: walk(rng, 150), 1, 4)
    result = run(
        [
            *(add(f"r{i}", prompt, 2 * NUM_TOKENS) for i, prompt in enumerate(first)),
            ["step", 16],
            add("late", late, 4),
        ],
        engine=ngram(16) | {"max_num_batched_tokens": 50, "max_num_seqs": 3},
        async_scheduling=async_scheduling,
        record=True,
        constants={
            POLICY + "_MIN_STEPS_TO_SLEEP": 1000,
            POLICY + "_MAX_STEPS_TO_SLEEP": 1000,
        },
    )
    assert outputs(result) == [*told, answer]
    assert result["counters"]["accepted"] > 0
    with_late = [
        step
        for step in result["records"]
        if any(entry["id"] == "late" for entry in step)
    ]
    began = [
        any(entry["id"] == "late" and entry["emitted"] for entry in step)
        for step in with_late
    ]
    assert began.index(True) == 3
    assert all(len(step) == 3 for step in with_late[:4])


@pytest.mark.parametrize("async_scheduling", [True, False])
# Six requests with eight places each want 54 tokens of a step's 24, or of 8, which
# leave no request a place.
@pytest.mark.parametrize("num_tokens_per_step", [24, 8])
def test_places_leave_room_for_every_request(
    num_tokens_per_step: int,
    async_scheduling: bool,
    rng: random.Random,
    texts: Texts,
    run: Callable[..., dict[str, Any]],
) -> None:
    prompts, expected = texts.draw(lambda: walk(rng, 4), 7, NUM_TOKENS)
    *first, late = (
        add(f"r{i}", prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)
    )
    result = run(
        [*first, ["step", 16], late],
        engine=ngram(8)
        | {"max_num_batched_tokens": num_tokens_per_step, "max_num_seqs": 7},
        async_scheduling=async_scheduling,
        record=True,
        constants={
            POLICY + "_MIN_STEPS_TO_SLEEP": 1000,
            POLICY + "_MAX_STEPS_TO_SLEEP": 1000,
        },
    )
    assert outputs(result) == expected
    if num_tokens_per_step == 24:
        # Of 8, only the last request to end has any: it may draft nothing right.
        assert result["counters"]["accepted"] > 0
    # Until the scheduler has heard of the trimmer, and all prompts had their turn.
    steps = [{entry["id"] for entry in step} for step in result["records"][12:]]
    for req_id in set().union(*steps):
        took_part = [req_id in step for step in steps]
        begin = took_part.index(True)
        last = len(took_part) - took_part[::-1].index(True)
        assert all(took_part[begin:last]), (req_id, took_part)
    # It need not wait until any of those before it has ended.
    assert any(len(step) == 7 for step in steps)
