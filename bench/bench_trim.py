"""How long trimming a batch takes on the GPU.

python bench/bench_trim.py [--out DIR] [--commit HASH]
"""

import argparse
from pathlib import Path

import torch
from harness import RESULTS, gpu_time_us, machine, save

from mrv2_spec.kernels.count_drafts import count_drafts
from mrv2_spec.kernels.fill_draft_budget import fill_draft_budget
from mrv2_spec.kernels.trim_drafts import trim_drafts

SEED = 20261129
NUM_INPUT_SETS = 8


class Inputs:
    """One random batch with every slot in use."""

    def __init__(self, num_reqs: int, k: int, rng: torch.Generator) -> None:
        self.idx_mapping = torch.randperm(num_reqs, generator=rng).cuda()
        self.num_valid = torch.randint(
            k + 1, (num_reqs,), dtype=torch.int32, generator=rng
        ).cuda()
        self.drafts = torch.full((num_reqs,), k, dtype=torch.int32).cuda()
        self.scheduled = self.drafts + 1
        self.confidences = torch.rand(num_reqs, k, generator=rng).cuda()
        self.cu_num_logits = torch.empty(num_reqs + 1, dtype=torch.int32).cuda()
        self.query_start_loc = torch.empty(num_reqs + 1, dtype=torch.int32).cuda()
        self.budget = num_reqs
        self.sources = self.num_valid % 2

    def trim(self) -> None:
        """Clamp to the real drafts."""
        trim_drafts(
            self.idx_mapping, self.num_valid, self.drafts, self.scheduled,
            self.cu_num_logits, self.query_start_loc, num_bonus_tokens=1,
        )  # fmt: skip

    def fill(self) -> None:
        """Fill a budget of one draft a request."""
        fill_draft_budget(
            self.idx_mapping, self.num_valid, self.drafts, self.scheduled,
            self.confidences, self.cu_num_logits, self.query_start_loc,
            draft_budget=self.budget, num_bonus_tokens=1,
        )  # fmt: skip

    def count(self) -> None:
        """Gather what a step's drafts came to."""
        count_drafts(self.idx_mapping, self.cu_num_logits, self.num_valid, self.sources)


def main() -> None:
    """Time every case and write ``trim.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    args = parser.parse_args()
    rng = torch.Generator().manual_seed(SEED)
    results = []
    print(f"{'reqs':>5s}{'k':>4s}{'trim':>8s}{'fill':>8s}{'count':>8s}  us")
    for num_reqs in (1, 16, 64, 256, 512, 1024):
        for k in (5, 16):
            sets = [Inputs(num_reqs, k, rng) for _ in range(NUM_INPUT_SETS)]
            times = {
                name: gpu_time_us([getattr(s, name) for s in sets])[1]
                for name in ("trim", "fill", "count")
            }
            results.append({"num_reqs": num_reqs, "k": k, "p50_us": times})
            print(f"{num_reqs:5d}{k:4d}" + "".join(
                f"{t:8.1f}" for t in times.values()), flush=True)  # fmt: skip
    record = {**machine(args.commit), "seed": SEED, "repeats": 50, "cases": results}
    print("saved", save("trim", record, args.out))


if __name__ == "__main__":
    main()
