"""Totals on the host: ratios without traffic, reading and resetting."""

import torch

from mrv2_spec.counters import DraftCounters, Totals


def test_ratios_without_traffic() -> None:
    totals = Totals()
    assert totals.coverage == totals.acceptance == totals.mean_acceptance_length == 0.0


def test_rounds_without_drafts() -> None:
    totals = Totals(rounds=7)
    assert totals.coverage == totals.acceptance == 0.0
    assert totals.mean_acceptance_length == 1.0


def test_ratios() -> None:
    totals = Totals(
        proposed=12, verified=5, accepted=4, rounds=8, rounds_with_draft=2, fillers=99
    )
    assert totals.acceptance == 4 / 5
    assert totals.coverage == 2 / 8
    assert totals.mean_acceptance_length == 1 + 4 / 8


def test_draft_counters_read_and_reset(device: torch.device) -> None:
    counters = DraftCounters(2, device)
    ints = {"dtype": torch.int32, "device": device}
    slots = torch.tensor([1, 0], device=device)
    for _ in range(2):
        counters.book(
            slots,
            torch.tensor([2, 1], **ints),
            torch.tensor([0, 3, 4], **ints),
            None,
            torch.tensor([9, 9], **ints),
            torch.tensor([3, 3], **ints),
            torch.tensor([0, 2], **ints),
        )
    assert counters.read() == Totals(
        proposed=4,
        verified=2,
        accepted=1,
        fillers=2,
        rounds=4,
        rounds_with_draft=1,
        in_flight=2,
    )
    counters.reset()
    assert counters.read() == Totals()
