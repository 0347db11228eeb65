"""Recorded trajectories by workload name, as the benchmarks use them.

A workload is a list of trajectories: prompt, output, category. `mid` and `shift` are
made here from the recorded files, with fixed seeds.
"""

import gzip
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from grid.shapes import LLAMA_8B
from grid.workloads import DataMissing, ends_in_loop, make_plan

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "low": "reference_spec_bench",
    "low-smollm2": "smollm2_spec_bench",
    "high": "code_edit",
    "agentic": "agentic",
}
WORKLOADS = (*FILES, "low-smollm2-no-loops", "mid", "shift")
# One token in this many is replaced in `mid`.
REPLACED = 24
MID_TOKENS = 192
SEED = 24
# The tokens of "```", "python" and a line break around an excerpt in a prompt.
FENCE_TOKENS = 3


@dataclass(frozen=True)
class Trajectory:
    """One recorded request."""

    prompt: list[int]
    output: list[int]
    category: str


def data_folder() -> Path:
    """Return where the recorded files are; MRV2_SPEC_SHARED names another place."""
    return Path(os.environ.get("MRV2_SPEC_SHARED", ROOT.parent / "shared")) / "data"


def read(name: str) -> list[Trajectory]:
    """Read one recorded file."""
    path = data_folder() / f"{name}.jsonl.gz"
    if not path.exists():
        raise SystemExit(f"{path}: no such file; MRV2_SPEC_SHARED names its folder")
    with gzip.open(path, "rt") as lines:
        records = [json.loads(line) for line in lines]
    return [
        Trajectory(r["prompt_token_ids"], r["output_token_ids"], r["category"])
        for r in records
    ]


def excerpt(prompt: list[int], output: list[int]) -> list[int]:
    """Return the longest run of prompt tokens from which the output is copied."""
    # The fence that opens the output's code also opens the prompt's.
    best, start = 0, 0
    for at in range(len(output) - FENCE_TOKENS):
        head = output[at : at + FENCE_TOKENS]
        for p in range(len(prompt) - FENCE_TOKENS):
            if prompt[p : p + FENCE_TOKENS] == head:
                size = 0
                while (
                    p + size < len(prompt)
                    and at + size < len(output)
                    and prompt[p + size] == output[at + size]
                ):
                    size += 1
                if size > best:
                    best, start = size, p
        if best > 16:
            break
    return prompt[start:]


def mid() -> list[Trajectory]:
    """Copies of code excerpts in which one token in 24 is another one."""
    rng = np.random.default_rng(SEED)
    made = []
    for t in read(FILES["high"]):
        copy = np.array(excerpt(t.prompt, t.output)[:MID_TOKENS])
        replaced = rng.random(len(copy)) < 1 / REPLACED
        copy[replaced] = rng.choice(np.array(t.prompt), int(replaced.sum()))
        made.append(Trajectory(t.prompt, copy.tolist(), "copy"))
    return made


def load(name: str) -> list[Trajectory]:
    """Return the trajectories of a workload."""
    if name in FILES:
        return read(FILES[name])
    if name == "low-smollm2-no-loops":
        return [t for t in read(FILES["low-smollm2"]) if not ends_in_loop(t.output)]
    if name == "mid":
        return mid()
    if name == "shift":
        return [*read(FILES["low"]), *read(FILES["high"])]
    raise SystemExit(f"{name}: no workload; there are {', '.join(WORKLOADS)}")


def engine_rounds(name: str, requests: int) -> tuple[list[list[Trajectory]], int]:
    """Return the rounds of requests that the engine grid runs for one of its points.

    Args:
        name: a workload that both know.
        requests: at a time.

    Returns:
        All rounds, and how many of them, at the beginning, only fill a memory.
    """
    try:
        plan = make_plan(name, requests, LLAMA_8B.vocab_size)
    except DataMissing as error:
        raise SystemExit(str(error)) from None
    rounds = [
        [Trajectory(item.prompt, item.output, name) for item in one]
        for one in (*plan.warm, *plan.rounds)
    ]
    return rounds, len(plan.warm)
