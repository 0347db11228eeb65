"""Where the time of a step goes: host calls, GPU kernels, wall time, arm by arm.

    python bench/profile_step.py --arms v2-none,ngram:16 --points low:256,high:64

Each arm is one engine in a process of its own, scheduler and worker in the same
process, so that all of its host work can be timed. Engines start side by side and are
looked at one at a time. The model says recorded texts, as in ``engine_grid.py``. With
``--tiny`` a small model runs on the CPU, where operators stand in for GPU kernels.
"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from grid.arms import parse_arms
from grid.kernels import GROUPS, OTHER
from grid.plan import Point, parse_points
from grid.shapes import LLAMA_8B, TINY
from grid.watches import ROWS
from grid.waves import Waves, leave_without_gpu, present
from grid.workloads import SEED, WORKLOADS, DataMissing, make_plan
from harness import RESULTS, machine, save

NAME = "profile_step"
Column = dict[str, Any]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    arms: Annotated[str, typer.Option(help="as of engine_grid.py")] = (
        "v2-none,ngram:16,suffix:16"
    ),
    points: Annotated[str, typer.Option()] = "low:256,low:64,high:64",
    kernel_steps: Annotated[int, typer.Option(help="steps on the GPU")] = 30,
    cprofile: Annotated[bool, typer.Option("--cprofile")] = False,
    time_limit: Annotated[float, typer.Option(help="seconds for all of it")] = 560.0,
    at_once: Annotated[int, typer.Option(min=1, max=6)] = 3,
    kv_gib: Annotated[float, typer.Option(help="KV cache of each engine")] = 22.0,
    length: Annotated[int, typer.Option(help="output tokens; 0: each own")] = 0,
    out: Annotated[Path, typer.Option(help="folder of the record")] = RESULTS,
    name: Annotated[str, typer.Option(help="of the record")] = NAME,
    work: Annotated[Path | None, typer.Option(help="folder of vLLM's caches")] = None,
    commit: Annotated[str | None, typer.Option()] = None,
    tiny: Annotated[bool, typer.Option(help="a small model on the CPU")] = False,
) -> None:
    """Profile steps and print a table."""
    leave_without_gpu(tiny)
    shape = TINY if tiny else LLAMA_8B
    try:
        chosen = parse_arms(arms)
        wanted = parse_points(points, tuple(WORKLOADS), shape.engine["max_num_seqs"])
        for point in wanted:
            make_plan(point.workload, 1, shape.vocab_size)
    except (ValueError, DataMissing) as error:
        raise typer.BadParameter(str(error)) from error
    waves = Waves.within(
        time_limit,
        shape=shape,
        work=work,
        module="grid.profiled",
        in_process=True,
        kv_gib=kv_gib,
        length=length,
        more={
            "kernel_steps": kernel_steps,
            "cprofile": str(out.resolve() / f"{name}-cprofile") if cprofile else None,
        },
    )
    record = {"seed": SEED, "model": shape.name, **machine(commit), "points": []}
    for arm, point, answer in waves.run(present(chosen, tiny), wanted, at_once):
        column = {
            "arm": arm.name,
            "k": arm.k,
            "label": arm.label,
            "point": str(point),
            "workload": point.workload,
            "c": point.c,
            **answer,
        }
        record["points"].append(column)
        print(
            f"{arm.label} {point}: {_number(answer['wall']['mean_ms'])} ms a step, "
            f"TPOT {answer['tpot_ms']:.3f} ms",
            flush=True,
        )
        # Written each time: what was found outlives what comes next.
        path = save(name, record, out)
    if not record["points"]:
        print("nothing was measured")
        raise typer.Exit(1)
    print(f"{len(record['points'])} columns in {path}")
    for point in wanted:
        columns = [one for one in record["points"] if one["point"] == str(point)]
        if columns:
            print("\n".join(table(point, columns)), flush=True)
    if waves.failures:
        print("\n".join(f"FAILED {text}" for text in waves.failures))
        raise typer.Exit(1)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(point: Point, columns: list[Column]) -> list[str]:
    """Return a point's lines, one column an arm: milliseconds a step."""
    lines = [f"== {point}, ms a step", _line("", [one["label"] for one in columns])]

    def row(name: str, values: list[float | None], digits: int = 3) -> None:
        if any(value is not None for value in values):
            lines.append(_line(name, [_number(v, digits) for v in values]))

    row("TPOT", [one["tpot_ms"] for one in columns])
    row("tokens a request and step", [one["tokens_per_step"] for one in columns], 2)
    row("wall, nothing watched", [one["wall"]["mean_ms"] for one in columns])
    row("wall, host watched", [one["host"]["wall_ms"] for one in columns])
    row("GPU busy", [one["kernels"]["busy_ms"] for one in columns])
    for group in (*(name for name, _ in GROUPS), OTHER):
        row(f"  {group}", [one["kernels"]["groups_ms"].get(group) for one in columns])
    for name, depth in ROWS:
        values = [one["host"]["ms"].get(name) for one in columns]
        row("host " + "  " * depth + name, values)
    row("host rest", [one["host"]["rest_ms"] for one in columns])
    hooks = sorted({name for one in columns for name in one["host"]["hooks_ms"]})
    for name in hooks:
        row(f"hook {name}", [one["host"]["hooks_ms"].get(name) for one in columns])
    row("ours on the host", [one["host"]["ours_ms"] for one in columns])
    for key in ("asleep", "awake_without", "awake_with"):
        row(f"steps {key}", [one["host"][key] for one in columns], 2)
    row("mean budget if any", [one["host"]["mean_budget"] for one in columns], 1)
    row("steps watched", [float(one["host"]["steps"]) for one in columns], 0)
    lines += [_graphs(one) for one in columns]
    lines += [
        f"no kernels of {one['label']}: {one['kernels']['error']}"
        for one in columns
        if "error" in one["kernels"]
    ]
    return lines


def _line(name: str, cells: list[str]) -> str:
    return f"{name:36s}" + "".join(f"{cell:>13s}" for cell in cells)


def _graphs(column: Column) -> str:
    shown = [
        f"{one['mode']} {one['tokens']} q<={one['max_query_len']}: {one['steps']}"
        for one in column["host"]["graphs"][:5]
    ]
    return f"graphs of {column['label']}: " + ("; ".join(shown) or "none")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    app()
