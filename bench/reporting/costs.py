"""The report's sections on what steps cost, and on what came of their drafts."""

from statistics import median

from reporting.arms import in_order, workloads_in_order
from reporting.compare import Arm, Grid
from reporting.load import Costs, Curve, Point
from reporting.markdown import NOTHING, table

# Of the table; all sizes would fill a page.
SIZES = (
    1, 16, 64, 128, 192, 256, 320, 384, 416, 448, 480, 512, 576, 640, 768, 1024, 1536,
    2048,
)  # fmt: skip
# A size is called slow that takes more than so many times what a larger one does.
SLOW = 1.01
# Fewer draft places than this say little.
LEAST_PLACES = 500


def engine_costs(costs: list[Costs]) -> str:
    """What steps of some sizes take, and which sizes take longer than larger ones."""
    if not costs:
        return "No engine's costs are recorded yet."
    drafting = _medians([one.drafting for one in costs])
    bare = _medians([one.bare for one in costs])
    plain = _medians([one.plain for one in costs])
    rows = []
    for size in SIZES:
        if size not in drafting:
            continue
        cells = [f"{drafting[size]:.2f}", NOTHING, NOTHING]
        # Up to the most requests, both at the same sizes.
        if size in bare and size in plain:
            cells[1:] = f"{bare[size]:.2f}", f"{plain[size] - bare[size]:.2f}"
        rows.append((size, *cells))
    head = ("tokens", "with drafts", "one a request", "and contexts of 512")
    spread = max(
        (max(ms) - min(ms)) / median(ms)
        for ms in _by_size([one.drafting for one in costs]).values()
    )
    engines = ", ".join(f"{one.label} of {one.run_id} ({one.commit})" for one in costs)
    return (
        f"{table(head, rows)}\n\n"
        f"Milliseconds, the median of {len(costs)} engines, which differ by up to "
        f"{spread:.0%} at a size: {engines}. Sizes with drafts that take over "
        f"{SLOW - 1:.0%} longer than a larger one: {_slow(drafting)}."
    )


def _slow(ms: dict[float, float]) -> str:
    """Name sizes that take longer than a larger one, each with the fastest such."""
    named = []
    for size, cost in ms.items():
        larger = {n: other for n, other in ms.items() if n > size}
        if not larger:
            continue
        best = min(larger, key=larger.__getitem__)
        if cost > SLOW * larger[best]:
            named.append(f"{size:.0f} ({cost:.1f} ms; {best:.0f}: {larger[best]:.1f})")
    return ", ".join(named) or "none"


def _by_size(curves: list[Curve]) -> dict[float, list[float]]:
    found: dict[float, list[float]] = {}
    for curve in curves:
        for size, ms in curve:
            found.setdefault(size, []).append(ms)
    return dict(sorted(found.items()))


def _medians(curves: list[Curve]) -> dict[float, float]:
    return {size: median(ms) for size, ms in _by_size(curves).items()}


def reckoned(grid: Grid) -> str:
    """What steps with drafts were expected to bring and to take, and what they did."""
    newest = {
        (Arm(point.arm, point.k), point.c, point.workload): point
        for point in sorted(grid.points, key=lambda point: point.when)
        if point.expected_accepted is not None
    }
    rows = []
    arms = [arm for arm in in_order(grid.arms) if arm.name in ("ngram", "suffix")]
    for workload in workloads_in_order(grid.workloads):
        for arm in arms:
            found = [newest.get((arm, c, workload)) for c in grid.concurrencies]
            if any(found):
                cells = [_cell(point) if point else NOTHING for point in found]
                rows.append((workload, arm.label, *cells))
    if not rows:
        return "No point says what was expected yet."
    return table(("workload", "arm", *(f"c={c}" for c in grid.concurrencies)), rows)


def _cell(point: Point) -> str:
    places = (point.drafted or 0) + (point.fillers or 0)
    if (
        not point.mean_budget
        or point.expected_accepted is None
        or places < LEAST_PLACES
    ):
        return NOTHING
    text = f"{point.mean_budget:.0f}: {point.expected_accepted / point.mean_budget:.0%}"
    text += f" / {(point.accepted or 0) / places:.0%}"
    if point.reckoned_ms is None or point.took_ms is None:
        return text
    return f"{text}, {point.reckoned_ms:.1f} / {point.took_ms:.1f} ms"
