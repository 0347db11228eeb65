"""The report's section on the simulator: how far the engine is from paper."""

from itertools import pairwise
from typing import Any

from reporting.compare import Arm, Grid
from reporting.markdown import NOTHING, table

# The simulator's drafters, and the arms that draft so.
DRAFTERS = {"ngram-latest": "ngram", "suffix-memory": "suffix"}
POLICY = "curve"


def paper(grid: Grid, record: dict[str, Any] | None) -> str:
    """TPOT ratios of the simulator beside those of the engine."""
    if record is None:
        return "`bench/simulate_policy.py` was not run yet."
    simulated = {
        (DRAFTERS[p["drafter"]], p["k"], p["workload"], p["requests"]): p["ratio"]
        for p in record["points"]
        if p["policy"] == POLICY and p["drafter"] in DRAFTERS
    }
    places = sorted({c for *_, c in simulated})
    lines = dict.fromkeys((name, k, workload) for name, k, workload, _ in simulated)
    rows = []
    for name, k, workload in lines:
        cells = []
        for c in places:
            on_paper = simulated.get((name, k, workload, c))
            real = grid.ratio(Arm(name, k), c, workload)
            if on_paper is None:
                cells.append(NOTHING)
            elif real is None:
                cells.append(f"{on_paper:.2f} / {NOTHING}")
            else:
                share = real.value / on_paper - 1
                cells.append(f"{on_paper:.2f} / {real.value:.2f} ({share:+.0%})")
        rows.append((f"{name}:{k}", workload, *cells))
    head = ("arm", "workload", *(f"c={c}" for c in places))
    source = f"Simulated at commit {record['commit']}: `{record['command']}`"
    return f"{table(head, rows)}\n\nPaper / engine (difference). {source}"


def step_cost(record: dict[str, Any] | None) -> str:
    """What a step is charged on paper, as fitted to the engine's points."""
    if record is None:
        return "`bench/fit_step_cost.py` was not run yet."
    rows = [
        (f"{least} to {most}", f"{(more - less) / (most - least) * 1000:.1f}")
        for (least, less), (most, more) in pairwise(record["rows_ms"])
    ]
    worst, arm, c = max(
        (abs(error), arm, int(c))
        for arm, errors in record["errors"].items()
        for c, error in errors.items()
    )
    return (
        f"{table(('rows of a step', 'us a row'), rows)}\n\n"
        f"And {record['wide_ms']:.2f} ms for any draft, on top of a measured step "
        f"without drafts. Fitted to {record['points']} points of "
        f"{', '.join(record['runs'])}: `{record['command']}` ({record['commit']}). Of "
        f"an arm and number of requests the mean error is at most {worst:.0%} "
        f"({arm}, c={c})."
    )
