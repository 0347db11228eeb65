"""What a step costs, fitted to points of the engine grid.

A step with drafts takes what the same run's step without any takes, and more for the
rows that the drafts add: piecewise linear in the rows, since up to some hundred rows a
product is as long as reading its weights takes. And a constant: the rejection sampler,
a graph for several queries a request, the host's work.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from .cost import Points, StepCost, graph_sizes

# Rows between which a row's cost is taken to be the same. Products of just above 384
# rows take clearly longer than those of 384.
EDGES = (1, 64, 128, 256, 384, 512, 1024, 2048)
# In-tree steps of more rows are launched kernel by kernel, not from one graph.
MOST_IN_TREE_ROWS = 512
# Ours capture graphs up to here.
SIZES = graph_sizes(2048)
# Requests of these end at very different times. What is recorded of a step is a mean
# of full steps and of those in which few requests are left.
UNEVEN = ("high", "mid")
# At least this share of the steps must have drafts: the others are subtracted.
LEAST_SHARE = 0.5

Line = dict[str, Any]


@dataclass(frozen=True)
class Fitted:
    """The costs, and how well they fit.

    Attributes:
        rows_ms: (rows, ms) what rows cost beside one row.
        wide_ms: what a step with drafts costs besides.
        plain_ms: by workload, (requests, ms) of a step without drafts, as measured.
        points: how many points were fitted.
        errors: by arm and requests, the mean of fitted over measured step, less 1.
    """

    rows_ms: Points
    wide_ms: float
    plain_ms: dict[str, Points]
    points: int
    errors: dict[str, dict[int, float]]

    def cost(self, workload: str) -> StepCost:
        """Return what steps of a workload cost.

        Steps without drafts differ by workload, as contexts do. One that was not
        measured is charged the mean of those that were.
        """
        plain = self.plain_ms.get(workload) or _mean(self.plain_ms)
        return StepCost(
            base_by_requests=plain,
            rows_ms=self.rows_ms,
            sizes=SIZES,
            wide_ms=((1, self.wide_ms),),
        )

    def to_json(self) -> dict[str, Any]:
        """Return what a record keeps."""
        return {
            "rows_ms": self.rows_ms,
            "wide_ms": self.wide_ms,
            "plain_ms": self.plain_ms,
            "points": self.points,
            "errors": self.errors,
        }

    @classmethod
    def of_json(cls, record: dict[str, Any]) -> "Fitted":
        """Return what a record kept."""

        def points(pairs: list[list[float]]) -> Points:
            return tuple((a, b) for a, b in pairs)

        return cls(
            points(record["rows_ms"]),
            record["wide_ms"],
            {name: points(pairs) for name, pairs in record["plain_ms"].items()},
            record["points"],
            record["errors"],
        )


def _mean(plain: dict[str, Points]) -> Points:
    by_requests = defaultdict(list)
    for points in plain.values():
        for requests, ms in points:
            by_requests[requests].append(ms)
    return tuple((c, fmean(ms)) for c, ms in sorted(by_requests.items()))


def _segments(rows: float) -> np.ndarray:
    """Return how much of each segment lies below so many rows."""
    edges = np.array(EDGES, float)
    upper = np.append(edges[1:-1], np.inf)
    return np.clip(rows, edges[:-1], upper) - edges[:-1]


def _with_drafts(line: Line) -> tuple[float, float] | None:
    """Return a point's draft places and which share of its steps has them, or None."""
    if line["arm"] == "v2-intree-ngram":
        places = line["c"] * line["k"]
        return (places, 1.0) if line["c"] + places <= MOST_IN_TREE_ROWS else None
    if line["asleep"] is None or not line["mean_budget"]:
        return None
    if line["workload"] in UNEVEN and line["arm"] != "v2-oracle":
        return None
    share = 1.0 - line["asleep"] - line["awake_without"]
    return (line["mean_budget"], share) if share >= LEAST_SHARE else None


def fit(lines: Sequence[Line]) -> Fitted:
    """Fit costs to points of the engine grid, by least squares of relative errors.

    Args:
        lines: points of one shape, of whole runs. Each point is set beside the one
            without speculation of its own run.

    Raises:
        ValueError: too few points, or rows that would cost nothing.
    """
    lines = [line for line in lines if line["workload"] != "shift"]
    plain = {
        (line["run_id"], line["c"], line["workload"]): line["tpot_ms"]
        for line in lines
        if line["arm"] == "v2-none"
    }
    matrix, wanted, labels = [], [], []
    for line in lines:
        base = plain.get((line["run_id"], line["c"], line["workload"]))
        drafts = None if line["arm"] in ("v2-none", "v1-none") else _with_drafts(line)
        if base is None or drafts is None:
            continue
        places, share = drafts
        step = line["tpot_ms"] * line["tokens_per_step"]
        more = _segments(line["c"] + places) - _segments(line["c"])
        matrix.append(share * np.append(more, 1.0) / step)
        wanted.append((step - base) / step)
        labels.append((f"{line['arm']}:{line['k']}", line["c"]))
    if len(matrix) <= len(EDGES):
        raise ValueError(f"{len(matrix)} points are too few")
    found, _, rank, _ = np.linalg.lstsq(np.array(matrix), np.array(wanted))
    if rank < len(EDGES) or (found <= 0).any():
        raise ValueError(f"no costs fit these points: {found.tolist()}")
    ms = np.concatenate([[0.0], np.cumsum(found[:-1] * np.diff(EDGES))])
    errors = defaultdict(list)
    for label, error in zip(labels, np.array(matrix) @ found - wanted, strict=True):
        errors[label].append(float(error))
    return Fitted(
        tuple(zip(EDGES, ms.tolist(), strict=True)),
        float(found[-1]),
        _plain_by_workload(plain),
        len(matrix),
        {
            arm: {c: fmean(errors[arm, c]) for a, c in sorted(errors) if a == arm}
            for arm in sorted({arm for arm, _ in errors})
        },
    )


def _plain_by_workload(plain: dict[tuple[str, int, str], float]) -> dict[str, Points]:
    measured: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (_, c, workload), ms in plain.items():
        measured[workload][c].append(ms)
    return {
        workload: tuple((c, fmean(ms)) for c, ms in sorted(by_c.items()))
        for workload, by_c in sorted(measured.items())
    }
