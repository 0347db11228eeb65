"""Every drafter on both runners, in a real engine, on recorded texts.

    python bench/engine_grid.py run --arms ngram:16,suffix:16,v2-none [options]
    python bench/engine_grid.py points --arms ngram:16,v2-none [options]

An 8B-shaped model with dummy weights is made to say recorded texts, so that its compute
is real and acceptance is that of the text; every output is compared with its text.
An arm may be limited to small points (``v2-intree-ngram:16@64``, ``v2-none@64``); its
KV cache is made for these.
Engines of a wave (``--at-once``) start side by side and are measured one at a time.
With ``--turns`` those of a wave take turns at each point, run by run, so that a host
whose speed changes is fast and slow for all of them.
Each point is one line of ``engine_grid.jsonl``; a point that is there with the same
``--run-id`` and commit is not measured again. With ``--tiny`` a small model runs on the
CPU.
"""

import os
import secrets
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from grid import record
from grid.arms import Arm, parse_arms
from grid.orchestrate import Orchestrator, Outcome, Settings
from grid.plan import CONCURRENCIES, ORDER, Point, guess_seconds, parse_points
from grid.shapes import LLAMA_8B, TINY
from grid.waves import WORK, end_when_told, leave_without_gpu, present
from grid.workloads import NAMES, DataMissing, make_plan
from harness import RESULTS, machine
from rich.progress import Progress

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

ALL_ARMS = (
    "v2-none,v1-none,ngram:5,ngram:16,suffix:5,suffix:16,v2-intree-ngram:5,"
    "v1-ngram-gpu:5,v1-suffix:16,v2-oracle:16,v1-suffix:5,v2-oracle:5,"
    "ngram-untrimmed:5,suffix-untrimmed:5,v2-intree-ngram:16,v1-ngram-gpu:16,"
    "ngram-untrimmed:16,suffix-untrimmed:16"
)

ALL_WORKLOADS = ",".join(ORDER)
ALL_C = ",".join(map(str, CONCURRENCIES))

Arms = Annotated[
    str,
    typer.Option(
        help="NAME:K or NAME, in order, with commas; NAME:K@MOST or NAME@MOST: no "
        "points of more than MOST requests at a time"
    ),
]
Workloads = Annotated[str, typer.Option(help=f"of {', '.join(NAMES)}")]
Concurrencies = Annotated[str, typer.Option("--c", help="requests at a time")]
Turns = Annotated[
    int,
    typer.Option(
        min=1,
        help="a point's timed runs: one at a time of each arm of the wave, so many "
        "times over; 1: two or three of an arm in a row, then the next arm's",
    ),
]
Length = Annotated[int, typer.Option(min=0, help="output tokens; 0: each own")]
Points = Annotated[str, typer.Option(help="WORKLOAD:C, in place of the two before")]


def _points(points: str, workloads: str, c: str, most: int) -> list[Point]:
    """Return the points that are named, or all workloads at all numbers of requests."""
    if not points:
        pairs = [
            f"{name}:{number}"
            for number in c.split(",")
            for name in workloads.split(",")
        ]
        points = ",".join(pairs)
    try:
        return parse_points(points, NAMES, most)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _arms(text: str) -> list[Arm]:
    try:
        return parse_arms(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _with_data(points: list[Point], length: int) -> list[Point]:
    """Return the points whose texts are here; name the workloads of the others.

    Args:
        points: all that are wanted.
        length: output tokens of each request; 0: each workload's own.
    """
    absent = set()
    for name in dict.fromkeys(point.workload for point in points):
        try:
            make_plan(name, 1, LLAMA_8B.vocab_size, length)
        except DataMissing as error:
            print(f"left out {name}: {error}", flush=True)
            absent.add(name)
    return [point for point in points if point.workload not in absent]


@app.command()
def run(
    arms: Arms = ALL_ARMS,
    workloads: Workloads = ALL_WORKLOADS,
    c: Concurrencies = ALL_C,
    points: Points = "",
    time_limit: Annotated[float, typer.Option(help="seconds for all of it")] = 3600.0,
    at_once: Annotated[int, typer.Option(min=1, max=6)] = 2,
    kv_gib: Annotated[float, typer.Option(help="KV cache of each engine")] = 22.0,
    turns: Turns = 1,
    length: Length = 0,
    out: Annotated[Path, typer.Option(help="folder of the record")] = RESULTS,
    logs: Annotated[Path | None, typer.Option(help="folder of the logs")] = None,
    work: Annotated[Path | None, typer.Option(help="folder of vLLM's caches")] = None,
    run_id: Annotated[str | None, typer.Option(help="of a run to resume")] = None,
    commit: Annotated[str | None, typer.Option()] = None,
    tiny: Annotated[bool, typer.Option(help="a small model on the CPU")] = False,
    trim_explain: Annotated[
        bool, typer.Option("--trim-explain", help="the trimmer tells the logs")
    ] = False,
) -> None:
    """Measure points and append them to the record."""
    leave_without_gpu(tiny)
    shape = TINY if tiny else LLAMA_8B
    most = shape.engine["max_num_seqs"]
    wanted = _with_data(_points(points, workloads, c, most), length)
    chosen = present(_arms(arms), on_cpu=tiny)
    work = work or WORK
    settings = Settings(
        shape=shape,
        path=out / record.NAME,
        logs=logs or work / "logs",
        work=work,
        kv_gib=kv_gib,
        at_once=at_once,
        turns=turns,
        length=length,
        time_limit=time_limit,
        run_id=run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
        machine=machine(commit),
        say=lambda text: print(text, flush=True),
        progress=lambda done, total: None,
        trim_explain=trim_explain,
    )
    end_when_told()
    total = sum(arm.takes(point.c) for arm in chosen for point in wanted)
    print(f"run {settings.run_id}: {len(chosen)} arms, {total} points", flush=True)
    if sys.stdout.isatty():
        with Progress() as bar:
            task = bar.add_task("points", total=None)
            settings.say = bar.console.print
            settings.progress = lambda done, total: bar.update(
                task, completed=done, total=total
            )
            outcome = Orchestrator(chosen, wanted, settings).run()
    else:
        outcome = Orchestrator(chosen, wanted, settings).run()
    _report(outcome, settings)


def _report(outcome: Outcome, settings: Settings) -> None:
    print(
        f"{len(outcome.measured)} points in {settings.path}, "
        f"{len(outcome.skipped)} were there, {len(outcome.dropped)} dropped"
    )
    for name in outcome.dropped:
        print(f"dropped: {name}")
    for text in outcome.failures:
        print(f"FAILED: {text}")
    for text in outcome.mismatches:
        print(f"MISMATCH: {text}")
    nothing = not (outcome.measured or outcome.skipped)
    if nothing:
        print("FAILED: no point was measured")
    sys.stdout.flush()
    if nothing or outcome.failures or outcome.mismatches:
        raise typer.Exit(1)


@app.command("points")
def show_points(
    arms: Arms = ALL_ARMS,
    workloads: Workloads = ALL_WORKLOADS,
    c: Concurrencies = ALL_C,
    points: Points = "",
    turns: Turns = 1,
    length: Length = 0,
) -> None:
    """Show what a run would take, by guesses made before any measurement."""
    wanted = _points(points, workloads, c, LLAMA_8B.engine["max_num_seqs"])
    for arm in _arms(arms):
        taken = [point for point in wanted if arm.takes(point.c)]
        seconds = sum(guess_seconds(arm, point, turns, length) for point in taken)
        print(f"{arm.label:22s}{len(taken):4d} points {seconds:7.0f} s")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    app()
