"""How long n-gram drafting takes on the GPU, beside vLLM's own kernels.

    python bench/bench_propose_ngram.py [--out DIR] [--commit HASH] [--tiny]

Ours is first checked against the plain reference. `ours` takes the earliest of equally
long matches, as vLLM's kernels do; `latest` is this project's default. Bytes moved are
each row's tokens read once, and what a draft needs and leaves; the floor is the time
that they take at the bandwidth of a large copy, measured in the same run. With
``--tiny`` a few small cases run on the CPU, to see that the script works.
"""

import argparse
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from harness import RESULTS, Floor, device, gpu_time_us, machine, num_input_sets, save

from mrv2_spec.kernels.propose_ngram import (
    NUM_CLASSES,
    propose_ngram,
    propose_ngram_ref,
)

SEED = 20261129
K = 16
SIZES = (
    (1, 4096),
    (1, 32768),
    (16, 4096),
    (16, 32768),
    (64, 4096),
    (64, 32768),
    (256, 1024),
    (256, 4096),
    (256, 32768),
    (512, 4096),
    (512, 32768),
)
TINY_SIZES = ((1, 64), (3, 300))
# For each request, beside its row: slot, lengths, counts, scratch, class; and the
# tokens copied, the drafts and their chances.
BYTES_A_REQUEST = 8 + 4 * 4 + 2 * 12 + 4 + K * (4 + 8 + 4)


def make_cases(sizes: tuple[tuple[int, int], ...]) -> list[dict[str, Any]]:
    """Return the cases, those with few matches first."""
    return [
        {"num_reqs": num_reqs, "row_len": length, "min_n": 2, "max_n": 4, "text": text}
        for text in ("sparse", "dense")
        for num_reqs, length in sizes
    ]


class Inputs:
    """One set of rows. ``sparse``: tokens of a large vocabulary, the row's end planted
    twice before; ``dense``: 8 tokens only, so that every block holds matches."""

    def __init__(self, case: dict[str, Any], rng: torch.Generator) -> None:
        num_reqs, row_len, place = case["num_reqs"], case["row_len"], device()
        vocab = 50000 if case["text"] == "sparse" else 8
        self.row_len = row_len
        self.rows = torch.randint(
            vocab, (num_reqs, row_len), dtype=torch.int32, generator=rng
        )
        if case["text"] == "sparse":
            for at in (row_len // 3, row_len // 2):
                self.rows[:, at : at + 3] = self.rows[:, -3:]
        self.token_ids = self.rows.to(place)
        ints: dict[str, Any] = {"dtype": torch.int32, "device": place}
        self.idx_mapping = torch.randperm(num_reqs, generator=rng).to(place)
        self.total_len = torch.full((num_reqs,), row_len, **ints)
        self.num_sampled = torch.ones(num_reqs, **ints)
        self.last_sampled = self.token_ids[:, -1].long().view(-1, 1)
        self.drafts = torch.empty(num_reqs, K, dtype=torch.int64, device=place)
        self.num_drafts = torch.empty(num_reqs, **ints)
        self.classes = torch.empty(num_reqs, **ints)
        self.confidences = torch.empty(num_reqs, K, device=place)
        self.best = torch.zeros(num_reqs, dtype=torch.int64, device=place)
        self.arrivals = torch.zeros(num_reqs, **ints)
        self.no_placeholders = torch.empty(0, **ints)
        self.prior = torch.full((NUM_CLASSES, K), 0.5, device=place)


def launch_ours(inputs: Inputs, case: dict[str, Any], latest: bool) -> None:
    """Draft with this project's kernel."""
    propose_ngram(
        inputs.token_ids,
        inputs.idx_mapping,
        inputs.total_len,
        inputs.num_sampled,
        inputs.no_placeholders,
        inputs.prior,
        inputs.best,
        inputs.arrivals,
        inputs.drafts,
        inputs.num_drafts,
        inputs.confidences,
        inputs.classes,
        max_total_len=inputs.row_len,
        max_model_len=inputs.row_len + K,
        num_steps=K,
        min_n=case["min_n"],
        max_n=case["max_n"],
        latest=latest,
    )


def in_tree_launch(inputs: Inputs, case: dict[str, Any]) -> Callable[[], None]:
    """Return a launch of vLLM's own kernels over the same rows, without an engine."""
    import triton
    from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

    speculator = NgramGPUSpeculator.__new__(NgramGPUSpeculator)
    speculator.req_states = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=inputs.token_ids),
        total_len=SimpleNamespace(gpu=inputs.total_len),
    )
    speculator.min_n, speculator.max_n = case["min_n"], case["max_n"]
    speculator.num_speculative_steps = K
    speculator.max_model_len = inputs.row_len
    # The block ladder of its constructor, for rows of 1024 and more.
    speculator.block_l = 256
    speculator.n_blocks = triton.cdiv(inputs.row_len, speculator.block_l)
    num_reqs, place = case["num_reqs"], device()
    speculator.scratch = torch.zeros(
        num_reqs, speculator.n_blocks, dtype=torch.int64, device=place
    )
    speculator.drafts = torch.zeros(num_reqs, K, dtype=torch.int64, device=place)
    batch = SimpleNamespace(num_reqs=num_reqs, idx_mapping=inputs.idx_mapping)

    def launch() -> None:
        speculator.propose(
            batch, None, None, None, None, inputs.num_sampled, None,
            inputs.last_sampled, None, None, None,
        )  # fmt: skip

    return launch


def check(inputs: Inputs, case: dict[str, Any], latest: bool) -> None:
    """Compare this project's drafts with the plain reference, for some rows."""
    launch_ours(inputs, case, latest)
    slots = inputs.idx_mapping.tolist()
    rng = random.Random(SEED)
    for batch_idx in rng.sample(range(len(slots)), min(4, len(slots))):
        slot = slots[batch_idx]
        expected, _ = propose_ngram_ref(
            inputs.rows[slot].tolist(),
            num_steps=K,
            min_n=case["min_n"],
            max_n=case["max_n"],
            max_model_len=inputs.row_len + K,
            latest=latest,
        )
        got = inputs.drafts[batch_idx, : inputs.num_drafts[slot]].tolist()
        if got != expected:
            raise SystemExit(f"wrong drafts in {case}: {got}, expected {expected}")


def time_case(
    case: dict[str, Any], rng: torch.Generator, floor: Floor, in_tree: bool
) -> dict[str, Any]:
    """Check and time one case."""
    num_reqs, row_len = case["num_reqs"], case["row_len"]
    moved = num_reqs * (4 * row_len + BYTES_A_REQUEST)
    num_sets = num_input_sets(moved)
    sets = [Inputs(case, rng) for _ in range(num_sets)]
    times: dict[str, tuple[float, float, float] | None] = {"in_tree": None}
    for name, latest in (("ours", False), ("latest", True)):
        check(sets[0], case, latest)
        times[name] = gpu_time_us([partial(launch_ours, s, case, latest) for s in sets])
    if in_tree:
        times["in_tree"] = gpu_time_us([in_tree_launch(s, case) for s in sets])
    return {
        **case,
        "k": K,
        "input_sets": num_sets,
        "bytes_moved": moved,
        "read_floor_us": floor.us(moved),
        "copy_us": floor.copy_us(moved, num_sets),
        **{
            f"{name}_us": time and dict(zip(("p20", "p50", "p80"), time, strict=True))
            for name, time in times.items()
        },
    }


def main() -> None:
    """Time every case and write ``propose_ngram.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    parser.add_argument("--tiny", action="store_true", help="small cases, on the CPU")
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("no GPU here: --tiny runs on the CPU")
    rng = torch.Generator().manual_seed(SEED)
    floor = Floor()
    in_tree = not args.tiny
    if in_tree:
        try:
            import vllm.v1.worker.gpu.spec_decode.ngram.speculator  # noqa: F401
        except ImportError as error:
            in_tree = False
            print(f"left out vLLM's kernels: {error}", flush=True)
    results = []
    heads = ("ours", "p20", "p80", "latest", "in-tree", "copy", "floor", "x floor")
    print(f"{'text':7s}{'reqs':>5s}{'row':>7s}"
          + "".join(f"{h:>9s}" for h in heads) + "  us")  # fmt: skip
    for case in make_cases(TINY_SIZES if args.tiny else SIZES):
        found = time_case(case, rng, floor, in_tree)
        results.append(found)
        ours = found["ours_us"]
        theirs = found["in_tree_us"]["p50"] if found["in_tree_us"] else float("nan")
        cells = (
            ours["p50"], ours["p20"], ours["p80"], found["latest_us"]["p50"], theirs,
            found["copy_us"], found["read_floor_us"],
            ours["p50"] / found["read_floor_us"],
        )  # fmt: skip
        print(f"{case['text']:7s}{case['num_reqs']:5d}{case['row_len']:7d}"
              + "".join(f"{c:9.1f}" for c in cells), flush=True)  # fmt: skip
    record = {
        **machine(args.commit), "seed": SEED, "repeats": 50,
        "copy_bandwidth_gb_s": floor.bandwidth_gb_s, "cases": results,
    }  # fmt: skip
    print("saved", save("propose_ngram", record, args.out))


if __name__ == "__main__":
    main()
