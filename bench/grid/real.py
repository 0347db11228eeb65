"""One arm with a real model that says what it likes: ``python -m grid.real FD``.

Reads and answers JSON lines as ``serve`` does; an answer also has the tokens.
"""

from pathlib import Path
from typing import Any

from grid.arms import Arm
from grid.engine import GridEngine
from grid.measure import Run, encode_run, round_figures
from grid.serve import count_since
from grid.serving import serve_points, warm_up_tokens
from grid.shapes import Shape
from grid.workloads import Item, num_rounds, real_rounds

_RUNS = 3


def measure(engine: GridEngine, rounds: list[list[Item]]) -> dict[str, Any]:
    """Run the rounds three times: the first time without prefix caches."""
    engine.forget()
    runs, said = [], []
    for number in range(_RUNS):
        engine.forget_replies()
        before = engine.counters()
        done = []
        tokens: list[list[int]] = []
        for items in rounds:
            done.append(engine.round(items))
            tokens += [engine.said[i] for i in range(len(items))]
        counters = count_since(engine, done, before)
        figures = [round_figures(one) for one in done]
        runs.append(Run(number == 0, figures, counters))
        said.append(tokens)
    return {"runs": [encode_run(run) for run in runs], "said": said}


def _start(arm: Arm, shape: Shape, order: dict[str, Any]) -> GridEngine:
    return GridEngine(arm, shape, Path(order["model"]), order["kv_gib"], forced=False)


def _warm_up(engine: GridEngine, _: Shape, concurrency: int) -> None:
    engine.round(real_rounds(concurrency, 1, warm_up_tokens())[0])


def _answer(engine: GridEngine, _: dict[str, Any], point: dict[str, Any]) -> Any:
    c = point["c"]
    return measure(engine, real_rounds(c, num_rounds(c), point["length"]))


def main() -> None:
    """Serve points until standard input ends."""
    serve_points(_start, _answer, _warm_up)


if __name__ == "__main__":
    main()
