"""One arm's steps under forced budgets: ``python -m grid.step_times FD``.

Reads and answers JSON lines as ``serve`` does.
"""

from pathlib import Path
from typing import Any

from grid.arms import Arm
from grid.engine import GridEngine
from grid.serving import serve_points, short_round
from grid.shapes import SHAPES, Shape
from grid.workloads import make_plan


def measure(
    engine: GridEngine, order: dict[str, Any], point: dict[str, Any]
) -> dict[str, Any]:
    """Run requests under budgets that come round; keep steps of all requests."""
    vocab_size = SHAPES[order["shape"]].vocab_size
    c = point["c"]
    plan = make_plan(point["workload"], c, vocab_size, point["length"])
    items = plan.rounds[0]
    engine.forget()
    # Fills the prefix cache: after it all requests decode together.
    engine.round(items)
    budgets = [
        0,
        *(rows - c for rows in order["rows"] if c < rows <= c * (1 + engine.arm.k)),
    ]
    engine.engine.collective_rpc("grid_force_budgets", args=(budgets, order["block"]))
    engine.round(items)
    steps = engine.engine.collective_rpc("grid_free_budgets")[0]
    return {"steps": [one for one in steps if one["requests"] == c]}


def _start(arm: Arm, shape: Shape, order: dict[str, Any]) -> GridEngine:
    engine = GridEngine(arm, shape, Path(order["model"]), order["kv_gib"])
    engine.measure_costs()
    return engine


def main() -> None:
    """Serve points until standard input ends."""
    serve_points(_start, measure, short_round)


if __name__ == "__main__":
    main()
