"""Counts a fixed number of steps late."""

import pytest
import torch

from mrv2_spec.lagged_counts import LaggedCounts


@pytest.mark.parametrize("lag", [1, 2, 3, 5])
def test_reads_the_copy_made_lag_steps_ago(lag: int, device: torch.device) -> None:
    source = torch.zeros(3, dtype=torch.int32, device=device)
    lagged = LaggedCounts(source, lag)
    for step in range(1, 30):
        read = lagged.read()
        past = step - lag
        # Every fourth step and the one after publish nothing.
        if past < 1 or past % 4 < 2:
            assert read is None
        else:
            assert read is not None and read.tolist() == [past] * 3
        source.fill_(step)
        lagged.publish(None if step % 4 < 2 else source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        # The source may be overwritten at once.
        source.fill_(-1)


def test_reading_twice_is_reading_the_same(device: torch.device) -> None:
    source = torch.ones(2, dtype=torch.int32, device=device)
    lagged = LaggedCounts(source, 1)
    assert lagged.read() is None and lagged.read() is None
    lagged.publish(source)
    if device.type == "cuda":
        torch.cuda.synchronize()
    for _ in range(2):
        read = lagged.read()
        assert read is not None and read.tolist() == [1, 1]
