"""Counters of real engines, against a count of what every step did."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.harness import Texts, add, ngram, outputs, rounds, suffix, walk

pytestmark = pytest.mark.vllm

NUM_TOKENS = 16
K = 4

Run = Callable[..., dict[str, Any]]


class Recount:
    """The same counters, by comparing each step's tokens with what was drafted.

    Nothing of this looks at the counters' own inputs but the widths verified: a draft
    counts as accepted when the tokens that came back start with it.
    """

    def __init__(self, num_drafts: int) -> None:
        self.counts: dict[str, Any] = dict.fromkeys(
            ("proposed", "verified", "accepted", "never_issued", "invalid", "fillers",
             "rounds", "rounds_with_draft"), 0,
        )  # fmt: skip
        self.verified_at = [0] * num_drafts
        self.accepted_at = [0] * num_drafts
        self.lengths = [0] * (num_drafts + 1)

    def lose(self, draft: list[int]) -> None:
        """Count a draft that no round used."""
        self.counts["proposed"] += len(draft)
        self.counts["never_issued"] += len(draft)

    def round(self, draft: list[int], entry: dict[str, Any]) -> None:
        """Count a round."""
        tried = draft[: entry["width"]]
        accepted = 0
        for drafted, emitted in zip(tried, entry["emitted"][:-1], strict=False):
            if drafted != emitted:
                break
            accepted += 1
        for name, number in (
            ("proposed", len(draft)),
            ("verified", len(tried)),
            ("accepted", accepted),
            ("never_issued", len(draft) - len(tried)),
            ("fillers", entry["width"] - len(tried)),
            ("rounds", 1),
            ("rounds_with_draft", bool(draft)),
        ):
            self.counts[name] += number
        for i in range(len(tried)):
            self.verified_at[i] += 1
        for i in range(accepted):
            self.accepted_at[i] += 1
        self.lengths[accepted] += 1

    def as_dict(self) -> dict[str, Any]:
        """Return it as the engine reports its own."""
        return {
            **self.counts,
            "verified_per_position": self.verified_at,
            "accepted_per_position": self.accepted_at,
            "accepted_lengths": self.lengths,
        }


def recount(result: dict[str, Any], names: list[str]) -> dict[str, Recount]:
    """Count again, by request; ``names`` are those of the result's requests."""
    delivered = {
        name: len(request["token_ids"])
        for name, request in zip(names, result["requests"], strict=True)
    }
    counts = {name: Recount(K) for name in names}
    pending: dict[str, list[int]] = {}
    seen = dict.fromkeys(names, 0)
    for step in result["records"]:
        for entry in step:
            name = entry["id"]
            draft = pending.get(name, [])
            pending[name] = entry["drafts"]
            if entry["first_token"] or not entry["emitted"]:
                # Its prefill, or another one after a preemption.
                counts[name].lose(draft)
            elif seen[name] >= delivered[name]:
                # It had ended, and the engine was a step ahead.
                counts[name].lose(draft)
            else:
                counts[name].round(draft, entry)
            seen[name] += len(entry["emitted"])
    for name, draft in pending.items():
        counts[name].lose(draft)
    return counts


def check(result: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Check the engine's counters and each request's; return the engine's."""
    want = recount(result, names)
    found = dict(result["request_counts"])
    assert sorted(found) == sorted(names)
    for name in names:
        got = {key: value for key, value in found[name].items() if key != "by_source"}
        assert got == want[name].as_dict(), name
    total = result["counts"]
    for key, value in total.items():
        parts = [found[name][key] for name in names]
        if isinstance(value, int):
            assert value == sum(parts), key
        elif isinstance(value, list):
            assert value == [sum(numbers) for numbers in zip(*parts, strict=True)], key
        else:
            for source, numbers in value.items():
                for field, number in numbers.items():
                    assert number == sum(part[source][field] for part in parts)
    by_source = total["by_source"].values()
    for field in ("proposed", "verified", "accepted", "never_issued", "invalid"):
        assert total[field] == sum(numbers[field] for numbers in by_source), field
    return total


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
    total = check(result, names)
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
    total = check(result, ["owner", "asker", "loner"])
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
    check(result, [f"r{i}" for i in range(5)])


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
    check(result, [f"r{i}" for i in range(5)])
