"""Counters on the host: ratios, sums, positions and lengths."""

import json
import random

import numpy as np
import pytest

from mrv2_spec.counters import (
    ACCEPTED,
    SOURCES,
    VERIFIED,
    DraftCounts,
    Totals,
    add_up,
    vector_size,
)


def random_counts(rng: random.Random, num_drafts: int) -> DraftCounts:
    counts = DraftCounts(num_drafts)
    for _ in range(rng.randrange(30)):
        source, length = rng.randrange(len(SOURCES)), num_drafts
        for kind in range(len(counts.lengths)):
            length = rng.randint(0, length)
            counts.lengths[kind, source, length] += 1
    counts.values[-3:] = [rng.randrange(9) for _ in range(3)]
    return counts


def test_ratios_without_traffic() -> None:
    totals = Totals()
    assert totals.coverage == totals.acceptance == totals.mean_acceptance_length == 0.0
    assert totals.grammar_survival == totals.draft_yield == 0.0
    assert DraftCounts(4).totals() == totals


def test_rounds_without_drafts() -> None:
    totals = Totals(rounds=7)
    assert totals.coverage == totals.acceptance == totals.draft_yield == 0.0
    assert totals.mean_acceptance_length == 1.0


@pytest.mark.parametrize(
    ("totals", "survival", "acceptance", "draft_yield"),
    [
        (
            Totals(proposed=1000, invalid=200, verified=800, accepted=600),
            0.8,
            0.75,
            0.6,
        ),
        # The same acceptance, and more accepted work for the drafts made.
        (Totals(proposed=1000, verified=1000, accepted=750), 1.0, 0.75, 0.75),
        (Totals(proposed=1000, verified=1000, accepted=600), 1.0, 0.6, 0.6),
    ],
)
def test_three_denominators(
    totals: Totals, survival: float, acceptance: float, draft_yield: float
) -> None:
    assert totals.grammar_survival == survival
    assert totals.acceptance == acceptance
    assert totals.draft_yield == draft_yield


def test_mean_acceptance_length_counts_rounds_and_not_drafts() -> None:
    assert Totals(rounds=100, accepted=180).mean_acceptance_length == 2.8


def test_positions_and_lengths() -> None:
    counts = DraftCounts(3)
    # One round with each of these (verified, accepted) lengths, two of them from the
    # memory.
    for source, verified, accepted in [(0, 3, 3), (0, 3, 1), (1, 2, 0), (1, 1, 1)]:
        lengths = (3, 3, verified, accepted)
        for kind, length in enumerate(lengths):
            counts.lengths[kind, source, length] += 1
    counts.lengths[:, 0, 0] += 1  # and one without a draft
    assert counts.at(VERIFIED).tolist() == [[2, 2, 2], [2, 1, 0]]
    assert counts.at(ACCEPTED).tolist() == [[2, 1, 1], [1, 0, 0]]
    assert counts.accepted_lengths() == [2, 2, 0, 1]
    own, memory = (counts.totals(source) for source in range(2))
    assert (own.verified, memory.verified) == (6, 3)
    assert (own.accepted, memory.accepted) == (4, 1)
    assert (own.rounds_with_draft, memory.rounds_with_draft) == (2, 2)
    assert counts.totals().rounds == 5
    assert counts.totals().never_issued == 12 - 9


def test_sums_are_sums_of_everything(rng: random.Random) -> None:
    some = [random_counts(rng, 4) for _ in range(6)]
    total = add_up(some, 4)
    for field in Totals.__slots__:
        assert getattr(total.totals(), field) == sum(
            getattr(one.totals(), field) for one in some
        )
    assert (total - some[0]) + some[0] == total
    assert total.at(VERIFIED).sum() == total.totals().verified
    assert total.at(ACCEPTED).sum() == total.totals().accepted
    assert sum(total.accepted_lengths()) == total.totals().rounds
    both = [total.totals(source) for source in range(len(SOURCES))]
    for field in ("proposed", "invalid", "never_issued", "verified", "accepted"):
        assert sum(getattr(one, field) for one in both) == getattr(
            total.totals(), field
        )


def test_identities_hold(rng: random.Random) -> None:
    for _ in range(20):
        totals = random_counts(rng, 5).totals()
        settled = totals.verified + totals.invalid + totals.never_issued
        assert totals.proposed == settled
        assert 0 <= totals.accepted <= totals.verified <= totals.proposed
        assert totals.rounds_with_draft <= totals.rounds


@pytest.mark.parametrize("num_drafts", [1, 4, 128])
def test_lists_and_back(num_drafts: int, rng: random.Random) -> None:
    counts = random_counts(rng, num_drafts)
    values = json.loads(json.dumps(counts.to_list()))
    assert len(values) == vector_size(num_drafts)
    back = DraftCounts.from_list(values)
    assert back == counts
    assert back.num_drafts == num_drafts
    assert json.loads(json.dumps(counts.as_dict()))["rounds"] == counts.totals().rounds


def test_counters_pass_32_bits() -> None:
    counts = DraftCounts(2)
    counts.lengths[:, 0, 2] = 2**40
    assert counts.totals().accepted == 2**41
    assert counts.values.dtype == np.int64
