"""One arm on several ranks, each late in its own way: ``python -m grid.ranks FD``.

Reads and answers JSON lines as ``serve`` does.
"""

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from grid.arms import Arm
from grid.engine import GridEngine
from grid.ranks_worker import ON_DEVICE, ON_HOST
from grid.serving import serve_points
from grid.shapes import SHAPES, Shape
from grid.workloads import mixed_rounds

# Rounds of requests that are made; more steps say them again, which fills the memory.
_ROUNDS = 4
COLUMNS = (*ON_DEVICE, *ON_HOST)


def first_difference(ranks: Sequence[Sequence[Sequence[int]]]) -> str | None:
    """Return where ranks decided differently first, or None if nowhere.

    Args:
        ranks: each rank's steps, each step's numbers as ``COLUMNS`` names them.
    """
    for step, rows in enumerate(zip(*ranks, strict=False)):
        for place, values in enumerate(zip(*rows, strict=True)):
            if len(set(values)) > 1:
                return f"step {step}, {COLUMNS[place]}: {', '.join(map(str, values))}"
    lengths = [len(steps) for steps in ranks]
    if len(set(lengths)) > 1:
        return f"numbers of steps: {', '.join(map(str, lengths))}"
    return None


def figures(found: Sequence[dict[str, Any]], plain_steps: int) -> dict[str, Any]:
    """Return what the ranks' notes amount to.

    Args:
        found: each rank's notes.
        plain_steps: the steps before the restless ones.
    """
    steps = found[0]["steps"]
    budget, scheduled, asleep = (
        COLUMNS.index(name) for name in ("budget", "scheduled", "asleep")
    )
    return {
        "ranks": len(found),
        "steps": len(steps),
        "plain_steps": plain_steps,
        "difference": first_difference([one["steps"] for one in found]),
        "budgets": len({step[budget] for step in steps}),
        "draft_shapes": len({step[0] for step in steps}),
        "steps_with_budget": sum(step[budget] > 0 for step in steps),
        "steps_scheduled": sum(step[scheduled] > 0 for step in steps),
        "steps_asleep": sum(step[asleep] for step in steps),
        "naps": sum(a[asleep] < b[asleep] for a, b in pairwise(steps)),
        "host_delay_ms": [one["host_delay_ms"] for one in found],
        "device_delay_ms": [one["device_delay_ms"] for one in found],
    }


def measure(engine: GridEngine, order: dict[str, Any]) -> dict[str, Any]:
    """Run steps as they come, then restless ones, and compare the ranks."""
    vocab_size = SHAPES[order["shape"]].vocab_size
    rounds = mixed_rounds(_ROUNDS, order["requests"], vocab_size, order["length"])
    rpc = engine.engine.collective_rpc
    rpc("ranks_watch", args=(order["seed"], order["delay_ms"]))
    begun, number = time.monotonic(), 0

    def run_until(steps: int) -> int:
        nonlocal number
        while (done := rpc("ranks_num_steps")[0]) < steps:
            engine.round(rounds[number % len(rounds)])
            number += 1
            print(f"round {number}, {done} steps before it", flush=True)
        return int(done)

    plain = run_until(order["steps"])
    rpc("ranks_restless")
    run_until(plain + order["steps"] // 2)
    found = rpc("ranks_collect")
    return {**figures(found, plain), "seconds": time.monotonic() - begun}


def _start(arm: Arm, shape: Shape, order: dict[str, Any]) -> GridEngine:
    return GridEngine(arm, shape, Path(order["model"]), order["kv_gib"], True)


def _answer(engine: GridEngine, order: dict[str, Any], point: dict[str, Any]) -> Any:
    return measure(engine, {**order, **point})


def main() -> None:
    """Serve points until standard input ends."""
    serve_points(_start, _answer)


if __name__ == "__main__":
    main()
