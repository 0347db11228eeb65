"""Gathering drafts: an example by hand, random steps against the reference."""

import random

import pytest
import torch

from mrv2_spec.kernels import count_drafts as kernel
from mrv2_spec.kernels.count_drafts import count_drafts, count_drafts_ref


def ints(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def cumulative(widths: list[int], num_bonus_tokens: int) -> list[int]:
    sums = [0]
    for width in widths:
        sums.append(sums[-1] + width + num_bonus_tokens)
    return sums


def test_an_example(device: torch.device) -> None:
    counts = count_drafts(
        torch.tensor([4, 2, 0], device=device),
        # What lies behind the batch is not looked at.
        ints([0, 2, 5, 6, 9, 9], device),
        ints([0, 9, 3, 9, 1], device),
        ints([0, 9, 1, 9, 0], device),
    )
    assert counts.tolist() == [[1, 2, 0], [1, 3, 0], [0, 1, 0]]


def test_a_batch_of_nothing(device: torch.device) -> None:
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    counts = count_drafts(nothing, ints([0], device), ints([3], device), None)
    assert counts.shape == (3, 0)


@pytest.mark.parametrize("sources", [True, False])
@pytest.mark.parametrize("num_bonus_tokens", [1, 2])
def test_random_steps(
    sources: bool, num_bonus_tokens: int, device: torch.device, rng: random.Random
) -> None:
    block = kernel.BLOCK
    for max_num_reqs in (1, 6, block - 1, block, block + 1, 2 * block + 1):
        slots = rng.sample(range(max_num_reqs), rng.randint(1, max_num_reqs))
        widths = [rng.randrange(17) for _ in slots]
        proposed = [rng.randrange(17) for _ in range(max_num_reqs)]
        source = [rng.randrange(2) for _ in range(max_num_reqs)] if sources else None
        counts = count_drafts(
            torch.tensor(slots, device=device),
            ints(cumulative(widths, num_bonus_tokens), device),
            ints(proposed, device),
            None if source is None else ints(source, device),
            num_bonus_tokens=num_bonus_tokens,
        )
        assert counts.tolist() == count_drafts_ref(slots, widths, proposed, source)
