"""One arm's engine in this process, looked at step by step: ``-m grid.profiled FD``.

Reads and answers JSON lines as ``serve`` does. A point is run several times: without
prefix caches, then timed as it is, then with watches on the host, then with the GPU's
kernels recorded, and last, where asked for, under cProfile.
"""

import cProfile
import pstats
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from grid.arms import Arm
from grid.engine import GridEngine, Mismatch
from grid.kernels import KernelWindow
from grid.measure import round_figures
from grid.serving import first_line, serve_points, warm_up_tokens
from grid.shapes import SHAPES, Shape
from grid.watches import OURS, ROWS, TOP, Watches
from grid.workloads import Plan, make_plan

# A step counts if so many of the requests decode in it, and none of them prefills.
FULL = 0.75
# Steps of a round that pass before its kernels are recorded.
_STEPS_BEFORE = 2
_FUNCTIONS_SHOWN = 40


@dataclass(slots=True)
class StepRecord:
    """One turn of the engine's loop.

    Attributes:
        begin_ns: when it began.
        requests: requests that it brought tokens to.
        decoding: whether all of those had tokens before.
        spent: nanoseconds by name.
        facts: of the step that was prepared in it.
    """

    begin_ns: int
    requests: int
    decoding: bool
    spent: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def full_steps(
    records: Sequence[StepRecord], concurrency: int
) -> Iterator[tuple[StepRecord, float]]:
    """Yield the steps that count, each with its wall time in ms."""
    for one, following in pairwise(records):
        if one.decoding and one.requests >= FULL * concurrency:
            yield one, (following.begin_ns - one.begin_ns) / 1e6


class ProfiledEngine(GridEngine):
    """An engine whose every step is seen."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.records: list[StepRecord] = []
        self.watches: Watches | None = None
        # Called before and after each step.
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[StepRecord], None] = lambda one: None
        self.after_round: Callable[[], None] = lambda: None
        self._seen: set[int] = set()

    def step(self) -> list[Any]:
        """Let the engine go on, and note the step."""
        steps = self._round.steps
        if not steps:
            self._seen.clear()
        before = len(steps)
        self.before()
        begin = time.perf_counter_ns()
        finished = super().step()
        new = steps[-1][1] if len(steps) > before else {}
        one = StepRecord(begin, len(new), bool(new) and self._seen.issuperset(new))
        self._seen.update(new)
        if self.watches is not None:
            one.spent, one.facts = self.watches.take()
        self.records.append(one)
        self.after(one)
        return finished

    def drain(self) -> None:
        """Take in the steps that were on their way when the last request ended."""
        core = self.engine.engine_core.engine_core
        while core.batch_queue or core.scheduler.has_requests():
            self.engine.step()


def run_plan(engine: ProfiledEngine, plan: Plan) -> list[Any]:
    """Run a plan's rounds; return each one's figures."""
    for lesson in plan.warm:
        for at in range(0, len(lesson), engine.max_num_seqs):
            engine.round(lesson[at : at + engine.max_num_seqs])
            engine.drain()
    engine.records.clear()
    figures = []
    for items in plan.rounds:
        figures.append(round_figures(engine.round(items)))
        engine.after_round()
        engine.drain()
    return figures


def profile(
    engine: ProfiledEngine, plan: Plan, concurrency: int, order: dict[str, Any]
) -> dict[str, Any]:
    """Look at a point in several runs."""
    engine.forget()
    run_plan(engine, plan)
    engine.forget_replies()
    rounds = run_plan(engine, plan)
    tokens = sum(one.decode_tokens for one in rounds)
    found = {
        "tpot_ms": fmean(v for one in rounds for v in one.tpot_ms),
        "tokens_per_step": tokens / sum(one.decode_rounds for one in rounds),
        "wall": _wall(engine.records, concurrency),
        "host": _host(engine, plan, concurrency),
        "kernels": _kernels_or_why_not(
            engine, plan, concurrency, order["kernel_steps"]
        ),
    }
    if order.get("cprofile"):
        place = Path(order["cprofile"]) / f"{order['name']}.txt"
        found["cprofile"] = _functions(engine, plan, place)
    return found


def _wall(records: Sequence[StepRecord], concurrency: int) -> dict[str, Any]:
    walls = [wall for _, wall in full_steps(records, concurrency)]
    if not walls:
        return {"steps": 0, "mean_ms": None, "median_ms": None}
    return {"steps": len(walls), "mean_ms": fmean(walls), "median_ms": median(walls)}


def _host(engine: ProfiledEngine, plan: Plan, concurrency: int) -> dict[str, Any]:
    engine.forget_replies()
    engine.watches = Watches(engine.engine)
    try:
        run_plan(engine, plan)
    finally:
        engine.watches.close()
        engine.watches = None
    return host_figures(engine.records, concurrency)


def host_figures(records: Sequence[StepRecord], concurrency: int) -> dict[str, Any]:
    """Return what the host does in a step, in ms, and what steps there were."""
    full = list(full_steps(records, concurrency))
    spent: dict[str, float] = defaultdict(float)
    for one, wall in full:
        spent["wall"] += wall
        for name, ns in one.spent.items():
            spent[name] += ns / 1e6
    steps = max(len(full), 1)
    mean = {name: total / steps for name, total in spent.items()}
    hooks = {n.removeprefix("hook "): ms for n, ms in mean.items() if n[:5] == "hook "}
    facts = [one.facts for one, _ in full if one.facts]
    return {
        "steps": len(full),
        "wall_ms": mean.get("wall"),
        "ms": {name: mean[name] for name, _ in ROWS if name in mean},
        "rest_ms": mean.get("wall", 0.0) - sum(mean.get(name, 0.0) for name in TOP),
        "hooks_ms": hooks,
        "ours_ms": sum(hooks.values()) + sum(mean.get(name, 0.0) for name in OURS),
        **_step_kinds(facts),
    }


def _step_kinds(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    number = max(len(facts), 1)
    budgets = [one["budget"] for one in facts if one.get("budget")]
    graphs = Counter(tuple(one["graph"]) for one in facts if "graph" in one)
    trimmed = any("budget" in one for one in facts)
    asleep = sum(not one.get("drafting") for one in facts)
    return {
        "asleep": asleep / number,
        "awake_without": (number - asleep - len(budgets)) / number if trimmed else None,
        "awake_with": len(budgets) / number if trimmed else None,
        "mean_budget": fmean(budgets) if budgets else None,
        "graphs": [
            {"mode": mode, "tokens": tokens, "max_query_len": width, "steps": n}
            for (mode, tokens, width), n in graphs.most_common()
        ],
    }


def _kernels_or_why_not(engine: ProfiledEngine, *args: Any) -> dict[str, Any]:
    """Return the kernels, or why there are none: the rest stands without them."""
    try:
        return _kernels(engine, *args)
    except Mismatch:
        raise
    except Exception as error:
        traceback.print_exc()
        while engine.engine.has_unfinished_requests():
            engine.engine.step()
        engine.drain()
        why_not = first_line(error)
        return {"error": why_not, "busy_ms": None, "groups_ms": {}, "kernels": []}


def _kernels(
    engine: ProfiledEngine, plan: Plan, concurrency: int, wanted: int
) -> dict[str, Any]:
    import torch

    engine.forget_replies()
    window = KernelWindow(torch.cuda.is_available())
    waited = inside = 0

    def close() -> None:
        nonlocal waited, inside
        if window.is_open:
            window.close(max(inside, 1))
        waited = inside = 0

    def after(one: StepRecord) -> None:
        nonlocal waited, inside
        full = one.decoding and one.requests >= FULL * concurrency
        if window.is_open:
            inside += 1
            if not full or window.steps + inside >= wanted:
                close()
        elif full and window.steps < wanted:
            waited += 1
            if waited > _STEPS_BEFORE:
                window.open()

    engine.after, engine.after_round = after, close
    try:
        run_plan(engine, plan)
    finally:
        close()
        engine.after, engine.after_round = lambda one: None, lambda: None
    return window.figures()


def _functions(engine: ProfiledEngine, plan: Plan, place: Path) -> str:
    """Write the dearest functions of the engine's loop; return the file's name."""
    engine.forget_replies()
    profiler = cProfile.Profile()

    def before() -> None:
        # Decode steps alone.
        if engine.records and engine.records[-1].decoding:
            profiler.enable()

    engine.before, engine.after = before, lambda one: profiler.disable()
    try:
        run_plan(engine, plan)
    finally:
        profiler.disable()
        engine.before, engine.after = lambda: None, lambda one: None
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("w") as out:
        turns = sum(one.decoding for one in engine.records)
        print(f"{turns} turns of the engine's loop", file=out)
        stats = pstats.Stats(profiler, stream=out)
        stats.sort_stats("tottime").print_stats(_FUNCTIONS_SHOWN)
        stats.sort_stats("cumulative").print_stats(2 * _FUNCTIONS_SHOWN)
    return place.name


def _start(arm: Arm, shape: Shape, order: dict[str, Any]) -> ProfiledEngine:
    return ProfiledEngine(arm, shape, Path(order["model"]), order["kv_gib"])


def _warm_up(engine: ProfiledEngine, shape: Shape, concurrency: int) -> None:
    plan = make_plan("mid", concurrency, shape.vocab_size, warm_up_tokens())
    run_plan(engine, plan)


def _answer(
    engine: ProfiledEngine, order: dict[str, Any], point: dict[str, Any]
) -> Any:
    name, concurrency = point["workload"], point["c"]
    vocab_size = SHAPES[order["shape"]].vocab_size
    label = engine.arm.label.replace(":", "-k")
    told = {**order, "name": f"{label}-{name}-c{concurrency}"}
    plan = make_plan(name, concurrency, vocab_size, point["length"])
    return profile(engine, plan, concurrency, told)


def main() -> None:
    """Serve points until standard input ends."""
    serve_points(_start, _answer, _warm_up)


if __name__ == "__main__":
    main()
