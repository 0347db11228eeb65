"""What a step costs, fitted to measured points."""

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np

# (requests or rows, ms), ascending.
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class StepCost:
    """Time of a decode step in milliseconds.

    Args:
        base_ms: a step's time without its rows.
        row_ms: time a verified row adds.
        base_by_requests: measured (requests, ms) points of a step without drafts. Where
            given they replace base_ms + row_ms * requests, interpolated; a row above
            one a request still costs row_ms.
        rows_ms: (rows, ms) points of what rows cost. Where given they replace row_ms;
            beyond the last point the line goes on.
        sizes: row counts of the captured graphs; rows are padded to the next one.
        wide_ms: (requests, ms) points of what a step with any draft place costs more
            than a plain one: a graph for several queries a request, the rejection
            sampler, host work.
    """

    base_ms: float = 4.6
    row_ms: float = 0.0228
    base_by_requests: Points = ()
    rows_ms: Points = ()
    sizes: tuple[int, ...] = ()
    wide_ms: Points = ()
    _known: dict[tuple[int, int], float] = field(
        default_factory=dict, compare=False, repr=False
    )

    def padded(self, rows: int) -> int:
        """Return the rows of the graph that runs this many."""
        at = bisect_left(self.sizes, rows)
        return self.sizes[at] if at < len(self.sizes) else rows

    def rows(self, number: int) -> float:
        """Return what so many rows cost, beside an arbitrary constant."""
        if not self.rows_ms:
            return self.row_ms * number
        points = np.array(self.rows_ms)
        (rows, ms), (last, last_ms) = points[-2], points[-1]
        beyond = max(number - last, 0.0) * (last_ms - ms) / (last - rows)
        return float(np.interp(number, points[:, 0], points[:, 1]) + beyond)

    def plain(self, requests: int) -> float:
        """Return the time of a step without draft places."""
        if not self.base_by_requests:
            return self.base_ms + self.row_ms * self.padded(requests)
        points = np.array(self.base_by_requests)
        return float(np.interp(requests, points[:, 0], points[:, 1]))

    def __call__(self, requests: int, places: int) -> float:
        """Return the time of a step of this many requests and draft places."""
        known = self._known.get((requests, places))
        if known is None:
            known = self.plain(requests)
            if places > 0:
                known += self.rows(self.padded(requests + places))
                known -= self.rows(self.padded(requests))
                if self.wide_ms:
                    points = np.array(self.wide_ms)
                    known += float(np.interp(requests, points[:, 0], points[:, 1]))
            self._known[requests, places] = known
        return known

    def curve(self, requests: int, most: int) -> np.ndarray:
        """Return the times of steps with 0, 1, ... `most` draft places."""
        return np.array([self(requests, b) for b in range(most + 1)])


def graph_sizes(largest: int) -> tuple[int, ...]:
    """Return vLLM's default capture sizes up to `largest`."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return tuple(size for size in sizes if size <= largest)
