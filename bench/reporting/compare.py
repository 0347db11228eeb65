"""Compares the points of the grid: a ratio is of two points of one run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from reporting.load import NO_TIME, Point

# A point below this loses.
FLOOR = 0.97
# Above this the spread of a point is stated.
SPREAD = 0.03
# Below this gain of the oracle, a share of it says nothing.
LEAST_GAIN = 0.05
# Arms that took turns at a point end it within so many seconds. Of two waves of a run,
# the engines of the second one start in between, and all other points are taken.
_TURN_SECONDS = 120.0


@dataclass(frozen=True, slots=True, order=True)
class Arm:
    """A drafter on a runner, with its number of drafts (0 for none)."""

    name: str
    k: int = 0

    @property
    def label(self) -> str:
        """Return the arm as the grid's command line names it."""
        return f"{self.name}:{self.k}" if self.k else self.name


@dataclass(frozen=True, slots=True)
class Ratio:
    """TPOT of a base over that of an arm: above 1 the arm is faster.

    Attributes:
        spread: the larger one of both points; of points that were taken in turns that
            of the turns' ratios, as a host that was slow was slow for both.
        point: the arm's point.
    """

    value: float
    spread: float
    point: Point

    def __str__(self) -> str:
        """Return the figure, and the spread where it is large."""
        text = f"{self.value:.2f}"
        return text if self.spread <= SPREAD else f"{text} (±{self.spread:.0%})"


class Grid:
    """All points by run, the newest run first."""

    def __init__(self, points: Iterable[Point]) -> None:
        points = list(points)
        self.points = points
        runs: dict[str, dict[tuple[Arm, int, str], Point]] = {}
        last: dict[str, tuple[datetime, int]] = {}
        for order, point in enumerate(points):
            place = (Arm(point.arm, point.k), point.c, point.workload)
            # A point taken twice in a run: the later one counts.
            runs.setdefault(point.run_id, {})[place] = point
            last[point.run_id] = max(
                last.get(point.run_id, (NO_TIME, 0)), (point.when, order)
            )
        newest = sorted(runs, key=lambda run: last[run], reverse=True)
        self._runs = {run: runs[run] for run in newest}
        self._runner = {point.arm: point.runner for point in points}

    @property
    def run_ids(self) -> list[str]:
        """Return the runs, the newest first."""
        return list(self._runs)

    @property
    def arms(self) -> list[Arm]:
        """Return all arms."""
        return sorted({place[0] for run in self._runs.values() for place in run})

    @property
    def workloads(self) -> set[str]:
        """Return all workloads."""
        return {place[2] for run in self._runs.values() for place in run}

    @property
    def concurrencies(self) -> list[int]:
        """Return all numbers of requests at a time."""
        return sorted({place[1] for run in self._runs.values() for place in run})

    def base(self, arm: Arm) -> Arm:
        """Return no speculation on the arm's runner."""
        return Arm("v1-none" if self._runner.get(arm.name) == "v1" else "v2-none")

    def together(
        self, arms: Iterable[Arm], c: int, workload: str
    ) -> tuple[Point, ...] | None:
        """Return the points of the newest run that has all of the arms.

        A run in which the arms took turns comes before any in which they did not: hosts
        change their speed between two waves of engines, too.
        """
        arms = tuple(arms)
        newest = None
        for run in self._runs.values():
            found = [run.get((arm, c, workload)) for arm in arms]
            points = tuple(point for point in found if point is not None)
            if len(points) < len(arms):
                continue
            if len(arms) == 1 or took_turns(points):
                return points
            newest = newest or points
        return newest

    def ratio(
        self, arm: Arm, c: int, workload: str, base: Arm | None = None
    ) -> Ratio | None:
        """Return the arm against no speculation on its runner, or another base.

        None where no run has both.
        """
        found = self.together((arm, base or self.base(arm)), c, workload)
        if found is None:
            return None
        point, base_point = found
        value = base_point.tpot_ms / point.tpot_ms
        return Ratio(value, _spread(base_point, point, value), point)

    def against(self, arm: Arm, other: Arm, c: int, workload: str) -> float | None:
        """Return the arm against another that drafts, above 1 if the arm is faster.

        By the newest run in which both took turns; where none did, by the ratio of
        each to no speculation, which may be of two runs.
        """
        both = self.together((arm, other), c, workload)
        if both is not None and took_turns(both):
            return both[1].tpot_ms / both[0].tpot_ms
        mine, theirs = self.ratio(arm, c, workload), self.ratio(other, c, workload)
        return mine.value / theirs.value if mine and theirs else None

    def share(self, arm: Arm, c: int, workload: str) -> float | None:
        """Return which share of the oracle's gain (at the same k) the arm reaches."""
        mine = self.ratio(arm, c, workload)
        oracle = self.ratio(Arm("v2-oracle", arm.k), c, workload)
        if mine is None or oracle is None or oracle.value - 1 < LEAST_GAIN:
            return None
        return (mine.value - 1) / (oracle.value - 1)

    def better(self, arms: Iterable[Arm], c: int, workload: str) -> Ratio | None:
        """Return the best ratio of some arms."""
        found = [self.ratio(arm, c, workload) for arm in arms]
        return max((r for r in found if r), key=lambda r: r.value, default=None)

    def without_base(self) -> list[Point]:
        """Return the points of which no run has the base too."""
        return [
            point
            for point in self.points
            if self.ratio(Arm(point.arm, point.k), point.c, point.workload) is None
        ]


def took_turns(points: Sequence[Point]) -> bool:
    """Tell whether some arms' points were taken in turns, run by run."""
    numbers = {len(point.turns) for point in points}
    ends = sorted(point.when for point in points)
    if numbers == {0} or len(numbers) > 1 or ends[0] == NO_TIME:
        return False
    gaps = [after - before for before, after in pairwise(ends)]
    return all(gap.total_seconds() <= _TURN_SECONDS for gap in gaps)


def _spread(base: Point, point: Point, ratio: float) -> float:
    if not took_turns((base, point)):
        return max(point.spread, base.spread)
    pairs = zip(base.turns, point.turns, strict=True)
    ratios = [without / own for without, own in pairs]
    return (max(ratios) - min(ratios)) / ratio
