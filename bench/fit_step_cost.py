"""Fit what a step costs to recorded points of the engine grid.

    python bench/fit_step_cost.py --run RUN [RUN ...] [--out DIR] [--commit C]

The simulator charges these costs (`simulate_policy.py`). Runs are named by their id in
``engine_grid.jsonl``; each must have points without speculation.
"""

import argparse
from itertools import pairwise
from pathlib import Path

from grid.record import NAME as GRID
from grid.record import read
from harness import RESULTS, machine, save
from policies.fitted import fit

NAME = "step_cost"
MODEL = "llama-8b"


def main() -> None:
    """Fit, print and write ``step_cost.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", nargs="+", required=True)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    args = parser.parse_args()
    lines = [line for line in read(args.results / GRID) if line["model"] == MODEL]
    lines = [line for line in lines if line["run_id"] in args.run]
    absent = set(args.run) - {line["run_id"] for line in lines}
    if absent:
        parser.error(f"no points of {', '.join(sorted(absent))}")
    try:
        found = fit(lines)
    except ValueError as error:
        parser.error(str(error))
    for (least, less), (most, more) in pairwise(found.rows_ms):
        print(
            f"rows {least:5}.. {most:5}: {(more - less) / (most - least):.4f} ms each"
        )
    print(f"a step with drafts: {found.wide_ms:.3f} ms more; {found.points} points")
    for arm, errors in found.errors.items():
        print(f"{arm:20}" + "  ".join(f"c={c} {e:+.1%}" for c, e in errors.items()))
    record = {**machine(args.commit), "runs": args.run, "model": MODEL}
    print("saved", save(NAME, {**record, **found.to_json()}, args.out))


if __name__ == "__main__":
    main()
