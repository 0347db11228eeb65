"""Turn the recorded results into docs/benchmarks.md and its plots.

    python bench/report.py [--results DIR] [--docs DIR] [--check]

Reads bench/results/*.json and engine_grid.jsonl. A truncated or impossible result is
refused with the file and line, and nothing is written. Hand-written text comes from
bench/reporting/benchmarks.md (everything outside ``{{name}}``) and notes.toml. With
``--check`` nothing is written; the exit code is 1 if the page differs.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reporting import (
    costs,
    drafting,
    engines,
    goals,
    grid_sections,
    paper,
    plots,
    runners,
)
from reporting.compare import Grid
from reporting.load import (
    COSTS,
    GRID,
    Costs,
    ResultError,
    making,
    read_costs,
    read_grid,
    read_json,
)

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "bench" / "reporting" / "benchmarks.md"
PLACE = re.compile(r"\{\{([\w.-]+)\}\}")
IMAGES = "img"


def read(results: Path) -> tuple[Grid, list[Costs], dict[str, dict[str, Any]]]:
    """Read everything, so that nothing is written if anything is wrong."""
    records = {path.stem: read_json(path) for path in sorted(results.glob("*.json"))}
    return Grid(read_grid(results / GRID)), read_costs(results / COSTS), records


def page(
    template: str,
    grid: Grid,
    measured: list[Costs],
    records: dict[str, dict[str, Any]],
    images: list[str],
) -> tuple[str, list[str]]:
    """Return the page, and the places whose hand-written sentence is missing."""
    note = runners.Notes(runners.notes())
    sections: dict[str, Callable[[], str]] = {
        "arms": lambda: grid_sections.names(grid),
        "goals": lambda: goals.goals(grid),
        "promises": lambda: goals.promises(grid),
        "ratios": lambda: grid_sections.ratios(grid),
        "shares": lambda: grid_sections.shares(grid),
        "losses": lambda: grid_sections.losses(grid),
        "loops": lambda: grid_sections.loops(grid),
        "shift": lambda: goals.shift(grid),
        "spreads": lambda: grid_sections.spreads(grid),
        "missing": lambda: grid_sections.missing(grid),
        "runs": lambda: grid_sections.runs(grid),
        "v2-against-v1": lambda: runners.v2_against_v1(grid, note),
        "v1-arms": lambda: runners.v1_arms(grid, note),
        "v1-suffix-against-v2": lambda: runners.v1_suffix_against_v2(grid),
        "replay": lambda: drafting.replay(records),
        "replay-loops": lambda: drafting.replay_loops(records),
        "paper": lambda: paper.paper(grid, records.get("simulate_policy")),
        "engine-costs": lambda: costs.engine_costs(measured),
        "reckoned": lambda: costs.reckoned(grid),
        "step-cost": lambda: paper.step_cost(records.get("step_cost")),
        "real-model": lambda: engines.real_model(records),
        "profile": lambda: engines.profile(records),
        "ranks": lambda: engines.ranks(records),
        "slowest": lambda: grid_sections.slowest(grid),
        "asleep": lambda: grid_sections.asleep(grid),
        "graph-memory": lambda: grid_sections.graph_memory(grid),
        "rivals-time": lambda: drafting.rivals_time(records),
        "trim-time": lambda: drafting.trim_time(records),
        "propose-time": lambda: drafting.propose_time(records),
    }

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name.endswith(".png"):
            text = name.removesuffix(".png").replace("_", " ")
            return f"![{text}]({IMAGES}/{name})" if name in images else ""
        section = sections[name]
        with making(f"section {name}"):
            return section()

    text = PLACE.sub(fill, template)
    return re.sub(r"\n{3,}", "\n\n", text), note.unwritten


def main() -> None:
    """Write the page and its plots, or check the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    try:
        grid, measured, records = read(args.results)
        with making("plot"):
            drawn = plots.figures(grid, records)
        text, unwritten = page(
            TEMPLATE.read_text(), grid, measured, records, list(drawn)
        )
    except ResultError as error:
        raise SystemExit(f"refused: {error}") from None
    path = args.docs / "benchmarks.md"
    if args.check:
        if not path.is_file() or path.read_text() != text:
            raise SystemExit(f"{path.name} is stale: run bench/report.py")
        return
    plots.save(drawn, args.docs / IMAGES)
    path.write_text(text)
    print(f"{len(grid.points)} grid points, {len(records)} other results: {path}")
    for name in drawn:
        print(f"  {args.docs / IMAGES / name}")
    if unwritten:
        print(f"{len(unwritten)} rows have no sentence in bench/reporting/notes.toml:")
    for row in unwritten:
        print(f"  {row}")


if __name__ == "__main__":
    main()
