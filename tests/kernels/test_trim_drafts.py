"""Trimming to the real drafts: the worked example, random layouts, awkward counts."""

import random

import numpy as np
import pytest
import torch

from mrv2_spec import VariableDraftTrimmer
from mrv2_spec.kernels import trim_drafts as kernel
from mrv2_spec.kernels.trim_drafts import trim_drafts, trim_drafts_ref

SENTINEL = -77
GUARD = 4
INT32_MAX = np.iinfo(np.int32).max
INT32_MIN = np.iinfo(np.int32).min


def launch(
    slots: list[int],
    valid: list[int],
    drafts: list[int],
    scheduled: list[int],
    device: torch.device,
    num_bonus_tokens: int = 1,
) -> tuple[list[int], list[int]]:
    """Run the kernel on poisoned outputs; return both prefix sums."""
    ints = {"dtype": torch.int32, "device": device}
    max_num_reqs, num_reqs = len(valid), len(slots)
    cu_num_logits = torch.full((max_num_reqs + 1 + GUARD,), SENTINEL, **ints)
    starts = torch.full((max_num_reqs + 1 + GUARD,), SENTINEL, **ints)
    # Inputs may be longer than the batch.
    junk = [INT32_MAX] * 2
    trim_drafts(
        torch.tensor(slots, dtype=torch.int64, device=device),
        torch.tensor(valid, **ints),
        torch.tensor([*drafts, *junk], **ints),
        torch.tensor([*scheduled, *junk], **ints),
        cu_num_logits,
        starts[: max_num_reqs + 1],
        num_bonus_tokens=num_bonus_tokens,
    )
    assert (cu_num_logits[num_reqs + 1 :] == SENTINEL).all()
    assert (starts[max_num_reqs + 1 :] == SENTINEL).all()
    return cu_num_logits[: num_reqs + 1].tolist(), starts[: max_num_reqs + 1].tolist()


def by_numpy(
    slots: list[int],
    valid: list[int],
    drafts: list[int],
    scheduled: list[int],
    num_bonus_tokens: int,
) -> tuple[list[int], list[int]]:
    capacity = np.minimum(np.array(drafts, int), np.array(valid, int)[slots]).clip(0)
    logits = np.concatenate([[0], np.cumsum(capacity + num_bonus_tokens)])
    kept = np.array(scheduled, int) - np.array(drafts, int) + capacity
    starts = np.zeros(len(valid) + 1, int)
    starts[1 : len(slots) + 1] = np.cumsum(kept)
    starts[len(slots) + 1 :] = kept.sum()
    return logits.astype(int).tolist(), starts.tolist()


def test_worked_example(device: torch.device) -> None:
    valid = [0, -1, 3, -1, 1, -1]
    logits, starts = launch([4, 2, 0], valid, [2, 2, 0], [3, 3, 7], device)
    assert logits == [0, 2, 5, 6]
    assert starts == [0, 2, 5, 12, 12, 12, 12]


def test_worked_example_through_the_trimmer(device: torch.device) -> None:
    starts = torch.full((7,), SENTINEL, dtype=torch.int32, device=device)
    valid = torch.tensor([0, 9, 3, 9, 1, 9], dtype=torch.int32, device=device)
    trimmer = VariableDraftTrimmer(
        valid, starts, max_num_reqs=6, max_total_logits=18, device=device
    )
    slots = torch.tensor([4, 2, 0], device=device)
    drafts = np.array([2, 2, 0], np.int32)
    scheduled = np.array([3, 3, 7], np.int32)
    logits, got = trimmer.trim(slots, drafts, scheduled)
    assert logits.tolist() == [0, 2, 5, 6]
    assert got is starts
    assert got.tolist() == [0, 2, 5, 12, 12, 12, 12]
    # The counts are read anew at every call.
    valid.zero_()
    logits, got = trimmer.trim(slots[:2], drafts[:2], scheduled[:2])
    assert logits.tolist() == [0, 1, 2]
    assert got.tolist() == [0, 1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("counts", "starts", "name"),
    [((5,), (7,), "num_valid_drafts"), ((6,), (6,), "query_start_loc")],
)
def test_trimmer_names_the_buffer_of_a_wrong_shape(
    counts: tuple[int], starts: tuple[int], name: str
) -> None:
    with pytest.raises(ValueError, match=f"^{name} has shape"):
        VariableDraftTrimmer(
            torch.zeros(counts, dtype=torch.int32),
            torch.zeros(starts, dtype=torch.int32),
            max_num_reqs=6,
            max_total_logits=18,
            device=torch.device("cpu"),
        )


def test_random_layouts(device: torch.device, rng: random.Random) -> None:
    for _ in range(60):
        max_num_reqs = rng.choice([1, 2, 7, 64, 100])
        num_reqs = rng.randrange(max_num_reqs + 1)
        num_slots = rng.choice([1, 3, 5, 16])
        slots = rng.sample(range(max_num_reqs), num_reqs)
        awkward = [INT32_MIN, -1, 0, 1, num_slots, num_slots + 1, INT32_MAX]
        valid = [rng.choice(awkward) for _ in range(max_num_reqs)]
        drafts = [rng.randrange(num_slots + 1) for _ in range(num_reqs)]
        bonus = rng.choice([1, 2])
        scheduled = [d + bonus + rng.choice([0, 0, 500]) for d in drafts]
        got = launch(slots, valid, drafts, scheduled, device, bonus)
        assert got == by_numpy(slots, valid, drafts, scheduled, bonus)
        assert got == trim_drafts_ref(
            slots,
            valid,
            drafts,
            scheduled,
            num_bonus_tokens=bonus,
            max_num_reqs=max_num_reqs,
        )


@pytest.mark.parametrize("valid", [0, 3])
@pytest.mark.parametrize("extra", [0, 5])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_around_block_edges(
    valid: int, extra: int, offset: int, device: torch.device
) -> None:
    num_reqs = kernel.BLOCK + offset
    slots = list(range(num_reqs))[::-1]
    args = (slots, [valid] * (num_reqs + extra), [2] * num_reqs, [3] * num_reqs)
    width = min(valid, 2) + 1
    logits, starts = launch(*args, device)
    assert logits == [i * width for i in range(num_reqs + 1)]
    assert starts == logits + [logits[-1]] * extra


def test_no_requests(device: torch.device) -> None:
    assert launch([], [2, 2, 2], [], [], device) == ([0], [0, 0, 0, 0])


def test_trimmer_refuses_counts_of_another_type(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"^num_valid_drafts is torch\.int64"):
        VariableDraftTrimmer(
            torch.zeros(4, dtype=torch.int64, device=device),
            torch.zeros(5, dtype=torch.int32, device=device),
            max_num_reqs=4,
            max_total_logits=20,
            device=device,
        )
