"""The report's sections on the engine grid."""

from reporting.arms import (
    expected,
    found_ratios,
    in_order,
    look,
    workloads_in_order,
)
from reporting.compare import FLOOR, SPREAD, Arm, Grid
from reporting.load import Point
from reporting.markdown import NOTHING, details, listed, table

EMPTY = "No point of the engine grid is recorded yet."


def ratios(grid: Grid) -> str:
    """TPOT of no speculation over that of each arm, a table a workload."""
    if not grid.points:
        return EMPTY
    parts = []
    for workload in workloads_in_order(grid.workloads):
        columns = [c for c in grid.concurrencies if any(_at(grid, workload, c))]
        head = ("arm", *(f"c={c}" for c in columns))
        rows = []
        for arm in in_order(grid.arms):
            found = [grid.ratio(arm, c, workload) for c in columns]
            if arm.k and any(found):
                rows.append((arm.label, *(ratio or NOTHING for ratio in found)))
        if rows:
            parts.append(f"### {workload}\n\n" + table(head, rows))
            parts.append(
                details(
                    f"{workload}: TPOT in ms, tokens a step, output tok/s with "
                    "prefill, prompt tok/s",
                    _absolute(grid, workload, columns),
                )
            )
    return "\n\n".join(parts)


def _at(grid: Grid, workload: str, c: int) -> list[Point]:
    return [p for p in grid.points if p.workload == workload and p.c == c]


def _figures(point: Point) -> str:
    text = f"{point.tpot_ms:.2f}, {point.tokens_per_step:.2f}, {point.tok_s:.0f}"
    if point.prefill_tok_s is None:
        return text
    return f"{text}, {point.prefill_tok_s:.0f}"


def _absolute(grid: Grid, workload: str, columns: list[int]) -> str:
    rows = []
    for arm in in_order(grid.arms):
        cells = []
        for c in columns:
            # The run of the ratio, where there is one.
            ratio = grid.ratio(arm, c, workload)
            alone = grid.together([arm], c, workload)
            point = ratio.point if ratio else alone[0] if alone else None
            cells.append(_figures(point) if point else NOTHING)
        if any(cell != NOTHING for cell in cells):
            rows.append((arm.label, *cells))
    return table(("arm", *(f"c={c}" for c in columns)), rows)


def shares(grid: Grid) -> str:
    """What share of the gain of perfect drafts each arm reaches."""
    parts = []
    for workload in workloads_in_order(grid.workloads):
        rows = []
        for arm in in_order(grid.arms):
            if not arm.k or arm.name == "v2-oracle":
                continue
            found = [grid.share(arm, c, workload) for c in grid.concurrencies]
            if any(share is not None for share in found):
                rows.append(
                    (
                        arm.label,
                        *(
                            NOTHING if share is None else f"{share:.0%}"
                            for share in found
                        ),
                    )
                )  # fmt: skip
        if rows:
            head = (workload, *(f"c={c}" for c in grid.concurrencies))
            parts.append(table(head, rows))
    return "\n\n".join(parts) or "No point has perfect drafts (`v2-oracle`) beside it."


def losses(grid: Grid) -> str:
    """Where each arm is slower than no speculation."""
    if not grid.points:
        return EMPTY
    rows, never = [], []
    for arm in in_order(grid.arms):
        found = found_ratios(grid, [arm])
        lost = [one for one in found if one[0] < FLOOR]
        if not arm.k or not found:
            continue
        if not lost:
            never.append(f"{arm.label} ({len(found)} points)")
            continue
        where = []
        for workload in workloads_in_order({one[3] for one in lost}):
            here = [one for one in lost if one[3] == workload]
            where.append(
                f"{workload} c={'/'.join(str(one[2]) for one in here)} "
                f"(lowest {min(here)[0]:.2f})"
            )
        rows.append((arm.label, f"{len(lost)} of {len(found)}", "; ".join(where)))
    head = ("arm", f"points below {FLOOR}", "where")
    lines = [table(head, rows)] if rows else []
    lines.append(f"Below {FLOOR} nowhere: {listed(never)}.")
    return "\n\n".join(lines)


def slowest(grid: Grid) -> str:
    """The slowest hundredth of the requests, against no speculation's."""
    rows = []
    for workload in workloads_in_order(grid.workloads):
        for arm in in_order(grid.arms):
            cells = []
            for c in grid.concurrencies:
                pair = grid.together([arm, grid.base(arm)], c, workload)
                mine, base = (one.p99_ms for one in pair) if pair else (None, None)
                cells.append(f"{base / mine:.2f}" if mine and base else NOTHING)
            if arm.k and any(cell != NOTHING for cell in cells):
                rows.append((workload, arm.label, *cells))
    if not rows:
        return "No point says how slow its slowest requests were."
    head = ("workload", "arm", *(f"c={c}" for c in grid.concurrencies))
    return table(head, rows)


def loops(grid: Grid) -> str:
    """SmolLM2's own answers with and without those that end in a loop."""
    both = ("low-smollm2", "low-smollm2-noloop")
    rows = []
    for arm in in_order(grid.arms):
        cells = []
        for c in grid.concurrencies:
            pair = [grid.ratio(arm, c, workload) for workload in both]
            cells.append(" / ".join(str(ratio or NOTHING) for ratio in pair))
        if arm.k and any(cell != f"{NOTHING} / {NOTHING}" for cell in cells):
            rows.append((arm.label, *cells))
    if not rows:
        return "SmolLM2's answers are not in the engine grid yet."
    head = ("all / without loops", *(f"c={c}" for c in grid.concurrencies))
    return table(head, rows)


def asleep(grid: Grid) -> str:
    """Share of the steps in which nothing was drafted for, by point."""
    rows = []
    for arm in in_order(grid.arms):
        for workload in workloads_in_order(grid.workloads):
            cells = []
            for c in grid.concurrencies:
                found = grid.together([arm], c, workload)
                share = found[0].asleep if found else None
                cells.append(NOTHING if share is None else f"{share:.0%}")
            if any(cell != NOTHING for cell in cells):
                rows.append((arm.label, workload, *cells))
    if not rows:
        return "No point says how often drafting slept."
    head = ("arm", "workload", *(f"c={c}" for c in grid.concurrencies))
    return details("share of steps asleep, by arm and workload", table(head, rows))


def graph_memory(grid: Grid) -> str:
    """The memory of each arm's CUDA graphs, as its newest points tell."""
    rows = []
    for arm in in_order(grid.arms):
        told = [
            point
            for point in grid.points
            if Arm(point.arm, point.k) == arm and point.graph_mib is not None
        ]
        if told:
            newest = max(told, key=lambda point: point.when)
            rows.append((arm.label, f"{newest.graph_mib:.0f}", newest.commit))
    if not rows:
        return "No point says what memory CUDA graphs hold."
    return table(("arm", "MiB", "commit"), rows)


def spreads(grid: Grid) -> str:
    """The points whose runs differ by more than 3 %."""
    wide = [point for point in grid.points if point.spread > SPREAD]
    text = (
        f"{len(grid.points) - len(wide)} of {len(grid.points)} points repeat within "
        f"{SPREAD:.0%}"
    )
    if not wide:
        return text + "."
    rows = [
        (p.label, p.workload, p.c, f"{p.spread:.1%}", f"{p.tpot_ms:.3f}", p.run_id)
        for p in sorted(wide, key=lambda p: -p.spread)
    ]
    head = ("arm", "workload", "c", "spread", "TPOT ms", "run")
    return f"{text}; the others:\n\n" + details(
        f"{len(wide)} points", table(head, rows)
    )


def missing(grid: Grid) -> str:
    """What a whole grid has and the record has not."""
    arms = [arm.label for arm in expected() if arm not in grid.arms]
    lines = [f"Arms without any point: {listed(arms)}."]
    holes = []
    for arm in in_order(grid.arms):
        for workload in workloads_in_order(grid.workloads):
            lacking = [
                c
                for c in grid.concurrencies
                if grid.together([arm], c, workload) is None
            ]
            if lacking == grid.concurrencies:
                holes.append(f"{arm.label} {workload}")
            elif lacking:
                holes.append(f"{arm.label} {workload} c={'/'.join(map(str, lacking))}")
    lines.append(f"Points not measured: {listed(holes)}.")
    alone = {f"{p.label} {p.workload} c={p.c}" for p in grid.without_base()}
    lines.append(
        "Points without no speculation in the same run, so without a ratio: "
        f"{listed(sorted(alone))}."
    )
    return "\n\n".join(lines)


def runs(grid: Grid) -> str:
    """Where the points come from."""
    rows = []
    for run in grid.run_ids:
        points = [point for point in grid.points if point.run_id == run]
        machines = {(p.gpu, p.driver, p.torch, p.vllm) for p in points}
        arms = listed(arm.label for arm in in_order(_arms(points)))
        for gpu, driver, torch, vllm in sorted(machines, key=str):
            commits = listed(sorted({str(p.commit) for p in points}))
            where = f"{gpu or 'CPU'}, driver {driver}, torch {torch}, vLLM {vllm}"
            commands = listed(f"`{c}`" for c in sorted({p.command for p in points}))
            host = _range([p.host_ms for p in points if p.host_ms is not None])
            rows.append((run, commits, len(points), arms, where, host, commands))
    if not rows:
        return EMPTY
    head = (
        "run", "commit", "points", "arms", "machine", "Python loop ms", "command"
    )  # fmt: skip
    return table(head, rows)


def _range(values: list[float]) -> str:
    """Return the least and the largest of some values."""
    if not values:
        return NOTHING
    return f"{min(values):.1f} to {max(values):.1f}"


def _arms(points: list[Point]) -> list[Arm]:
    return list({Arm(point.arm, point.k) for point in points})


def names(grid: Grid) -> str:
    """What the arms are."""
    known = {arm.name for arm in (*grid.arms, *expected())}
    lines = [
        f"- `{arm.name}`: {look(arm.name).title}"
        for arm in in_order([Arm(name) for name in known])
    ]
    return "\n".join(lines)
