"""One arm with its drafts counted, and not: ``python -m grid.counting FD``.

Reads and answers JSON lines as ``serve`` does.
"""

import time
from pathlib import Path
from typing import Any

from grid.arms import Arm
from grid.engine import GridEngine
from grid.measure import round_figures
from grid.serving import serve_points, short_round
from grid.shapes import SHAPES, Shape
from grid.workloads import make_plan


def measure(
    engine: GridEngine, order: dict[str, Any], point: dict[str, Any]
) -> dict[str, Any]:
    """Run the same requests with and without counting, in turn."""
    vocab_size = SHAPES[order["shape"]].vocab_size
    plan = make_plan(point["workload"], point["c"], vocab_size, point["length"])
    items = plan.rounds[0]
    began = time.monotonic()
    engine.forget()
    # Fills the prefix cache: after it all requests decode together.
    engine.round(items)
    tpot_ms: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(order["pairs"]):
        # The second of a pair is not always the same one: drifts cancel out.
        for counted in (True, False) if pair % 2 == 0 else (False, True):
            engine.engine.collective_rpc("grid_count", args=(counted,))
            engine.forget_replies()
            before = engine.counters()["rounds"]
            figures = round_figures(engine.round(items))
            booked = engine.counters()["rounds"] - before
            if (booked > 0) != counted:
                raise RuntimeError(f"counted: {counted}, yet {booked} rounds booked")
            if not figures.together:
                raise RuntimeError("prompts do not fit the prefix cache")
            tpot_ms[counted].append(sum(figures.tpot_ms) / len(figures.tpot_ms))
    return {
        "counted_ms": tpot_ms[True],
        "uncounted_ms": tpot_ms[False],
        "seconds": time.monotonic() - began,
    }


def _start(arm: Arm, shape: Shape, order: dict[str, Any]) -> GridEngine:
    return GridEngine(arm, shape, Path(order["model"]), order["kv_gib"])


def main() -> None:
    """Serve points until standard input ends."""
    serve_points(_start, measure, short_round)


if __name__ == "__main__":
    main()
