"""Counting drafts: worked examples by hand, random steps against the reference."""

import random

import pytest
import torch

from mrv2_spec.counters import Totals
from mrv2_spec.kernels import count_drafts as kernel
from mrv2_spec.kernels.count_drafts import COUNTERS, count_drafts, count_drafts_ref

PREFILL = 4


class Slots:
    """Device state of some request slots, booked step by step."""

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self.device = device
        self.counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device=device)
        self.in_flight = self.ints([0] * max_num_reqs)
        self.total_len = [PREFILL] * max_num_reqs
        self.prefill_len = [PREFILL] * max_num_reqs

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def book(
        self,
        slots: list[int],
        num_sampled: list[int],
        widths: list[int],
        proposed: list[int],
        acceptable: list[int] | None = None,
        num_bonus_tokens: int = 1,
    ) -> dict[str, int]:
        """Book a step; ``proposed`` is by slot. Return the counters."""
        for slot, sampled in zip(slots, num_sampled, strict=True):
            self.total_len[slot] += sampled
        cu_num_logits = [0]
        for width in widths:
            cu_num_logits.append(cu_num_logits[-1] + width + num_bonus_tokens)
        count_drafts(
            torch.tensor(slots, dtype=torch.int64, device=self.device),
            self.ints(num_sampled),
            self.ints(cu_num_logits),
            None if acceptable is None else self.ints(acceptable),
            self.ints(self.total_len),
            self.ints(self.prefill_len),
            self.ints(proposed),
            self.in_flight,
            self.counters,
            num_bonus_tokens=num_bonus_tokens,
        )
        return dict(zip(COUNTERS, self.counters.tolist(), strict=True))


def totals_of(slots: Slots, counters: dict[str, int]) -> Totals:
    totals = Totals(**counters, in_flight=int(slots.in_flight.sum()))
    assert totals.proposed == (
        totals.verified + totals.invalid + totals.never_issued + totals.in_flight
    )
    return totals


def test_ten_rounds_of_which_three_had_drafts(device: torch.device) -> None:
    slots = Slots(1, device)
    slots.book([0], [1], [0], [4])  # the prefill's token; proposes 4
    proposed = [2, 0, 1, *[0] * 7]
    accepted = [4, 1, 0, 0, *[0] * 6]
    real = [4, 2, 0, 1, *[0] * 6]
    counters = {}
    for i in range(10):
        # Trimmed to the real drafts: nothing is filled.
        counters = slots.book([0], [accepted[i] + 1], [real[i]], [proposed[i]])
    totals = totals_of(slots, counters)
    assert (totals.proposed, totals.verified, totals.accepted) == (7, 7, 5)
    assert (totals.rounds, totals.rounds_with_draft) == (10, 3)
    assert totals.acceptance == pytest.approx(5 / 7)
    assert totals.coverage == pytest.approx(3 / 10)
    assert totals.mean_acceptance_length == pytest.approx(1 + 5 / 10)
    assert totals.fillers == 0


def test_untrimmed_places_are_fillers_and_count_for_nothing(
    device: torch.device,
) -> None:
    slots = Slots(1, device)
    slots.book([0], [1], [0], [4])
    proposed = [2, 0, 1, *[0] * 7]
    # All four places are verified each round; in the third round a filler happens to
    # be right, and in the second one beside a right draft.
    num_sampled = [5, 4, 2, 1, *[1] * 6]
    counters = {}
    for i in range(10):
        counters = slots.book([0], [num_sampled[i]], [4], [proposed[i]])
    totals = totals_of(slots, counters)
    assert (totals.proposed, totals.verified) == (7, 7)
    assert totals.accepted == 4 + 2 + 0 + 0
    assert totals.fillers == 40 - 7


def test_grammar_and_trimming_shares(device: torch.device) -> None:
    slots = Slots(1, device)
    slots.book([0], [1], [0], [4])
    # Rounds with (real, ruled out by a grammar, not verified, accepted) of
    # (4, 0, 0, 4), (4, 4, 0, 0), (4, 0, 3, 1), (0, 0, 0, 0).
    slots.book([0], [5], [4], [4], [4])
    slots.book([0], [1], [4], [4], [0])
    slots.book([0], [2], [1], [0], [1])
    totals = totals_of(slots, slots.book([0], [1], [0], [0], [0]))
    assert (totals.proposed, totals.verified, totals.accepted) == (12, 5, 5)
    assert (totals.invalid, totals.never_issued) == (4, 3)
    assert totals.acceptance == 1.0
    assert totals.coverage == 3 / 4
    assert totals.mean_acceptance_length == 1 + 5 / 4


def test_prefill_is_no_round(device: torch.device) -> None:
    slots = Slots(2, device)
    slots.book([1], [1], [0], [0, 3])
    # Slot 1 goes to a new request: a chunk, then its first token.
    slots.total_len[1] = PREFILL
    counters = slots.book([1], [0], [0], [0, 0])
    assert (counters["never_issued"], counters["rounds"]) == (3, 0)
    counters = slots.book([1], [1], [0], [0, 2])
    assert (counters["rounds"], counters["accepted"]) == (0, 0)
    totals = totals_of(slots, slots.book([1], [2], [2], [0, 0]))
    assert (totals.rounds, totals.verified, totals.accepted) == (1, 2, 1)


def test_request_that_is_not_scheduled_keeps_its_drafts(device: torch.device) -> None:
    slots = Slots(3, device)
    slots.book([0, 2], [1, 1], [0, 0], [3, 0, 2])
    totals = totals_of(slots, slots.book([2], [3], [2], [9, 9, 0]))
    assert (totals.proposed, totals.verified, totals.in_flight) == (5, 2, 3)


def test_random_steps(device: torch.device, rng: random.Random) -> None:
    for _ in range(12):
        block = kernel.BLOCK
        max_num_reqs = rng.choice([1, 6, block - 1, block, block + 1, 2 * block + 1])
        state = Slots(max_num_reqs, device)
        want = dict.fromkeys(COUNTERS, 0)
        in_flight = [0] * max_num_reqs
        for _ in range(4):
            num_reqs = rng.choice([0, max_num_reqs, rng.randint(0, max_num_reqs)])
            slots = rng.sample(range(max_num_reqs), num_reqs)
            num_slots = 5
            widths = [rng.randrange(num_slots + 1) for _ in slots]
            num_sampled = [rng.randint(0, w + 1) for w in widths]
            proposed = [rng.randrange(num_slots + 1) for _ in range(max_num_reqs)]
            acceptable = rng.choice(
                [None, [rng.choice([0, 1, 3, 2**31 - 1]) for _ in slots]]
            )
            got = state.book(
                slots, num_sampled, widths, proposed, acceptable, rng.choice([1, 2])
            )
            count_drafts_ref(
                slots,
                num_sampled,
                widths,
                acceptable,
                state.total_len,
                state.prefill_len,
                proposed,
                in_flight,
                want,
            )
            assert got == want
            assert state.in_flight.tolist() == in_flight
            totals_of(state, got)


def test_counters_pass_32_bits(device: torch.device) -> None:
    slots = Slots(1, device)
    slots.counters.fill_(2**31 - 1)
    slots.book([0], [1], [0], [4])
    counters = slots.book([0], [5], [4], [4])
    assert counters["proposed"] == 2**31 - 1 + 8
    assert counters["verified"] == counters["accepted"] == 2**31 - 1 + 4
