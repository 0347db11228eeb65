"""One arm with a real model that says what it likes: ``python -m grid.real FD``.

Reads and answers JSON lines as ``serve`` does; an answer also has the tokens.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from grid.arms import Arm
from grid.engine import GridEngine
from grid.measure import Run, encode_run, round_figures
from grid.serve import WARM_UP_TOKENS, count_since, first_line
from grid.shapes import SHAPES
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


def main() -> None:
    """Serve points until standard input ends."""
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as answers:

        def answer(content: dict[str, Any]) -> None:
            answers.write(json.dumps(content) + "\n")

        order = json.loads(sys.stdin.readline())
        shape, arm = SHAPES[order["shape"]], Arm(order["arm"], order["k"])
        started = time.monotonic()
        try:
            engine = GridEngine(
                arm, shape, Path(order["model"]), order["kv_gib"], forced=False
            )
            ready = {"ready": time.monotonic() - started, **engine.describe()}
            for concurrency in (1, engine.max_num_seqs):
                engine.round(real_rounds(concurrency, 1, WARM_UP_TOKENS)[0])
        except Exception as error:
            traceback.print_exc()
            answer({"error": first_line(error)})
            return
        answer(ready)
        for line in sys.stdin:
            point = json.loads(line)
            c = point["c"]
            try:
                rounds = real_rounds(c, num_rounds(c), point["length"])
                answer(measure(engine, rounds))
            except Exception as error:
                traceback.print_exc()
                answer({"error": first_line(error)})
                break
        engine.stop()


if __name__ == "__main__":
    main()
