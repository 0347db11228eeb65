"""Counters of real engines, against a count of what every step did."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.harness import Texts, add, ngram, outputs, rounds, suffix, walk
from tests.engine.recount import check

pytestmark = pytest.mark.vllm

NUM_TOKENS = 16
K = 4

Run = Callable[..., dict[str, Any]]


def draw(
    texts: Texts, rng: random.Random, number: int
) -> tuple[list[list[int]], list[list[int]]]:
    return texts.draw(
        lambda: walk(rng, rng.randrange(20, 50)),
        number,
        NUM_TOKENS,
        lambda prompt, text: len(rounds(prompt, text, K)) <= NUM_TOKENS - 3,
    )


@pytest.mark.parametrize(
    ("method", "async_scheduling", "trim"),
    [("ngram", True, True), ("ngram", True, False), ("suffix", False, True)],
)
def test_equal_to_a_count_of_every_step(
    method: str,
    async_scheduling: bool,
    trim: bool,
    rng: random.Random,
    texts: Texts,
    run: Run,
) -> None:
    # Five requests in three slots; prompts are computed in chunks beside others.
    prompts, expected = draw(texts, rng, 5)
    drafter = ngram(K, trim) if method == "ngram" else suffix(K)
    result = run(
        [add(f"r{i}", prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)],
        engine={
            **drafter,
            "max_num_seqs": 3,
            "max_num_batched_tokens": 40,
            "per_request_spec_decode_metrics": "detailed",
        },
        async_scheduling=async_scheduling,
        record=True,
    )
    assert outputs(result) == expected
    names = [f"r{i}" for i in range(len(prompts))]
    total = check(result, K, names)
    assert total["proposed"] > 0
    if not trim:
        assert total["accepted"] > 0
    found = dict(result["request_counts"])
    for name, request in zip(names, result["requests"], strict=True):
        # vLLM's own metrics of a request know no fillers, and carry ours.
        theirs, ours = request["spec_decode_metrics"], found[name]
        assert theirs["num_draft_tokens"] == ours["verified"]
        assert theirs["num_accepted_draft_tokens"] == ours["accepted"]
        assert sum(theirs["per_step_drafted"]) == ours["verified"]
        at_its_end = theirs["mrv2_spec"]
        pending = ours["proposed"] - at_its_end["proposed"]
        assert 0 <= pending <= 2 * K
        assert ours["never_issued"] - at_its_end["never_issued"] == pending
        for key in ("verified", "accepted", "rounds", "accepted_lengths"):
            assert at_its_end[key] == ours[key]


@pytest.mark.parametrize(
    ("async_scheduling", "scoring"),
    [(True, "learned"), (False, "learned"), (True, "reference")],
)
def test_each_draft_counts_under_its_source(
    async_scheduling: bool, scoring: str, rng: random.Random, texts: Texts, run: Run
) -> None:
    # No token comes twice in the asker's prompt and reply: its own row has nothing.
    (prompt,), (text,) = texts.draw(
        lambda: walk(rng, 1), 1, 12, lambda prompt, text: len({*prompt, *text[:7]}) == 8
    )
    # The loner has its own row only, in which the ring of tokens comes round.
    (loop,), (reply,) = texts.draw(
        lambda: walk(rng, 50),
        1,
        NUM_TOKENS,
        lambda prompt, text: len(rounds(prompt, text, K)) <= NUM_TOKENS - 3,
    )
    engine = suffix(K, trim=False)
    engine["additional_config"]["mrv2_spec"]["scoring"] = scoring
    result = run(
        [
            add("owner", prompt, 12),
            ["step", 40],
            add("asker", prompt, 7),
            add("loner", loop, NUM_TOKENS, extra_args={"mrv2_spec_read": False}),
        ],
        engine={**engine, "max_num_seqs": 2, "enable_prefix_caching": False},
        async_scheduling=async_scheduling,
        record=True,
    )
    assert outputs(result) == [text, text[:7], reply]
    total = check(result, K, ["owner", "asker", "loner"])
    found = dict(result["request_counts"])
    asker, loner = found["asker"], found["loner"]
    assert asker["accepted"] > 0 and loner["accepted"] > 0
    for field, number in loner["by_source"]["own"].items():
        assert number == loner[field]
        assert loner["by_source"]["memory"][field] == 0
    for field in ("verified", "accepted"):
        assert asker["by_source"]["memory"][field] == asker[field]
    # What was made of tokens past the asker's end, some of them again, no round used.
    own = asker["by_source"]["own"]
    assert own["proposed"] == own["never_issued"]
    if scoring == "learned":
        # The owner was alone: the memory had nothing that was not its own.
        assert total["by_source"]["memory"] == found["asker"]["by_source"]["memory"]


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_nothing_is_lost_at_abort(
    async_scheduling: bool, rng: random.Random, texts: Texts, run: Run
) -> None:
    prompts, expected = draw(texts, rng, 4)
    actions = [add(f"r{i}", prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)]
    actions += [["step", 4], ["abort", "r1"], ["step", 1], ["abort", "r3"]]
    actions.append(add("r4", prompts[1], NUM_TOKENS))
    result = run(
        actions,
        engine={**ngram(K), "max_num_seqs": 4},
        async_scheduling=async_scheduling,
        record=True,
    )
    found = outputs(result)
    assert [found[0], found[2], found[4]] == [expected[0], expected[2], expected[1]]
    assert len(found[1]) < NUM_TOKENS
    check(result, K, [f"r{i}" for i in range(5)])


def test_nothing_is_lost_at_preemption(
    rng: random.Random, texts: Texts, run: Run
) -> None:
    num_tokens = 36
    prompts, expected = texts.draw(
        lambda: walk(rng, rng.randrange(26, 32)), 5, num_tokens
    )
    result = run(
        [add(f"r{i}", prompt, num_tokens) for i, prompt in enumerate(prompts)],
        engine={
            **ngram(K),
            "num_gpu_blocks_override": 4,
            "max_model_len": 96,
            "max_num_seqs": 5,
            "enable_prefix_caching": False,
        },
        async_scheduling=True,
        record=True,
    )
    assert outputs(result) == expected
    assert result["preemptions"] >= 5
    check(result, K, [f"r{i}" for i in range(5)])
