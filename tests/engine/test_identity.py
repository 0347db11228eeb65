"""Speculation changes no token, whatever else the engine does, and counts add up."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from mrv2_spec.kernels.propose_ngram import propose_ngram_ref
from tests.engine.harness import Texts, add, ngram, outputs, rounds, walk

pytestmark = pytest.mark.vllm

NUM_TOKENS = 14
# Five requests in three slots; prompts are computed in chunks beside decoding requests.
CROWDED = {"max_num_seqs": 3, "max_num_batched_tokens": 40}

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def crowd(worker: Any) -> tuple[list[list[Any]], list[list[int]]]:
    """Return the requests, and the texts that must come back."""
    rng = random.Random()
    prompts, expected = Texts(worker).draw(
        lambda: walk(rng, rng.randrange(20, 70)),
        5,
        NUM_TOKENS,
        lambda prompt, text: len(rounds(prompt, text, 4)) <= NUM_TOKENS - 3,
    )
    # The same prefix again: with prefix caching its blocks are reused.
    prompts[4] = prompts[0]
    expected[4] = expected[0]
    actions = [add(f"r{i}", p, NUM_TOKENS) for i, p in enumerate(prompts)]
    return actions, expected


def show(crowd: tuple[list[list[Any]], list[list[int]]]) -> str:
    return f"prompts: {[action[2] for action in crowd[0]]}"


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_without_speculation(
    async_scheduling: bool, crowd: tuple[Any, Any], run: Run
) -> None:
    actions, expected = crowd
    result = run(actions, engine=CROWDED, async_scheduling=async_scheduling)
    assert outputs(result) == expected, show(crowd)
    assert result["longest_run"] == 1


@pytest.mark.parametrize(
    ("async_scheduling", "trim", "caching"),
    [
        (False, True, True),
        (False, False, False),
        (True, True, False),
        (True, True, True),
        (True, False, True),
    ],
)
def test_with_speculation(
    async_scheduling: bool,
    trim: bool,
    caching: bool,
    crowd: tuple[Any, Any],
    run: Run,
) -> None:
    actions, expected = crowd
    result = run(
        actions,
        engine={
            **CROWDED,
            **ngram(4, trim),
            "enable_prefix_caching": caching,
        },
        async_scheduling=async_scheduling,
    )
    assert outputs(result) == expected, show(crowd)
    totals = result["counters"]
    assert totals["accepted"] > 0, show(crowd)
    assert totals["rounds_with_draft"] > 0
    (line,) = result["log"]
    assert line.startswith("mrv2-spec: method ngram (NgramSpeculator, match 1..3")
    assert f"async scheduling {'on' if async_scheduling else 'off'}" in line
    if trim:
        assert ", k=4, trimmer on, V2 runner" in line
        assert totals["never_issued"] > 0
    else:
        assert "trimmer off: switched off by mrv2_spec.trim=false" in line
        assert totals["fillers"] > 0


def test_logprobs(rng: random.Random, texts: Texts, run: Run) -> None:
    # Where a request's rows begin is known exactly on the device only.
    prompts, expected = texts.draw(
        lambda: walk(rng, 30),
        3,
        NUM_TOKENS,
        lambda prompt, text: len(rounds(prompt, text, 4)) <= NUM_TOKENS - 3,
    )
    actions = [
        add(f"r{i}", prompt, NUM_TOKENS, logprobs=2) for i, prompt in enumerate(prompts)
    ]
    plain = run(actions, engine={})
    trimmed = run(actions, engine=ngram(4), async_scheduling=True)
    assert outputs(plain) == outputs(trimmed) == expected
    assert trimmed["counters"]["accepted"] > 0
    for a, b in zip(plain["requests"], trimmed["requests"], strict=True):
        assert len(a["logprobs"]) == len(b["logprobs"]) == NUM_TOKENS
        for i, token in enumerate(a["token_ids"]):
            assert set(a["logprobs"][i]) == set(b["logprobs"][i])
            assert str(token) in a["logprobs"][i]
            assert b["logprobs"][i] == pytest.approx(a["logprobs"][i], abs=1e-3)


def test_long_rows_in_many_chunks(rng: random.Random, texts: Texts, run: Run) -> None:
    # The prompts are longer than what a step computes, and a row is many chunks of the
    # n-gram kernel: its scratch must survive rows that are still in their prefill.
    # Beside prompts, two requests may have some of a step's tokens for drafts: as much
    # here as all three each need.
    prompts, expected = texts.draw(lambda: walk(rng, 150), 2, 10)
    result = run(
        [add(f"r{i}", p, 10) for i, p in enumerate(prompts)],
        engine={**ngram(3), "max_num_seqs": 2, "max_num_batched_tokens": 48},
        async_scheduling=True,
        kernel_block=16,
        record=True,
        constants={"mrv2_spec.integration.sleeping.SHARE_OF_FULL_STEP": 8},
    )
    assert outputs(result) == expected
    check_drafts(result["records"], dict(enumerate(prompts)), num_drafts=3)


def test_dynamic_number_of_drafts(rng: random.Random, texts: Texts, run: Run) -> None:
    prompts, expected = texts.draw(lambda: walk(rng, 40), 3, NUM_TOKENS)
    engine = ngram(4)
    # Four drafts for one request, one for two, none for three.
    engine["speculative_config"]["num_speculative_tokens_per_batch_size"] = [
        (1, 1, 4),
        (2, 2, 1),
        (3, 3, 0),
    ]
    lengths = (NUM_TOKENS, 8, 4)
    result = run(
        [
            add(f"r{i}", prompt, length)
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ],
        engine={**engine, "max_num_seqs": 3},
        async_scheduling=True,
        record=True,
    )
    assert outputs(result) == [
        text[:length] for text, length in zip(expected, lengths, strict=True)
    ]
    most: dict[int, int] = {}
    for step in result["records"]:
        drafts = max((len(entry["drafts"]) for entry in step), default=0)
        most[len(step)] = max(most.get(len(step), 0), drafts)
    assert most.get(3, 0) == 0
    assert most.get(2, 0) <= 1
    assert 1 < most[1] <= 4


def check_drafts(
    records: list[Any], prompts: dict[int, list[int]], num_drafts: int
) -> None:
    """Check every draft against the reference on the request's own tokens."""
    rows = {f"r{i}": list(prompt) for i, prompt in prompts.items()}
    seen = 0
    for step in records:
        for entry in step:
            row = rows[entry["id"]]
            row += entry["emitted"]
            want: list[int] = []
            if entry["emitted"]:
                want, _ = propose_ngram_ref(
                    row,
                    num_steps=num_drafts,
                    min_n=1,
                    max_n=3,
                    max_model_len=256,
                    latest=True,
                )
            assert entry["drafts"] == want
            seen += len(want)
    assert seen > 0
