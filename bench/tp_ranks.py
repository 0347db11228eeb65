"""Do tensor-parallel ranks that are late in their own ways decide the same?

    python bench/tp_ranks.py --arms ngram:8,suffix:8

Two ranks, each with random delays of its own on the host and, through side streams, on
the device. Of every step each rank notes checksums of the drafts, of what is known of
them, and of the widths and boundaries that the device laid out, and the budget that its
host chose. Half as many steps again let drafting fall asleep and wake all the time.
Ranks that disagree would hang or say something else; this looks before they do. With
``--tiny`` both ranks run on the CPU.
"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from grid.arms import parse_arms
from grid.plan import Point
from grid.shapes import LLAMA_8B_TP2, TINY_TP2
from grid.waves import Waves, present
from grid.workloads import SEED, DataMissing, mixed_rounds
from harness import RESULTS, machine, save

NAME = "tp_ranks"
NUM_RANKS = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    arms: Annotated[str, typer.Option()] = "ngram:8,suffix:8",
    steps: Annotated[int, typer.Option(min=2, help="half as many restless")] = 500,
    requests: Annotated[int, typer.Option(min=1, help="of a round")] = 96,
    delay_ms: Annotated[float, typer.Option(help="of the longest usual delay")] = 3.0,
    seed: Annotated[int, typer.Option()] = SEED,
    length: Annotated[int, typer.Option(help="output tokens; 0: each own")] = 0,
    time_limit: Annotated[float, typer.Option(help="seconds for all of it")] = 560.0,
    point_limit: Annotated[float, typer.Option(help="a longer arm hangs")] = 200.0,
    kv_gib: Annotated[float, typer.Option(help="KV cache of each rank")] = 8.0,
    out: Annotated[Path, typer.Option(help="folder of the record")] = RESULTS,
    work: Annotated[Path | None, typer.Option(help="folder of vLLM's caches")] = None,
    commit: Annotated[str | None, typer.Option()] = None,
    tiny: Annotated[bool, typer.Option(help="on the CPU")] = False,
) -> None:
    """Run each arm, compare its ranks step by step, and print verdicts."""
    import torch

    if not tiny and torch.cuda.device_count() < NUM_RANKS:
        print(f"left out everything: this needs {NUM_RANKS} GPUs (--tiny: the CPU)")
        raise typer.Exit(0)
    shape = TINY_TP2 if tiny else LLAMA_8B_TP2
    try:
        chosen = parse_arms(arms)
        mixed_rounds(1, 1, shape.vocab_size, length)
    except (ValueError, DataMissing) as error:
        raise typer.BadParameter(str(error)) from error
    unwatched = [arm.label for arm in chosen if not arm.kind.trimmed]
    if unwatched:
        raise typer.BadParameter(f"{', '.join(unwatched)}: only trimmed arms decide")
    waves = Waves.within(
        time_limit,
        shape=shape,
        work=work,
        module="grid.ranks",
        in_process=False,
        kv_gib=kv_gib,
        length=length,
        more={
            "steps": steps,
            "requests": requests,
            "delay_ms": delay_ms,
            "seed": seed,
        },
        point_limit=point_limit,
    )
    record: dict[str, Any] = {
        **machine(commit), "seed": seed, "delay_ms": delay_ms, "arms": {},
    }  # fmt: skip
    point = Point("ranks", requests)
    for arm, _, answer in waves.run(
        present(chosen, tiny), [point], at_once=len(chosen)
    ):
        record["arms"][arm.label] = answer
    record["failures"] = waves.failures
    print("saved", save(NAME, record, out))
    print("\n".join(verdict(label, one) for label, one in record["arms"].items()))
    for text in waves.failures:
        print(f"FAILED {text}")
    differ = any(one["difference"] for one in record["arms"].values())
    if differ or waves.failures or not record["arms"]:
        raise typer.Exit(1)


def verdict(label: str, one: dict[str, Any]) -> str:
    """Return an arm's line."""
    said = one["difference"]
    agree = "ranks AGREE" if said is None else f"ranks DIFFER at {said}"
    late = ", ".join(
        f"{host:.0f}+{device:.0f}"
        for host, device in zip(
            one["host_delay_ms"], one["device_delay_ms"], strict=True
        )
    )
    return (
        f"{label}: {agree} in {one['steps']} steps ({one['plain_steps']} before the "
        f"restless ones); {one['budgets']} budgets, {one['draft_shapes']} different "
        f"drafts, {one['steps_with_budget']} steps verified some, "
        f"{one['steps_asleep']} asleep, {one['naps']} naps; delays by rank, host + "
        f"device ms: {late}; {one['seconds']:.0f} s"
    )


if __name__ == "__main__":
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    app()
