"""One arm in a process of its own: ``python -m grid.serve FD``.

Reads JSON lines from standard input, the first one says what to start (``arm``, ``k``,
``shape``, ``model``, ``kv_gib``, ``trim_explain``), each further one is a point to
measure (``workload``, ``c``, ``length``), or a ``turn`` of one. Answers each with one
JSON line on the file descriptor FD. What vLLM logs goes to standard output and error.
"""

import time
from pathlib import Path
from typing import Any

from grid.arms import Arm
from grid.engine import GridEngine
from grid.measure import Round, Run, encode_run, round_figures, stage_tpot_ms
from grid.serving import serve_points, short_round
from grid.shapes import SHAPES, Shape
from grid.workloads import SHIFT, Plan, make_plan

# A run of a point that is shorter is repeated once more.
SHORT_SECONDS = 3.0


def measure(
    engine: GridEngine,
    plan: Plan,
    concurrency: int,
    shift: bool,
    turn: int | None = None,
) -> dict[str, Any]:
    """Measure a point: the first run without prefix caches, then with them.

    Args:
        engine: whose point it is.
        plan: what the point's runs do.
        concurrency: requests at a time.
        shift: whether stages are timed.
        turn: which one, where engines take turns at a point, from 0; None: all runs in
            a row. The first has the cold run, later ones go on with what that cached.
    """
    runs: list[Run] = []
    stages: list[float | None] | None = None
    started = time.monotonic()
    # All of `shift`: it is long, and about what happens within one run.
    repeats = 1
    while len(runs) < repeats:
        cold = not runs and not turn
        if cold:
            engine.forget()
        else:
            engine.forget_replies()
        for lesson in plan.warm:
            for at in range(0, len(lesson), engine.max_num_seqs):
                engine.round(lesson[at : at + engine.max_num_seqs])
        before = engine.counters()
        begun = time.monotonic()
        stage_rounds = [
            [engine.round(items) for items in stage] for stage in plan.stages
        ]
        seconds = time.monotonic() - begun
        rounds = [one for stage in stage_rounds for one in stage]
        counters = count_since(engine, rounds, before)
        figures = [round_figures(one) for one in rounds]
        runs.append(Run(cold, figures, counters))
        if shift:
            stages = [stage_tpot_ms(stage, concurrency) for stage in stage_rounds]
        elif len(runs) == 1:
            repeats = num_runs(runs[0], seconds, turn)
    return {
        "runs": [encode_run(run) for run in runs],
        "stage_tpot_ms": stages,
        "seconds": time.monotonic() - started,
    }


def num_runs(first: Run, seconds: float, turn: int | None) -> int:
    """Return how many runs are taken in a row.

    Args:
        first: the first of them.
        seconds: what that took.
        turn: see ``measure``.
    """
    can_be_timed = first.together
    if turn is not None:
        return 2 if first.cold and not can_be_timed else 1
    # At least two runs that can be timed, three where they are short.
    short = seconds < SHORT_SECONDS
    return min(3, (2 if can_be_timed else 3) + (1 if short else 0))


def count_since(
    engine: GridEngine, rounds: list[Round], before: dict[str, int]
) -> dict[str, int]:
    """Return the counters of some rounds: ours less ``before``, or else vLLM's."""
    after = engine.counters()
    grown = {name: after[name] - before[name] for name in after}
    if "accepted" in grown or not engine.arm.k:
        return grown
    accepted = sum(one.accepted_tokens for one in rounds)
    if grown:
        # Of V1 what it verified is counted here, what was accepted of it by vLLM.
        return {**grown, "accepted": accepted}
    # V2 has places for k drafts of each request, fills those that its own drafter left
    # empty, and verifies and counts them all.
    drafts = sum(one.draft_tokens for one in rounds)
    return {"draft_tokens": drafts, "accepted_tokens": accepted}


def _start(arm: Arm, shape: Shape, order: dict[str, Any]) -> GridEngine:
    explain = order.get("trim_explain", False)
    return GridEngine(arm, shape, Path(order["model"]), order["kv_gib"], explain)


def _answer(
    engine: GridEngine, order: dict[str, Any], point: dict[str, Any]
) -> dict[str, Any]:
    if point.get("measure_costs"):
        return {"costs": engine.measure_costs()}
    name, concurrency = point["workload"], point["c"]
    vocab_size = SHAPES[order["shape"]].vocab_size
    plan = make_plan(name, concurrency, vocab_size, point["length"])
    answer = measure(engine, plan, concurrency, name == SHIFT, point["turn"])
    return {**answer, "in_force": engine.in_force}


def main() -> None:
    """Serve points until standard input ends."""
    serve_points(_start, _answer, short_round)


if __name__ == "__main__":
    main()
