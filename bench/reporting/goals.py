"""The report's sections on what this project promises."""

from collections.abc import Callable

from reporting.arms import (
    KS,
    OURS,
    Found,
    found_ratios,
    in_order,
)
from reporting.compare import FLOOR, Arm, Grid
from reporting.grid_sections import EMPTY
from reporting.markdown import NOTHING, table

# What this project promises: the better of its drafters at k=16, by workload and c.
GOALS = {
    "low": {1: 1.20, 16: 1.10, 64: 1.03, 256: 0.98},
    "low-smollm2": {1: 1.8, 16: 1.45, 64: 1.2, 256: 1.03},
    "mid": {1: 3.0, 16: 2.3, 64: 1.7, 256: 1.3},
    "high": {1: 7.0, 16: 4.3, 64: 2.3, 256: 1.5},
    "agentic": {1: 2.5, 16: 1.9, 64: 1.4, 256: 1.1},
}


IN_TREE = [Arm("v2-intree-ngram", k) for k in KS]


def goals(grid: Grid) -> str:
    """The better of our drafters at k=16, beside what was promised."""
    if not grid.points:
        return EMPTY
    rows = []
    for workload, wanted in GOALS.items():
        cells = [workload]
        for c, goal in wanted.items():
            best = grid.better([Arm(name, 16) for name in OURS], c, workload)
            if best is None:
                cells.append(f"{NOTHING} / {goal:.2f}")
                continue
            text = f"{best} / {goal:.2f} ({best.point.arm})"
            cells.append(text if best.value >= goal else f"**{text}**")
        rows.append(cells)
    head = ["workload", *(f"c={c}" for c in GOALS["low"])]
    return (
        table(head, rows) + "\n\nReached / promised (drafter). **Bold**: not reached."
    )


def promises(grid: Grid) -> str:
    """The other promises, each with its worst point."""
    if not grid.points:
        return EMPTY
    ours = [arm for arm in grid.arms if arm.name in OURS]
    longest = [arm for arm in ours if arm.k == 16]
    floor = found_ratios(grid, ours)
    rows = [
        _promise("trimmed arms: at least 0.97", floor, FLOOR),
        _oracle_promise(grid),
        _promise(
            "the better of ours, k=16, against the better of in-tree k=5 and k=16: at "
            "least 1",
            _better_against(grid, longest),
            1.0,
        ),
        _promise(
            "each of ours, k=16, against the same: at least 1",
            _against(grid, longest, lambda arm: IN_TREE),
            1.0,
        ),
        _promise(
            "n-gram, k=5, against in-tree n-gram, k=5: at least 1",
            _against(
                grid,
                [arm for arm in ours if arm == Arm("ngram", 5)],
                lambda arm: [Arm("v2-intree-ngram", 5)],
            ),
            1.0,
        ),
        _promise(
            "k=16 against k=5 of the same drafter: at least 0.98",
            _against(grid, longest, lambda arm: [Arm(arm.name, 5)]),
            0.98,
        ),
        _promise(
            "prompt tok/s with k=16 against no speculation: at least 0.97",
            _prefill(grid, longest, 0.0),
            0.97,
        ),
        _promise(
            "the same where the prompts took a second or more without speculation",
            _prefill(grid, longest, 1.0),
            0.97,
        ),
    ]
    return table(("promise", "points", "below", "lowest"), rows)


def _against(grid: Grid, arms: list[Arm], others: Callable[[Arm], list[Arm]]) -> Found:
    """Return the arms against the best of others, where any of these is there."""
    found = []
    for _, arm, c, workload in found_ratios(grid, arms):
        values = [grid.against(arm, other, c, workload) for other in others(arm)]
        there = [value for value in values if value is not None]
        if there:
            found.append((min(there), arm, c, workload))
    return found


def _better_against(grid: Grid, arms: list[Arm]) -> Found:
    """Our best arm of each point that vLLM's drafter has, over the best of its arms."""
    best: dict[tuple[str, int], tuple[float, Arm, int, str]] = {}
    for one in _against(grid, arms, lambda arm: IN_TREE):
        place = (one[3], one[2])
        best[place] = max(one, best.get(place, one))
    return list(best.values())


def _prefill(grid: Grid, arms: list[Arm], least_seconds: float) -> Found:
    found: Found = []
    for arm in arms:
        for workload in grid.workloads:
            for c in grid.concurrencies:
                pair = grid.together([arm, grid.base(arm)], c, workload)
                if not pair or not pair[0].prefill_tok_s or not pair[1].prefill_tok_s:
                    continue
                if pair[0].copied:
                    continue
                if (pair[1].prefill_s or 0.0) >= least_seconds:
                    value = pair[0].prefill_tok_s / pair[1].prefill_tok_s
                    found.append((value, arm, c, workload))
    return found


def _promise(text: str, found: Found, least: float) -> tuple[object, ...]:
    if not found:
        return text, 0, NOTHING, NOTHING
    value, arm, c, workload = min(found)
    below = sum(one[0] < least for one in found)
    return text, len(found), below, f"{value:.3f} ({arm.label}, {workload}, c={c})"


def _oracle_promise(grid: Grid) -> tuple[object, ...]:
    text = "`high`, c=64, k=16: at least half of the gain of perfect drafts"
    shares = [
        (share, name)
        for name in OURS
        if (share := grid.share(Arm(name, 16), 64, "high")) is not None
    ]
    if not shares:
        return text, 0, NOTHING, NOTHING
    share, name = max(shares)
    return text, 1, int(share < 0.5), f"{share:.0%} ({name}:16)"


def shift(grid: Grid) -> str:
    """Each third of a workload that changes its nature half-way."""
    fixed = [Arm("v2-none"), *IN_TREE]
    rows = []
    for arm in in_order([arm for arm in grid.arms if arm.name in OURS]):
        for c in grid.concurrencies:
            mine = grid.together([arm, fixed[0]], c, "shift")
            if mine is None or mine[0].stages is None:
                continue
            others = [
                point.stages
                for choice in fixed
                if (found := grid.together([arm, choice], c, "shift"))
                and found[0].run_id == mine[0].run_id
                and (point := found[1]).stages
            ]
            cells = [
                f"{min(other[i] for other in others) / stage:.2f}"
                for i, stage in enumerate(mine[0].stages)
            ]
            rows.append((arm.label, c, *cells, len(others)))
    if not rows:
        return "The workload that changes half-way (`shift`) is not recorded yet."
    head = ("arm", "c", "prose", "code edits", "prose again", "fixed choices")
    return table(head, rows)
