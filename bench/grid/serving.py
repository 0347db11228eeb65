"""The loop of a process that starts one engine and answers points about it.

Orders come on standard input, a line of JSON each: the engine's, then the points'.
Answers go, a line each, to the file descriptor that the command line names.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from grid.arms import Arm
from grid.engine import GridEngine, Mismatch
from grid.shapes import SHAPES, Shape
from grid.workloads import make_plan

# Output tokens of the rounds that compile what is compiled on first use. On a CPU, in
# Triton's interpreter, nothing is.
_WARM_UP_TOKENS, _WARM_UP_TOKENS_ON_CPU = 24, 2

Engine = TypeVar("Engine", bound=GridEngine)
Json = dict[str, Any]


def warm_up_tokens() -> int:
    """Return the output tokens of a round that warms an engine up."""
    import torch

    return _WARM_UP_TOKENS if torch.cuda.is_available() else _WARM_UP_TOKENS_ON_CPU


def short_round(engine: GridEngine, shape: Shape, concurrency: int) -> None:
    """Run one round of so many requests that compiles what is compiled on first use."""
    plan = make_plan("mid", concurrency, shape.vocab_size, warm_up_tokens())
    engine.round(plan.rounds[0])


def serve_points(
    start: Callable[[Arm, Shape, Json], Engine],
    answer_point: Callable[[Engine, Json, Json], Any],
    warm_up: Callable[[Engine, Shape, int], object] | None = None,
) -> None:
    """Serve points until standard input ends.

    Args:
        start: makes the engine of an order.
        answer_point: returns the answer to a point, given the engine, its order and
            the point.
        warm_up: runs a round of so many requests, before anything is timed.
    """
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as answers:

        def answer(content: Any) -> None:
            answers.write(json.dumps(content) + "\n")

        order = json.loads(sys.stdin.readline())
        shape, arm = SHAPES[order["shape"]], Arm(order["arm"], order["k"])
        started = time.monotonic()
        try:
            engine = start(arm, shape, order)
            ready = {"ready": time.monotonic() - started, **engine.describe()}
            if warm_up is not None:
                for concurrency in (1, engine.max_num_seqs):
                    warm_up(engine, shape, concurrency)
        except Exception as error:
            traceback.print_exc()
            answer({"error": first_line(error)})
            return
        answer(ready)
        for line in sys.stdin:
            try:
                answer(answer_point(engine, order, json.loads(line)))
            except Mismatch as error:
                answer({"mismatch": str(error)})
                break
            except Exception as error:
                traceback.print_exc()
                answer({"error": first_line(error)})
                break
        engine.stop()


def first_line(error: BaseException) -> str:
    """Return what went wrong at first, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
