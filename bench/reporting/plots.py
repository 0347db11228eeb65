"""The report's plots."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from reporting.arms import KS, WORKLOADS, in_order, look, workloads_in_order
from reporting.compare import Arm, Grid

STYLE: Any = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 110,
}
RATIO_TICKS = (0.125, 0.25, 0.5, 0.7, 1, 1.4, 2, 3, 4, 6, 8, 12, 16)
NAMES = {
    "propose_time.png",
    "replay.png",
    *(f"{plot}_k{k}.png" for plot in ("tpot_ratio", "tokens_per_step") for k in KS),
}
Value = Callable[[Arm, int, str], float | None]


def figures(grid: Grid, records: dict[str, Any]) -> dict[str, Figure]:
    """Return the plots whose results are there, by file name."""
    made: dict[str, Figure | None] = {}
    with plt.rc_context(STYLE):
        for k in KS:
            made[f"tpot_ratio_k{k}.png"] = _panels(
                grid, k, _ratio(grid), "TPOT ratio to no speculation", log=True
            )
            made[f"tokens_per_step_k{k}.png"] = _panels(
                grid, k, _tokens(grid), "tokens a step", log=False
            )
        made["propose_time.png"] = _propose_time(records)
        made["replay.png"] = _replay(records)
    return {name: figure for name, figure in made.items() if figure is not None}


def save(drawn: dict[str, Figure], folder: Path) -> None:
    """Write the plots, and remove earlier ones that are not among them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES - set(drawn):
        (folder / name).unlink(missing_ok=True)
    for name, figure in drawn.items():
        with plt.rc_context(STYLE):
            # No version of the library in the file: same results, same bytes.
            figure.savefig(
                folder / name, bbox_inches="tight", metadata={"Software": None}
            )


def _ratio(grid: Grid) -> Value:
    def value(arm: Arm, c: int, workload: str) -> float | None:
        ratio = grid.ratio(arm, c, workload)
        return ratio.value if ratio else None

    return value


def _tokens(grid: Grid) -> Value:
    def value(arm: Arm, c: int, workload: str) -> float | None:
        found = grid.together([arm], c, workload)
        return found[0].tokens_per_step if found else None

    return value


def _panels(
    grid: Grid, k: int, value: Value, label: str, *, log: bool
) -> Figure | None:
    """A panel a workload, one line an arm."""
    arms = in_order([arm for arm in grid.arms if arm.k == k])
    places = grid.concurrencies
    lines = {
        workload: {arm: [value(arm, c, workload) for c in places] for arm in arms}
        for workload in workloads_in_order(grid.workloads)
    }
    lines = {
        workload: {a: v for a, v in of.items() if any(x is not None for x in v)}
        for workload, of in lines.items()
    }
    lines = {workload: of for workload, of in lines.items() if of}
    if not lines:
        return None
    rows = -(-len(lines) // 2)
    figure, axes = plt.subplots(
        rows, 2, figsize=(13, 4.0 * rows), squeeze=False, layout="constrained"
    )
    handles: dict[str, Any] = {}
    for axis, (workload, of) in zip(axes.flat, lines.items(), strict=False):
        for arm, values in of.items():
            drawn = look(arm.name)
            (handles[drawn.title],) = axis.plot(
                range(len(places)),
                [float("nan") if v is None else v for v in values],
                color=drawn.colour,
                linestyle=drawn.line,
                marker=drawn.marker,
                markersize=6,
                linewidth=2,
            )
        _dress(axis, workload, places, label, log=log)
    for axis in axes.flat[len(lines) :]:
        axis.set_visible(False)
    figure.suptitle(f"{label}, k={k}", fontsize=15)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=12,
    )
    return figure


def _dress(
    axis: Axes, workload: str, places: list[int], label: str, *, log: bool
) -> None:
    what = WORKLOADS.get(workload)
    axis.set_title(f"{workload}: {what}" if what else workload, loc="left")
    axis.set_xticks(range(len(places)), [str(c) for c in places])
    axis.set_xlabel("requests at a time")
    axis.set_ylabel(label)
    if not log:
        # One token a step is what no drafts give.
        axis.set_ylim(bottom=0.9)
        return
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    # Room for a second tick, so that the scale can be read.
    low, high = min(low, 0.9), max(high, 1.5)
    axis.set_ylim(low, high)
    ticks = [tick for tick in RATIO_TICKS if low <= tick <= high]
    if len(ticks) > 8:
        ticks = [tick for tick in ticks if tick not in (0.7, 1.4, 3, 6, 12)]
    axis.yaxis.set_major_locator(FixedLocator(ticks))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.axhline(1, color="black", linewidth=1)


def _propose_time(records: dict[str, Any]) -> Figure | None:
    """GPU time of drafting against the batch, rows of about 4096 tokens."""
    lines: dict[str, tuple[str, str, list[tuple[int, float]]]] = {}

    def add(name: str, colour: str, marker: str, at: int, time: float) -> None:
        lines.setdefault(name, (colour, marker, []))[2].append((at, time))

    for case in records.get("propose_ngram", {}).get("cases", []):
        if case["row_len"] == 4096 and case["text"] == "dense":
            at = case["num_reqs"]
            add("mrv2-spec n-gram", "#d55e00", "o", at, case["ours_us"]["p50"])
            if case.get("in_tree_us"):
                add("vLLM n-gram, V2", "#e69f00", "^", at, case["in_tree_us"]["p50"])
    for case in records.get("suffix", {}).get("cases", []):
        if case["row_len"] == 4096 and case["text"] == "prose":
            name = "mrv2-spec suffix, memory included"
            add(name, "#0072b2", "o", case["num_reqs"], case["propose_us"]["p50"])
    looks = {
        "suffix-gpu": ("suffix-gpu, draft alone", "#555555", "P"),
        "arctic-inference": ("arctic-inference, CPU", "#cc79a7", "D"),
    }
    rivals = records.get("suffix_rivals", {}).get("cases", [])
    for case in (case for case in rivals if case["row_len"] <= 4096):
        for arm, (name, colour, marker) in looks.items():
            # suffix-gpu was run with several settings; the first is its default.
            same = [v for n, v in case["arms"].items() if n.startswith(arm)]
            if same:
                found = same[0]
                time = found.get("propose_us", {}).get("p50", found.get("host_us"))
                add(name, colour, marker, case["num_reqs"], time)
    if not lines:
        return None
    figure, axis = plt.subplots(figsize=(10, 6), layout="constrained")
    places = sorted({at for _, _, points in lines.values() for at, _ in points})
    for name, (colour, marker, points) in lines.items():
        times = dict(points)
        axis.plot(
            # No line over batches that were not timed.
            [times.get(at, math.nan) for at in places],
            color=colour,
            marker=marker,
            markersize=7,
            linewidth=2,
            label=name,
        )
    axis.set_xticks(range(len(places)), [str(at) for at in places])
    axis.set_yscale("log")
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_xlabel("requests in the batch")
    axis.set_ylabel("time of one propose step, us")
    axis.set_title("Drafting, rows of about 4000 tokens, k=16", loc="left")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def _replay(records: dict[str, Any]) -> Figure | None:
    """Tokens a step of each drafter at k=16, without an engine."""
    results = [
        r
        for r in records.get("replay", {}).get("results", [])
        if r["category"] == "ALL" and r["loops"] and r["k"] == 16
    ]
    if not results:
        return None
    files = list(dict.fromkeys(r["file"] for r in results))
    drafters = list(dict.fromkeys(r["drafter"] for r in results))
    figure, axes = plt.subplots(
        1, len(files), figsize=(3.4 * len(files), 4.6), layout="constrained"
    )
    colours = matplotlib.color_sequences["tab10"]
    for axis, file in zip(list(axes) if len(files) > 1 else [axes], files, strict=True):
        for at, drafter in enumerate(drafters):
            found = [
                r["tokens_per_step"]
                for r in results
                if (r["file"], r["drafter"]) == (file, drafter)
            ]
            if found:
                axis.bar(at, found[0], color=colours[at % 10], label=drafter)
                axis.annotate(
                    f"{found[0]:.2f}",
                    (at, found[0]),
                    ha="center",
                    va="bottom",
                    fontsize=10,
                )
        axis.set_title(file, fontsize=12)
        axis.set_xticks([])
        # One token a step is what no drafts give.
        top = max(bar.get_height() for bar in axis.patches)
        axis.set_ylim(1, 1 + 1.12 * (top - 1))
        axis.grid(axis="x", visible=False)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("tokens a step on recorded texts, k=16", fontsize=14)
    return figure
