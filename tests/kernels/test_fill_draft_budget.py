"""Filling a draft budget: exactly, and the likeliest drafts first."""

import itertools
import math
import random

import numpy as np
import pytest
import torch

from mrv2_spec import VariableDraftTrimmer
from mrv2_spec.kernels import fill_draft_budget as kernel
from mrv2_spec.kernels.fill_draft_budget import (
    fill_draft_budget,
    fill_draft_budget_ref,
)

SENTINEL = -77
GUARD = 4
INT32_MAX = np.iinfo(np.int32).max
INT32_MIN = np.iinfo(np.int32).min
# Products of these are exact in float32: no rounding decides a choice.
EXACT = [0.0, 0.25, 0.5, 1.0]
AWKWARD = [math.nan, -1.0, -math.inf, math.inf, 2.5, 1e-38, *EXACT]


def launch(
    slots: list[int],
    valid: list[int],
    drafts: list[int],
    confidences: list[list[float]],
    budget: int,
    device: torch.device,
    non_drafts: list[int] | None = None,
    num_bonus_tokens: int = 1,
) -> list[int]:
    """Run the kernel on poisoned outputs, check the layout, return the widths."""
    ints = {"dtype": torch.int32, "device": device}
    max_num_reqs, num_reqs = len(valid), len(slots)
    if non_drafts is None:
        non_drafts = [num_bonus_tokens] * num_reqs
    cu_num_logits = torch.full((max_num_reqs + 1 + GUARD,), SENTINEL, **ints)
    starts = torch.full((max_num_reqs + 1 + GUARD,), SENTINEL, **ints)
    # Rows wider than K: what lies between them must not count.
    num_slots = len(confidences[0])
    padded = torch.ones(max_num_reqs, num_slots + 3, device=device)
    padded[:, :num_slots] = torch.tensor(confidences)
    scheduled = [a + b for a, b in zip(drafts, non_drafts, strict=True)]
    fill_draft_budget(
        torch.tensor(slots, dtype=torch.int64, device=device),
        torch.tensor(valid, **ints),
        torch.tensor(drafts, **ints),
        torch.tensor(scheduled, **ints),
        padded[:, :num_slots],
        cu_num_logits,
        starts[: max_num_reqs + 1],
        draft_budget=budget,
        num_bonus_tokens=num_bonus_tokens,
    )
    assert (cu_num_logits[num_reqs + 1 :] == SENTINEL).all()
    assert (starts[max_num_reqs + 1 :] == SENTINEL).all()
    logits = cu_num_logits[: num_reqs + 1].tolist()
    assert logits[0] == 0
    widths = [b - a - num_bonus_tokens for a, b in itertools.pairwise(logits)]
    lengths = [w + n for w, n in zip(widths, non_drafts, strict=True)]
    ends = list(itertools.accumulate(lengths, initial=0))
    assert starts[: num_reqs + 1].tolist() == ends
    assert (starts[num_reqs + 1 : max_num_reqs + 1] == ends[-1]).all()
    assert sum(widths) == budget
    assert all(0 <= w <= d for w, d in zip(widths, drafts, strict=True))
    return widths


def test_likeliest_drafts_first(device: torch.device) -> None:
    confidences = [[0.9, 0.9, 0.1], [0.5, 1.0, 1.0], [1.0, 0.2, 0.2]]
    args = ([0, 1, 2], [3, 3, 3], [3, 3, 3], confidences)
    # Values 0.9 0.81 0.081, 0.5 0.5 0.5, 1.0 0.2 0.04.
    wanted = {
        0: [0, 0, 0],
        1: [0, 0, 1],
        2: [1, 0, 1],
        3: [2, 0, 1],
        4: [2, 1, 1],
        6: [2, 3, 1],
        7: [2, 3, 2],
        8: [3, 3, 2],
        9: [3, 3, 3],
    }
    for budget, widths in wanted.items():
        assert launch(*args, budget, device) == widths
        assert fill_draft_budget_ref(*args, draft_budget=budget) == widths


def test_fillers_come_after_all_real_drafts(device: torch.device) -> None:
    args = ([2, 0, 1], [0, 3, 1], [2, 2, 3], [[0.0] * 3] * 3)
    wanted = {1: [1, 0, 0], 4: [1, 0, 3], 5: [2, 0, 3], 6: [2, 1, 3], 7: [2, 2, 3]}
    for budget, widths in wanted.items():
        assert launch(*args, budget, device) == widths


@pytest.mark.parametrize("levels", [EXACT, AWKWARD])
def test_random_layouts_equal_the_reference(
    levels: list[float], device: torch.device, rng: random.Random
) -> None:
    for _ in range(40):
        few, many = kernel.FEW_ROWS, kernel.MANY_ROWS
        edges = [edge + d for edge in (few, many) for d in (-1, 0, 1)]
        max_num_reqs = rng.choice([1, 5, *edges, 2 * many + 2])
        num_reqs = rng.choice([max_num_reqs, rng.randrange(1, max_num_reqs + 1)])
        num_slots = rng.choice([1, 3, 5, 16, 17])
        slots = rng.sample(range(max_num_reqs), num_reqs)
        counts = [INT32_MIN, -1, *range(num_slots + 2), INT32_MAX]
        valid = [rng.choice(counts) for _ in range(max_num_reqs)]
        drafts = [rng.randrange(num_slots + 1) for _ in range(num_reqs)]
        confidences = [
            [rng.choice(levels) for _ in range(num_slots)] for _ in range(max_num_reqs)
        ]
        args = (slots, valid, drafts, confidences)
        num_real = sum(
            max(0, min(d, valid[s])) for d, s in zip(drafts, slots, strict=True)
        )
        for budget in {0, num_real, sum(drafts), rng.randint(0, sum(drafts))}:
            bonus = rng.choice([1, 2])
            non_drafts = [bonus + rng.choice([0, 0, 300]) for _ in slots]
            got = launch(*args, budget, device, non_drafts, bonus)
            assert got == fill_draft_budget_ref(*args, draft_budget=budget)


def test_any_confidences_near_the_best_choice(
    device: torch.device, rng: random.Random
) -> None:
    # Values are told apart in levels of their square root: 2 / 62 at K = 16.
    for _ in range(20):
        num_reqs, num_slots = 70, 16
        slots = rng.sample(range(num_reqs), num_reqs)
        valid = [rng.randrange(num_slots + 1) for _ in range(num_reqs)]
        confidences = [
            [rng.random() ** 0.3 for _ in range(num_slots)] for _ in range(num_reqs)
        ]
        drafts = [num_slots] * num_reqs
        budget = rng.randint(0, sum(valid))
        widths = launch(slots, valid, drafts, confidences, budget, device)
        values = [np.cumprod(confidences[s][: valid[s]]) for s in slots]
        taken = np.concatenate([v[:w] for v, w in zip(values, widths, strict=True)])
        best = np.sort(np.concatenate(values))[::-1][:budget]
        assert len(taken) == budget, "a filler took the place of a real draft"
        if budget:
            assert math.sqrt(best[-1]) - math.sqrt(taken.min()) <= 2 / 62
        assert best.sum() - taken.sum() <= 0.01 * best.sum() + 1e-6


def test_no_requests(device: torch.device) -> None:
    assert launch([], [2, 2], [], [[1.0]] * 2, 0, device) == []


def test_no_places(device: torch.device) -> None:
    assert launch([1, 0], [2, 2], [0, 0], [[1.0] * 2] * 2, 0, device) == [0, 0]


def test_through_the_trimmer(device: torch.device) -> None:
    starts = torch.full((4,), SENTINEL, dtype=torch.int32, device=device)
    valid = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    trimmer = VariableDraftTrimmer(
        valid, starts, max_num_reqs=3, max_total_logits=7, device=device
    )
    assert trimmer.max_draft_budget(2) == 5
    assert trimmer.max_draft_budget(8) == 0
    logits, got = trimmer.fill(
        torch.tensor([2, 0], device=device),
        np.array([2, 2], np.int32),
        np.array([3, 4], np.int32),
        torch.tensor([[0.5, 0.9], [1.0, 1.0], [0.4, 1.0]], device=device),
        2,
    )
    assert logits.tolist() == [0, 1, 4]
    assert got.tolist() == [0, 1, 5, 5]


def test_through_the_trimmer_step_by_step(
    device: torch.device, rng: random.Random
) -> None:
    starts = torch.zeros(5, dtype=torch.int32, device=device)
    valid = torch.full((4,), 3, dtype=torch.int32, device=device)
    trimmer = VariableDraftTrimmer(
        valid, starts, max_num_reqs=4, max_total_logits=99, device=device
    )
    chances = torch.full((4, 3), 0.5, device=device)
    steps = [([3, 3], [4, 4]), ([3, 3], [4, 5]), ([3], [4]), ([0, 3, 3], [9, 4, 4])]
    for _ in range(40):
        # Many are as the one before.
        drafts, scheduled = (np.array(x, np.int32) for x in rng.choice(steps))
        slots = torch.tensor(rng.sample(range(4), len(drafts)), device=device)
        if rng.random() < 0.5:
            budget = int(drafts.sum())
            logits, got = trimmer.fill(slots, drafts, scheduled, chances, budget)
        else:
            logits, got = trimmer.trim(slots, drafts, scheduled)
        assert logits.tolist() == [0, *np.cumsum(drafts + 1)]
        ends = np.cumsum(scheduled).tolist()
        assert got.tolist() == [0, *ends, *ends[-1:] * (4 - len(ends))]
