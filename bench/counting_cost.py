"""What counting the drafts costs: one engine with it and without, in turn.

    python bench/counting_cost.py --arms suffix:16 --workload low --c 256

Requests forced to recorded texts run over and over, counted and not counted in pairs.
A pair's difference is what counting costs, or what the engine's steps vary by: the
standard error tells. With ``--tiny`` a small model runs on the CPU.
"""

import os
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer
from grid.plan import Point
from grid.waves import of_one_workload
from grid.workloads import SEED
from harness import RESULTS, machine, save

NAME = "counting_cost"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    arms: Annotated[str, typer.Option()] = "suffix:16",
    workload: Annotated[str, typer.Option()] = "low",
    c: Annotated[int, typer.Option(min=1, help="requests at a time")] = 256,
    pairs: Annotated[int, typer.Option(min=2)] = 6,
    length: Annotated[int, typer.Option(help="output tokens; 0: each own")] = 0,
    time_limit: Annotated[float, typer.Option(help="seconds for all of it")] = 560.0,
    kv_gib: Annotated[float, typer.Option()] = 20.6,
    out: Annotated[Path, typer.Option(help="folder of the record")] = RESULTS,
    work: Annotated[Path | None, typer.Option(help="folder of vLLM's caches")] = None,
    commit: Annotated[str | None, typer.Option()] = None,
    tiny: Annotated[bool, typer.Option(help="on the CPU")] = False,
) -> None:
    """Run each arm and print what counting costs it."""
    chosen, waves = of_one_workload(
        time_limit,
        arms=arms,
        fits=lambda arm: arm.kind.plugin,
        lacking="nothing is counted there",
        workload=workload,
        tiny=tiny,
        length=length,
        work=work,
        module="grid.counting",
        kv_gib=kv_gib,
        more={"pairs": pairs},
    )
    record: dict[str, Any] = {
        **machine(commit), "seed": SEED, "workload": workload, "c": c, "arms": {},
    }  # fmt: skip
    for arm, _, answer in waves.run(chosen, [Point(workload, c)], 1):
        record["arms"][arm.label] = {**answer, **difference(answer)}
        print(verdict(arm.label, record["arms"][arm.label]), flush=True)
    record["failures"] = waves.failures
    print("saved", save(NAME, record, out))
    if waves.failures or not record["arms"]:
        raise typer.Exit(1)


def difference(answer: dict[str, Any]) -> dict[str, float]:
    """Return what counting adds to a token's time, in per cent of it."""
    uncounted = statistics.fmean(answer["uncounted_ms"])
    pairs = zip(answer["counted_ms"], answer["uncounted_ms"], strict=True)
    added = [(with_it - without) / uncounted * 100 for with_it, without in pairs]
    return {
        "uncounted_tpot_ms": uncounted,
        "added_percent": statistics.fmean(added),
        "standard_error": statistics.stdev(added) / len(added) ** 0.5,
    }


def verdict(label: str, one: dict[str, Any]) -> str:
    """Return an arm's line."""
    return (
        f"{label}: TPOT {one['uncounted_tpot_ms']:.3f} ms, with counting "
        f"{one['added_percent']:+.2f} % (standard error {one['standard_error']:.2f})"
    )


if __name__ == "__main__":
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    app()
