"""Device counts on the host, a fixed number of steps late and without waiting."""

from collections import deque

import numpy as np
import numpy.typing as npt
import torch


class LaggedCounts:
    """Copies of a device tensor that have landed by construction.

    Copies are enqueued on the stream that also carries the next step's forward pass
    and, behind it, the sampled tokens that the engine waits for before it prepares a
    further step. So a copy made ``lag`` steps ago has landed when the engine runs at
    most ``lag - 1`` steps ahead of the device. Which copy is read depends on the
    number of steps alone, never on what happens to have landed: all ranks agree. A
    caller that drives the runner and never waits for its outputs has no such guarantee.

    Args:
        like: an int32 device tensor with the shape and place of what is published.
        lag: steps between a copy and its use, at least 1.
    """

    def __init__(self, like: torch.Tensor, lag: int) -> None:
        self.lag = lag
        pin_memory = like.device.type == "cuda"
        self._free = [
            torch.zeros(like.shape, dtype=like.dtype, pin_memory=pin_memory)
            for _ in range(lag)
        ]
        # Of the last steps, oldest first.
        self._copies: deque[torch.Tensor | None] = deque()

    def publish(self, counts: torch.Tensor | None) -> None:
        """Enqueue a copy of the counts as they are after this step, or of nothing."""
        copy = None
        if len(self._copies) == self.lag:
            copy = self._copies.popleft()
        if counts is not None:
            copy = self._free.pop() if copy is None else copy
            copy.copy_(counts, non_blocking=True)
        elif copy is not None:
            self._free.append(copy)
            copy = None
        self._copies.append(copy)

    def read(self) -> npt.NDArray[np.int32] | None:
        """Return what was published ``lag`` steps ago, or None if nothing was."""
        if len(self._copies) < self.lag:
            return None
        copy = self._copies[0]
        return None if copy is None else copy.numpy()
