"""The report's section on the simulator: how far the engine is from paper."""

from itertools import pairwise
from typing import Any

from reporting.compare import Arm, Grid
from reporting.markdown import NOTHING, table

# The simulator's drafters, and the arms that draft so.
DRAFTERS = {"ngram-latest": "ngram", "suffix-memory": "suffix"}
# Its policies: one that knows what steps are charged, and the engine's own.
KNOWING, OWN = "curve", "engine"


def paper(grid: Grid, record: dict[str, Any] | None) -> str:
    """TPOT ratios of the simulator beside those of the engine."""
    if record is None:
        return "`bench/simulate_policy.py` was not run yet."
    simulated: dict[tuple[str, int, str, int], dict[str, float]] = {}
    for p in record["points"]:
        if p["policy"] in (KNOWING, OWN) and p["drafter"] in DRAFTERS:
            place = (DRAFTERS[p["drafter"]], p["k"], p["workload"], p["requests"])
            simulated.setdefault(place, {})[p["policy"]] = p["ratio"]
    places = sorted({c for *_, c in simulated})
    lines = dict.fromkeys((name, k, workload) for name, k, workload, _ in simulated)
    rows = []
    for name, k, workload in lines:
        cells = []
        for c in places:
            on_paper = simulated.get((name, k, workload, c))
            real = grid.ratio(Arm(name, k), c, workload)
            cells.append(_cell(on_paper, real.value if real else None))
        rows.append((f"{name}:{k}", workload, *cells))
    head = ("arm", "workload", *(f"c={c}" for c in places))
    source = f"Simulated at commit {record['commit']}: `{record['command']}`"
    return (
        f"{table(head, rows)}\n\nPaper, knowing what steps are charged / paper, the "
        "engine's own policy with the costs that an engine measured / engine "
        f"(its difference to the paper before it). {source}"
    )


def _cell(on_paper: dict[str, float] | None, real: float | None) -> str:
    if on_paper is None:
        return NOTHING
    knowing, own = on_paper.get(KNOWING), on_paper.get(OWN)
    texts = [NOTHING if one is None else f"{one:.2f}" for one in (knowing, own, real)]
    before = own or knowing
    if real is not None and before is not None:
        texts[-1] += f" ({real / before - 1:+.0%})"
    return " / ".join(texts)


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
