"""Counts a fixed number of steps late."""

import pytest
import torch

from mrv2_spec.lagged_counts import LaggedCounts


@pytest.mark.parametrize("lag", [1, 2, 3, 5])
def test_reads_the_copy_made_lag_publications_ago(
    lag: int, device: torch.device
) -> None:
    source = torch.zeros(3, dtype=torch.int32, device=device)
    lagged = LaggedCounts(source, lag)
    for step in range(1, 12):
        assert lagged.read().tolist() == [max(step - lag, 0)] * 3
        source.fill_(step)
        lagged.publish(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        # The source may be overwritten at once.
        source.fill_(-1)


def test_reading_twice_is_reading_the_same(device: torch.device) -> None:
    source = torch.ones(2, dtype=torch.int32, device=device)
    lagged = LaggedCounts(source, 1)
    assert lagged.read().tolist() == lagged.read().tolist() == [0, 0]
    lagged.publish(source)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert lagged.read().tolist() == lagged.read().tolist() == [1, 1]
