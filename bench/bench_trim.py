"""How long trimming, counting and valuing a batch's drafts takes on the GPU.

    python bench/bench_trim.py [--out DIR] [--commit HASH] [--tiny]

`trim` keeps the real drafts, `fill` spends a budget of one draft a request on the
likeliest ones, `count` books a step, `value` learns from a step and corrects the
chances of its drafts (with the copy of its counts; a tiny copy that lets every launch
do the same work is counted in). Each but the last two is checked against its plain
reference. `in-tree fill` is the device work of vLLM's own budget: its choice of drafts,
compiled, and the prefix sums behind it. The floor is the time that the bytes moved take
at the bandwidth of a large copy, measured in the same run; `copy` is a copy of as many
bytes: for so few, the launch is what takes time. With ``--tiny`` small cases run on the
CPU.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, Floor, device, gpu_time_us, machine, num_input_sets, save

from mrv2_spec.draft_values import DraftValues
from mrv2_spec.kernels.count_drafts import count_drafts
from mrv2_spec.kernels.fill_draft_budget import (
    fill_draft_budget,
    fill_draft_budget_ref,
)
from mrv2_spec.kernels.propose_ngram import NUM_CLASSES
from mrv2_spec.kernels.trim_drafts import trim_drafts, trim_drafts_ref

SEED = 20261129
WIDTH = 4096
NUM_REQS = (1, 16, 64, 256, 512, 1024)
KS = (5, 16)
TINY_NUM_REQS, TINY_KS = (1, 3), (2,)


class Inputs:
    """One random batch with every slot in use."""

    def __init__(self, num_reqs: int, k: int, rng: torch.Generator) -> None:
        self.num_reqs, self.k, place = num_reqs, k, device()
        ints: dict[str, Any] = {"dtype": torch.int32, "device": place}
        self.idx_mapping = torch.randperm(num_reqs, generator=rng).to(place)
        self.num_valid = torch.randint(
            k + 1, (num_reqs,), dtype=torch.int32, generator=rng
        ).to(place)
        self.drafts = torch.full((num_reqs,), k, **ints)
        self.scheduled = self.drafts + 1
        self.confidences = torch.rand(num_reqs, k, generator=rng).to(place)
        self.cu_num_logits = torch.empty(num_reqs + 1, **ints)
        self.query_start_loc = torch.empty(num_reqs + 1, **ints)
        self.budget = min(num_reqs, int(self.num_valid.sum()))
        self.sources = torch.zeros(num_reqs, **ints)
        self._prepare_values(rng)

    def _prepare_values(self, rng: torch.Generator) -> None:
        """Make a draft for every slot and a step that decides it."""
        num_reqs, k, place = self.num_reqs, self.k, device()
        self.token_ids = torch.randint(
            8, (num_reqs, WIDTH), dtype=torch.int32, generator=rng
        ).to(place)
        self.draft_tokens = torch.randint(8, (num_reqs, k), generator=rng).to(place)
        self.sampled = torch.randint(
            1, k + 2, (num_reqs,), dtype=torch.int32, generator=rng
        ).to(place)
        self.values = DraftValues(num_reqs, k, NUM_CLASSES, place)
        assert self.values.classes is not None
        self.values.classes.copy_(
            torch.randint(NUM_CLASSES, (num_reqs,), generator=rng)
        )
        self.chances = self.confidences.clone()
        total = torch.full_like(self.sampled, WIDTH)
        self.value_step(total - self.sampled[torch.argsort(self.idx_mapping)])
        self.total = total
        self.decided = self.values._made.clone()

    def value_step(self, total_len: torch.Tensor) -> None:
        """Take in a step after which rows have these lengths."""
        self.values.update(
            self.token_ids, self.idx_mapping, total_len, self.sampled,
            self.draft_tokens, self.num_valid, self.chances,
        )  # fmt: skip

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
        """Book a step."""
        count_drafts(self.idx_mapping, self.cu_num_logits, self.num_valid, self.sources)

    def value(self) -> None:
        """Learn from the step, with the drafts that it decides put back before."""
        self.values._made.copy_(self.decided)
        self.value_step(self.total)

    def check(self) -> None:
        """Compare the layouts with the plain references."""
        slots, valid = self.idx_mapping.tolist(), self.num_valid.tolist()
        drafts = [self.k] * self.num_reqs
        self.trim()
        got = [self.cu_num_logits.tolist(), self.query_start_loc.tolist()]
        expected = trim_drafts_ref(
            slots, valid, drafts, self.scheduled.tolist(), num_bonus_tokens=1,
            max_num_reqs=self.num_reqs,
        )  # fmt: skip
        if got != [list(part) for part in expected]:
            raise SystemExit(f"trim gives {got}, the reference {expected}")
        self.fill()
        widths = (self.cu_num_logits.diff() - 1).tolist()
        wanted = fill_draft_budget_ref(
            slots, valid, drafts, self.confidences.tolist(), draft_budget=self.budget
        )
        # A square root on the edge between two levels may round to either.
        off = sum(abs(a - b) for a, b in zip(widths, wanted, strict=True))
        if sum(widths) != self.budget or off > 2 + self.num_reqs // 50:
            raise SystemExit(f"fill gives {widths}, the reference {wanted}")

    def bytes_moved(self) -> dict[str, int]:
        """Return what each operation reads and writes, by name."""
        reqs, k = self.num_reqs, self.k
        # Slot, real drafts, scheduled drafts and tokens; two prefix sums.
        layout = reqs * (8 + 3 * 4 + 2 * 4)
        cells = self.values.counts.numel() * 4
        # By place: the token emitted, made tokens and cells in and out, the new draft,
        # its chance in and out (twice), and both counts.
        places = reqs * k * (4 + 4 * 4 + 8 + 3 * 4 + 2 * 4)
        return {
            "trim": layout,
            "fill": layout + reqs * k * 4,
            "count": reqs * (8 + 4 + 4 + 4 + 3 * 4),
            "value": places + reqs * (8 + 4 * 4 + 4 * 8) + 2 * cells,
            "in-tree fill": layout + reqs * k * 4,
        }


def in_tree_fill(inputs: Inputs) -> Callable[[], None]:
    """Return vLLM's choice of drafts for the same budget, and its prefix sums.

    Raises:
        ImportError: this vLLM has none.
    """
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import (
        _assign_draft_token_budget_compiled as assign,
    )

    capacities = inputs.drafts.clone()

    def launch() -> None:
        capacities.copy_(inputs.drafts)
        assign(
            inputs.confidences, inputs.idx_mapping, capacities, inputs.budget, inputs.k
        )
        inputs.cu_num_logits[:1].zero_()
        torch.cumsum(capacities + 1, dim=0, out=inputs.cu_num_logits[1:])
        inputs.query_start_loc[:1].zero_()
        torch.cumsum(capacities + 1, dim=0, out=inputs.query_start_loc[1:])

    return launch


def time_case(
    num_reqs: int, k: int, rng: torch.Generator, floor: Floor, in_tree: bool
) -> dict[str, Any]:
    """Check and time one batch size."""
    num_sets = num_input_sets(num_reqs * k * 8, most=16)
    sets = [Inputs(num_reqs, k, rng) for _ in range(num_sets)]
    sets[0].check()
    launches: dict[str, list[Callable[[], None]]] = {
        name: [getattr(s, name) for s in sets]
        for name in ("trim", "fill", "count", "value")
    }
    if in_tree:
        launches["in-tree fill"] = [in_tree_fill(s) for s in sets]
    moved = sets[0].bytes_moved()
    times = {name: gpu_time_us(of) for name, of in launches.items()}
    return {
        "num_reqs": num_reqs,
        "k": k,
        "input_sets": len(sets),
        "p50_us": {name: time[1] for name, time in times.items()},
        "p20_us": {name: time[0] for name, time in times.items()},
        "p80_us": {name: time[2] for name, time in times.items()},
        "bytes_moved": moved,
        "floor_us": {name: floor.us(num) for name, num in moved.items()},
        "copy_us": floor.copy_us(moved["fill"], len(sets)),
    }


def main() -> None:
    """Time every case and write ``trim.json``."""
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
            in_tree_fill(Inputs(1, 2, rng))
        except ImportError as error:
            in_tree = False
            print(f"left out vLLM's budget: {error}", flush=True)
    results = []
    names = ("trim", "fill", "count", "value", "in-tree fill")
    print(f"{'reqs':>5s}{'k':>4s}"
          + "".join(f"{n:>13s}" for n in names) + f"{'copy':>8s}  us")  # fmt: skip
    for num_reqs in TINY_NUM_REQS if args.tiny else NUM_REQS:
        for k in TINY_KS if args.tiny else KS:
            found = time_case(num_reqs, k, rng, floor, in_tree)
            results.append(found)
            times = [found["p50_us"].get(name, float("nan")) for name in names]
            print(f"{num_reqs:5d}{k:4d}" + "".join(f"{t:13.1f}" for t in times)
                  + f"{found['copy_us']:8.1f}", flush=True)  # fmt: skip
    record = {
        **machine(args.commit), "seed": SEED, "repeats": 50,
        "copy_bandwidth_gb_s": floor.bandwidth_gb_s, "cases": results,
    }  # fmt: skip
    print("saved", save("trim", record, args.out))


if __name__ == "__main__":
    main()
