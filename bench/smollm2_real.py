"""A real model, greedy: what each arm says, and how fast.

    python bench/smollm2_real.py --arms v2-none,ngram:16,suffix:16 --c 1,16,64

SmolLM2-135M-Instruct answers chat prompts with its own weights. Each arm's tokens are
compared with those of the first arm. With ``--batch-invariant`` they must be the same;
without, a batch's shape changes how sums are rounded, and near ties go either way. The
model is so small that the host sets the pace. With ``--tiny`` it runs on the CPU.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from grid.arms import parse_arms
from grid.measure import decode_run, point_figures
from grid.plan import Point
from grid.shapes import SMOLLM2, SMOLLM2_CPU
from grid.waves import Waves, leave_without_gpu, present
from grid.workloads import DataMissing, real_rounds
from harness import RESULTS, machine, save

NAME = "smollm2_real"
WORKLOAD = "smollm2-real"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def compare(
    said: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return how far some texts are from others of the same lengths.

    Tokens behind the first different one of a text continue another text: they are
    counted too, and say little.

    Raises:
        ValueError: a text is missing, or of another length.
    """
    different = requests = 0
    first: int | None = None
    for got, want in zip(said, expected, strict=True):
        places = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
        different += len(places)
        if places:
            requests += 1
            first = places[0] if first is None else min(first, places[0])
    return {
        "different_tokens": different,
        "different_requests": requests,
        "first_different_token": first,
        "requests": len(expected),
        "tokens": sum(map(len, expected)),
    }


def _model(given: Path | None) -> Path:
    if given is not None:
        return given
    from mrv2_spec.demo.smollm2 import ensure_model

    return ensure_model()


@app.command()
def main(
    arms: Annotated[str, typer.Option(help="the first is what others must say")] = (
        "v2-none,ngram:5,ngram:16,suffix:5,suffix:16,v2-intree-ngram:5"
    ),
    c: Annotated[str, typer.Option(help="requests at a time, with commas")] = "1,16,64",
    batch_invariant: Annotated[bool, typer.Option()] = True,
    length: Annotated[int, typer.Option(help="output tokens of each request")] = 160,
    model: Annotated[Path | None, typer.Option(help="its folder")] = None,
    time_limit: Annotated[float, typer.Option(help="seconds for all of it")] = 560.0,
    at_once: Annotated[int, typer.Option(min=1, max=8)] = 6,
    kv_gib: Annotated[float, typer.Option(help="KV cache of each engine")] = 3.0,
    out: Annotated[Path, typer.Option(help="folder of the record")] = RESULTS,
    work: Annotated[Path | None, typer.Option(help="folder of vLLM's caches")] = None,
    commit: Annotated[str | None, typer.Option()] = None,
    tiny: Annotated[bool, typer.Option(help="on the CPU")] = False,
) -> None:
    """Run all arms, compare what they say, and print a table."""
    leave_without_gpu(tiny)
    shape = SMOLLM2_CPU if tiny else SMOLLM2
    if batch_invariant and not tiny:
        invariant = {**shape.environment, "VLLM_BATCH_INVARIANT": "1"}
        shape = replace(shape, environment=invariant)
    try:
        chosen = parse_arms(arms)
        points = [Point(WORKLOAD, int(number)) for number in c.split(",")]
        real_rounds(max(point.c for point in points), 1, length)
    except (ValueError, DataMissing) as error:
        raise typer.BadParameter(str(error)) from error
    if max(point.c for point in points) > shape.engine["max_num_seqs"]:
        raise typer.BadParameter(f"--c {c}: at most {shape.engine['max_num_seqs']}")
    waves = Waves.within(
        time_limit,
        shape=shape,
        model=_model(model),
        work=work,
        module="grid.real",
        in_process=False,
        kv_gib=kv_gib,
        length=length,
        more={},
    )
    record: dict[str, Any] = {
        **machine(commit),
        "model": "SmolLM2-135M-Instruct",
        "batch_invariant": batch_invariant and not tiny,
        "compared_with": chosen[0].label,
        "points": [],
    }
    expected: dict[int, list[list[int]]] = {}
    path: Path | None = None
    for arm, point, answer in waves.run(present(chosen, tiny), points, at_once):
        said = answer["said"]
        if arm == chosen[0]:
            expected[point.c] = said[0]
        runs = [decode_run(run) for run in answer["runs"]]
        together = any(run.together for run in runs)
        figures = point_figures(runs, prefill_between=not together)
        line = {
            "arm": arm.name,
            "k": arm.k,
            "label": arm.label,
            "c": point.c,
            "workload": WORKLOAD,
            **figures,
            **(compare(said[0], expected[point.c]) if point.c in expected else {}),
            # Of this arm's own later runs, whose prompts came from the prefix cache.
            "different_in_repeats": [
                compare(again, said[0])["different_tokens"] for again in said[1:]
            ],
        }
        record["points"].append(line)
        path = save(NAME, record, out)
    if path is None:
        print("nothing was measured")
        raise typer.Exit(1)
    print(f"{len(record['points'])} points in {path}")
    print("\n".join(table(record["points"])))
    wrong = [
        f"{one['label']} c={one['c']}"
        for one in record["points"]
        if record["batch_invariant"] and one.get("different_tokens")
    ]
    failures = [*waves.failures, *(f"other tokens: {name}" for name in wrong)]
    if failures:
        print("\n".join(f"FAILED {text}" for text in failures))
        raise typer.Exit(1)


def table(points: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a table, one a point."""
    lines = [
        f"{'arm':20s}{'c':>4s}{'TPOT ms':>9s}{'tok/s':>9s}{'tok/step':>9s}"
        f"{'different tokens':>18s}{'in repeats':>16s}"
    ]
    for one in sorted(points, key=lambda one: one["c"]):
        if "tokens" in one:
            different = f"{one['different_tokens']} of {one['tokens']}"
        else:
            different = "-"
        repeats = ", ".join(map(str, one["different_in_repeats"]))
        lines.append(
            f"{one['label']:20s}{one['c']:4d}{one['tpot_ms']:9.3f}{one['tok_s']:9.0f}"
            f"{one['tokens_per_step']:9.2f}{different:>18s}{repeats:>16s}"
        )
    return lines


if __name__ == "__main__":
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    app()
