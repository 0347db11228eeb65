"""How long n-gram drafting takes on the GPU, beside vLLM's own kernels.

    python bench/bench_propose_ngram.py [--out DIR] [--commit HASH]

Both are first checked against the plain reference on every row of a case.
"""

import argparse
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from harness import RESULTS, copy_bandwidth_gb_s, gpu_time_us, machine, save

from mrv2_spec.kernels.propose_ngram import propose_ngram, propose_ngram_ref

SEED = 20261129
K = 16
NUM_INPUT_SETS = 8
CASES = [
    {"num_reqs": num_reqs, "row_len": row_len, "min_n": 2, "max_n": 4, "text": text}
    for text in ("sparse", "dense")
    for num_reqs, row_len in (
        (1, 4096),
        (1, 32768),
        (16, 4096),
        (64, 4096),
        (256, 1024),
        (256, 4096),
        (256, 32768),
        (512, 4096),
    )
]


class Inputs:
    """One set of rows. ``sparse``: tokens of a large vocabulary, the row's end planted
    twice before; ``dense``: 8 tokens only, so that every block holds matches."""

    def __init__(self, case: dict[str, Any], rng: torch.Generator) -> None:
        num_reqs, row_len = case["num_reqs"], case["row_len"]
        vocab = 50000 if case["text"] == "sparse" else 8
        self.row_len = row_len
        self.rows = torch.randint(
            vocab, (num_reqs, row_len), dtype=torch.int32, generator=rng
        )
        if case["text"] == "sparse":
            for at in (row_len // 3, row_len // 2):
                self.rows[:, at : at + 3] = self.rows[:, -3:]
        self.token_ids = self.rows.cuda()
        self.idx_mapping = torch.randperm(num_reqs, generator=rng).cuda()
        self.total_len = torch.full((num_reqs,), row_len, dtype=torch.int32).cuda()
        self.num_sampled = torch.ones(num_reqs, dtype=torch.int32).cuda()
        self.last_sampled = self.token_ids[:, -1].long().view(-1, 1)
        self.drafts = torch.empty(num_reqs, K, dtype=torch.int64).cuda()
        self.num_drafts = torch.empty(num_reqs, dtype=torch.int32).cuda()
        self.confidences = torch.empty(num_reqs, K).cuda()
        self.best = torch.zeros(num_reqs, dtype=torch.int64).cuda()
        self.arrivals = torch.zeros(num_reqs, dtype=torch.int32).cuda()


def launch_ours(inputs: Inputs, case: dict[str, Any], latest: bool = False) -> None:
    """Draft with this project's kernel."""
    propose_ngram(
        inputs.token_ids,
        inputs.idx_mapping,
        inputs.total_len,
        inputs.num_sampled,
        NO_PLACEHOLDERS,
        CONFIDENCES,
        inputs.best,
        inputs.arrivals,
        inputs.drafts,
        inputs.num_drafts,
        inputs.confidences,
        max_total_len=inputs.row_len,
        max_model_len=inputs.row_len + K,
        num_steps=K,
        min_n=case["min_n"],
        max_n=case["max_n"],
        latest=latest,
    )


def in_tree_speculator(inputs: Inputs, case: dict[str, Any]) -> Any:
    """Return vLLM's own speculator over the same rows, without an engine around it."""
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
    num_reqs = case["num_reqs"]
    speculator.scratch = torch.zeros(
        num_reqs, speculator.n_blocks, dtype=torch.int64, device="cuda"
    )
    speculator.drafts = torch.zeros(num_reqs, K, dtype=torch.int64, device="cuda")
    return speculator


def launch_in_tree(speculator: Any, inputs: Inputs) -> None:
    """Draft with vLLM's own kernels."""
    batch = SimpleNamespace(
        num_reqs=inputs.idx_mapping.shape[0], idx_mapping=inputs.idx_mapping
    )
    speculator.propose(
        batch, None, None, None, None, inputs.num_sampled, None,
        inputs.last_sampled, None, None, None,
    )  # fmt: skip


def check(inputs: Inputs, case: dict[str, Any]) -> None:
    """Compare this project's drafts with the plain reference, for some rows."""
    launch_ours(inputs, case)
    torch.cuda.synchronize()
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
        )
        got = inputs.drafts[batch_idx, : inputs.num_drafts[slot]].tolist()
        if got != expected:
            raise SystemExit(f"wrong drafts in {case}: {got}, expected {expected}")


def main() -> None:
    """Time every case and write ``propose_ngram.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    args = parser.parse_args()
    rng = torch.Generator().manual_seed(SEED)
    bandwidth = copy_bandwidth_gb_s()
    results = []
    print(f"{'text':7s}{'reqs':>5s}{'row':>7s}{'ours p50':>10s}{'p20':>7s}{'p80':>7s}"
          f"{'in-tree':>9s}{'ratio':>7s}{'floor':>7s}  us")  # fmt: skip
    for case in CASES:
        sets = [Inputs(case, rng) for _ in range(NUM_INPUT_SETS)]
        check(sets[0], case)
        ours = gpu_time_us([partial(launch_ours, s, case) for s in sets])
        pairs = [(in_tree_speculator(s, case), s) for s in sets]
        theirs = gpu_time_us([partial(launch_in_tree, *pair) for pair in pairs])
        # Every token is read once, in 4 bytes.
        floor = case["num_reqs"] * case["row_len"] * 4 / (bandwidth * 1000)
        results.append(
            {
                **case, "k": K,
                "ours_us": dict(zip(("p20", "p50", "p80"), ours, strict=True)),
                "in_tree_us": dict(zip(("p20", "p50", "p80"), theirs, strict=True)),
                "read_floor_us": floor,
            }
        )  # fmt: skip
        print(f"{case['text']:7s}{case['num_reqs']:5d}{case['row_len']:7d}"
              f"{ours[1]:10.1f}{ours[0]:7.1f}{ours[2]:7.1f}{theirs[1]:9.1f}"
              f"{theirs[1] / ours[1]:7.2f}{floor:7.1f}", flush=True)  # fmt: skip
        del sets, pairs
    record = {
        **machine(args.commit), "seed": SEED, "repeats": 50,
        "copy_bandwidth_gb_s": bandwidth, "cases": results,
    }  # fmt: skip
    print("saved", save("propose_ngram", record, args.out))


if __name__ == "__main__":
    NO_PLACEHOLDERS = torch.empty(0, dtype=torch.int32, device="cuda")
    CONFIDENCES = torch.full((5, K), 0.5, device="cuda")
    main()
