"""What steps take by their requests and rows, in a running engine.

    python bench/step_times.py --arms ngram:16 --c 16,64,128,256

Requests forced to recorded texts decode while the trimmer is made to verify one number
of places after the other, a block of steps each. Beside what steps took stands what the
costs measured at start say. With ``--tiny`` a small model runs on the CPU.
"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from grid.plan import Point
from grid.waves import of_one_workload
from grid.workloads import SEED
from harness import RESULTS, machine, save

NAME = "step_times"
ROWS = (
    "32,64,96,128,160,192,224,256,288,320,352,384,416,448,480,512,576,640,768,896,1024"
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def numbers(text: str) -> list[int]:
    """Return numbers that commas part.

    Raises:
        ValueError: one is no whole number from 1.
    """
    found = [int(one) for one in text.split(",")]
    if min(found) < 1:
        raise ValueError(f"{min(found)} is no number from 1")
    return found


@app.command()
def main(
    arms: Annotated[str, typer.Option(help="trimmed ones")] = "ngram:16",
    workload: Annotated[str, typer.Option()] = "low",
    c: Annotated[str, typer.Option(help="requests at a time")] = "16,64,128,256",
    rows: Annotated[str, typer.Option(help="of a step, drafts included")] = ROWS,
    block: Annotated[int, typer.Option(min=6, help="steps in a row")] = 10,
    length: Annotated[int, typer.Option(help="output tokens; 0: each own")] = 0,
    time_limit: Annotated[float, typer.Option(help="seconds for all of it")] = 560.0,
    kv_gib: Annotated[float, typer.Option()] = 20.6,
    out: Annotated[Path, typer.Option(help="folder of the record")] = RESULTS,
    work: Annotated[Path | None, typer.Option(help="folder of vLLM's caches")] = None,
    commit: Annotated[str | None, typer.Option()] = None,
    tiny: Annotated[bool, typer.Option(help="on the CPU")] = False,
) -> None:
    """Time the steps of each arm."""
    try:
        points = [Point(workload, one) for one in numbers(c)]
        more = {"rows": numbers(rows), "block": block}
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    chosen, waves = of_one_workload(
        time_limit,
        arms=arms,
        fits=lambda arm: arm.kind.trimmed,
        lacking="nothing is trimmed there",
        workload=workload,
        tiny=tiny,
        length=length,
        work=work,
        module="grid.step_times",
        kv_gib=kv_gib,
        more=more,
    )
    most = waves.shape.engine["max_num_seqs"]
    if max(point.c for point in points) > most:
        raise typer.BadParameter(f"--c {c}: at most {most}")
    found: list[dict[str, Any]] = []
    for arm, _, answer in waves.run(chosen, points, 1):
        for step in answer["steps"]:
            found.append({"arm": arm.name, "k": arm.k, **step})
            print(line(found[-1]), flush=True)
    record = {**machine(commit), "seed": SEED, "workload": workload, "points": found}
    print("saved", save(NAME, {**record, "failures": waves.failures}, out))
    if waves.failures or not found:
        raise typer.Exit(1)


def line(step: dict[str, Any]) -> str:
    """Return a kind of step's line."""
    return (
        f"{step['arm']}:{step['k']} {step['requests']:4} requests, "
        f"{step['requests'] + step['places']:5} rows: {step['ms']:7.2f} ms, reckoned "
        f"{step['reckoned_ms']:7.2f}, {step['steps']} steps, device waited in "
        f"{step['waited']:.0%}"
    )


if __name__ == "__main__":
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    app()
