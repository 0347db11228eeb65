"""The recommended policy: hazards by class, and a budget from an averaged value curve.

Device, per draft token: a class (a small integer that the drafter publishes), whose
learned hazard is the chance that the token is right given those before it. Device, per
step: a histogram of the values (products of hazards) of all drafts. Host: a moving
average of "expected tokens against places a request" from histograms that are `lag`
steps old, and the graph size with the most expected tokens a millisecond.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from .base import Outcome, Step
from .confidence import Confidence, fill

BINS = 64
# Places a request at which the value curve is kept; between them it is linear.
GRID = np.array(
    [i / 64 for i in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)]
    + [1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, *range(5, 17), 20, 24, 32, 48, 64, 128]
)

# [requests, k] class of each draft token, and how many classes there are.
Classes = Callable[[Step], tuple[np.ndarray, int]]

RUN_EDGES = np.array([1, 2, 3, 4, 5, 7, 10, 16, 32])
LOGIT_EDGES = 1 / (1 + np.exp(-np.linspace(-3.5, 6.0, 23)))


def run_classes(step: Step) -> tuple[np.ndarray, int]:
    """Return the class by exact match length (up to 32) and position."""
    run = np.searchsorted(RUN_EDGES, step.drafts.run[step.at], side="right")
    return run[:, None] * step.k + np.arange(step.k), (len(RUN_EDGES) + 1) * step.k


def confidence_classes(step: Step) -> tuple[np.ndarray, int]:
    """Return the class by the drafter's own confidence, bins even in its logit."""
    cells = np.searchsorted(LOGIT_EDGES, step.drafts.confidence[step.at])
    return cells, len(LOGIT_EDGES) + 1


class Hazards:
    """Acceptance counted by class, learned from each step's own outcome.

    A token is judged when those before it were right and the truth at its place was
    sampled: the verified ones, and the one behind the last verified one.

    Args:
        classes: tells the class of every draft token.
        prior: chance of every class to begin with, or an array of one a class.
        weight: observations that the prior stands for.
        limit: a class's counts are halved above this.
        shadow: also judge the token behind the last verified one.
    """

    def __init__(
        self,
        classes: Classes,
        prior: float | np.ndarray = 0.5,
        weight: float = 4.0,
        limit: float = 4096.0,
        shadow: bool = True,
    ) -> None:
        self.classes, self.prior, self.weight = classes, prior, weight
        self.limit, self.shadow = limit, shadow
        self.seen: np.ndarray | None = None
        self.hits = np.zeros(0)

    def values(self, step: Step) -> np.ndarray:
        cells, num = self.classes(step)
        if self.seen is None:
            self.seen = np.full(num, float(self.weight))
            self.hits = self.seen * self.prior
        values = np.cumprod((self.hits / self.seen)[cells], axis=1)
        return np.where(np.arange(step.k) < step.num[:, None], values, 0.0)

    def learn(self, step: Step, outcome: Outcome) -> None:
        assert self.seen is not None
        cells, num = self.classes(step)
        seen = outcome.widths
        if self.shadow:
            seen = np.minimum(step.num, outcome.emitted)
        judged = np.minimum(seen, outcome.right + 1)[:, None]
        positions = np.arange(step.k)
        observed = positions < judged
        hit = observed & (positions < outcome.right[:, None])
        self.seen += np.bincount(cells[observed], minlength=num)
        self.hits += np.bincount(cells[hit], minlength=num)
        full = self.seen > self.limit
        self.seen[full] /= 2
        self.hits[full] /= 2


def histogram(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return count and summed value of the drafts of each bin, best bin first."""
    real = values[values > 0]
    bins = BINS - 1 - np.minimum((np.sqrt(real) * BINS).astype(int), BINS - 1)
    return (
        np.bincount(bins, minlength=BINS),
        np.bincount(bins, weights=real, minlength=BINS),
    )


class Curve:
    """Budget from the averaged value curve.

    Args:
        confidence: values drafts.
        lag: steps until a histogram can be read.
        window: steps that the average remembers.
        margin: what the expected gain over no drafts must exceed.
    """

    def __init__(
        self,
        confidence: Confidence,
        lag: int = 3,
        window: float = 8.0,
        margin: float = 0.0,
    ) -> None:
        self.confidence = confidence
        self.lag, self.window, self.margin = lag, window, margin
        self.pending: deque[tuple[int, np.ndarray, np.ndarray]] = deque()
        self.average = np.zeros(len(GRID))
        self.read = 0

    def choose(self, step: Step) -> tuple[np.ndarray, int]:
        values = self.confidence.values(step)
        requests = len(step.at)
        if len(self.pending) == self.lag:
            self._read(*self.pending.popleft())
        self.pending.append((requests, *histogram(values)))
        budget = self.budget(requests, step)
        widths = fill(values, budget)
        return widths, budget - int(widths.sum())

    def _read(self, requests: int, counts: np.ndarray, sums: np.ndarray) -> None:
        places = np.concatenate([[0], np.cumsum(counts)]) / requests
        tokens = np.concatenate([[0], np.cumsum(sums)]) / requests
        self.read += 1
        share = max(1 / self.read, 1 / self.window)
        curve = np.interp(GRID, places, tokens)
        self.average = self.average + share * (curve - self.average)

    def budget(self, requests: int, step: Step) -> int:
        most = requests * step.k
        places = candidates(requests, most, step.cost.sizes)
        tokens = 1 + np.interp(places / requests, GRID, self.average)
        times = np.array([step.cost(requests, b) for b in places.tolist()])
        rate = tokens / times
        best = int(np.argmax(rate))
        if rate[best] < rate[0] * (1 + self.margin):
            best = 0
        return int(places[best])

    def learn(self, step: Step, outcome: Outcome) -> None:
        self.confidence.learn(step, outcome)


def candidates(requests: int, most: int, sizes: tuple[int, ...]) -> np.ndarray:
    """Return the numbers of places that fill a graph, 0 first."""
    places = np.array(sizes, np.int64) - requests
    places = places[(places > 0) & (places <= most)]
    if not sizes or requests + most > sizes[-1]:
        beyond = max(sizes[-1] - requests, 0) if sizes else 0
        step = max(1, requests // 16)
        places = np.concatenate([places, np.arange(beyond + step, most + 1, step)])
    return np.unique(np.concatenate([[0], places, [most]]))
