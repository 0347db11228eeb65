"""How long the host takes to launch what a step adds; the GPU's time is left out.

    python bench/bench_host_launches.py [--out DIR] [--commit HASH] [--tiny]

`kept` launches as an engine does: what Triton compiled is launched without asking
Triton again. `ordinary` asks Triton in every step. `suffix` launches CUDA kernels and
knows no ordinary way. Batches come in new tensors in every step. The host runs ahead in
bursts shorter than the launch queue, and shorter than what `fill` may have under way;
between bursts it waits, which is not counted. With ``--tiny`` small cases run on the
CPU, where a launch also does the work.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import RESULTS, device, machine, save

from mrv2_spec.draft_values import DraftValues
from mrv2_spec.kernels import (
    count_drafts,
    fill_draft_budget,
    propose_ngram,
    value_drafts,
)
from mrv2_spec.kernels.launching import Launches
from mrv2_spec.suffix_memory import SuffixMemory, settings_for
from mrv2_spec.trimmer import VariableDraftTrimmer

SEED = 20261130
K, LENGTH, MODEL_LEN, CORPUS_TOKENS = 16, 1024, 4096, 1 << 20
NUM_REQS, CALLS = (1, 64, 256), 2000
TINY_NUM_REQS, TINY_CALLS = (3,), 8
# Calls between two waits.
BURST, FILL_BURST = 50, 3


class Steps:
    """What drafts for one batch size, and batches that are new tensors."""

    def __init__(self, num_reqs: int, rng: torch.Generator, tiny: bool) -> None:
        place = device()
        ints: dict[str, Any] = {"dtype": torch.int32, "device": place}
        model_len = 128 if tiny else MODEL_LEN
        length = 64 if tiny else LENGTH
        self.length, self.model_len = length, model_len
        self.rows = torch.randint(
            1000, (num_reqs, model_len), dtype=torch.int32, generator=rng
        ).to(place)
        self.total_len = torch.full((num_reqs,), length, **ints)
        self.prompt_len = torch.full((num_reqs,), length // 2, **ints)
        self.batches = [
            (
                torch.randperm(num_reqs, generator=rng).to(place),
                torch.ones(num_reqs, **ints),
            )
            for _ in range(4)
        ]
        self.step = 0
        num_classes = propose_ngram.NUM_CLASSES
        self.placeholders = torch.zeros(0, **ints)
        self.prior = torch.rand(num_classes, K, generator=rng).to(place)
        self.best = torch.zeros(num_reqs, dtype=torch.int64, device=place)
        self.arrivals = torch.zeros(num_reqs, **ints)
        self.drafts = torch.zeros(num_reqs, K, dtype=torch.int64, device=place)
        self.num_drafts = torch.zeros(num_reqs, **ints)
        self.chances = torch.zeros(num_reqs, K, device=place)
        self.values = DraftValues(num_reqs, K, num_classes, place)
        self.trimmer = VariableDraftTrimmer(
            self.num_drafts,
            torch.zeros(num_reqs + 1, **ints),
            max_num_reqs=num_reqs,
            max_total_logits=num_reqs * (K + 1),
            device=place,
        )
        self.sources = torch.zeros(num_reqs, **ints)
        # Each request verifies its K drafts.
        self.cu_num_logits = torch.arange(num_reqs + 1, **ints) * (K + 1)
        self.scheduled = np.full(num_reqs, K, dtype=np.int32)
        settings = settings_for(
            "learned",
            num_speculative_tokens=K,
            max_model_len=model_len,
            corpus_tokens=2048 if tiny else CORPUS_TOKENS,
            max_cached_requests=64,
        )
        self.memory = SuffixMemory(settings, num_reqs, place)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next batch: slots, and tokens sampled."""
        self.step += 1
        return self.batches[self.step % len(self.batches)]

    def ngram(self) -> None:
        """Draft n-grams."""
        idx_mapping, num_sampled = self.batch()
        assert self.values.classes is not None
        propose_ngram.propose_ngram(
            self.rows, idx_mapping, self.total_len, num_sampled, self.placeholders,
            self.prior, self.best, self.arrivals, self.drafts, self.num_drafts,
            self.chances, self.values.classes, max_total_len=self.length,
            max_model_len=self.model_len, num_steps=K, min_n=2, max_n=5, latest=True,
        )  # fmt: skip

    def value(self) -> None:
        """Learn from a step, and say what its drafts are worth."""
        idx_mapping, num_sampled = self.batch()
        self.values.update(
            self.rows, idx_mapping, self.total_len, num_sampled, self.drafts,
            self.num_drafts, self.chances,
        )  # fmt: skip

    def fill(self) -> None:
        """Lay out a batch by a budget of one draft a request."""
        idx_mapping, _ = self.batch()
        self.trimmer.fill(
            idx_mapping, self.scheduled, self.scheduled + 1, self.values.confidences,
            idx_mapping.shape[0],
        )  # fmt: skip

    def count(self) -> None:
        """Gather what a step did with the drafts."""
        idx_mapping, _ = self.batch()
        count_drafts.count_drafts(
            idx_mapping, self.cu_num_logits, self.num_drafts, self.sources
        )

    def suffix(self) -> None:
        """Remember a step and draft from the memory."""
        idx_mapping, num_sampled = self.batch()
        inputs = (
            self.rows, idx_mapping, self.total_len, self.prompt_len, num_sampled
        )  # fmt: skip
        self.memory.update(*inputs)
        self.memory.draft(
            *inputs, self.drafts, self.num_drafts, self.chances, num_steps=K
        )


def wait() -> None:
    """Let the GPU finish what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_us(call: Callable[[], None], calls: int, burst: int) -> float:
    """Return the host's time of a call in microseconds, the median of all bursts."""
    for _ in range(min(calls, 12)):
        call()
        wait()
    times = []
    for _ in range(max(1, calls // burst)):
        begun = time.perf_counter()
        for _ in range(burst):
            call()
        times.append((time.perf_counter() - begun) * 1e6 / burst)
        wait()
    return statistics.median(times)


@contextmanager
def triton_asked_every_time() -> Iterator[None]:
    """Keep nothing of what Triton compiled."""
    remember = Launches._remember
    modules = (propose_ngram, fill_draft_budget, value_drafts, count_drafts)
    for module in modules:
        module._launches.cache_clear()
    Launches._remember = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Launches._remember = remember  # type: ignore[method-assign]
        for module in modules:
            module._launches.cache_clear()


def time_case(num_reqs: int, rng: torch.Generator, tiny: bool) -> dict[str, Any]:
    """Time one batch size."""
    steps = Steps(num_reqs, rng, tiny)
    calls = TINY_CALLS if tiny else CALLS
    bursts = {
        "ngram": BURST,
        "value": BURST,
        "fill": FILL_BURST,
        "count": BURST,
        "suffix": BURST,
    }
    if tiny:
        bursts = dict.fromkeys(bursts, 1)

    def times(*names: str) -> dict[str, float]:
        return {
            name: host_us(getattr(steps, name), calls, bursts[name]) for name in names
        }

    with torch.inference_mode():
        kept = times("ngram", "value", "fill", "count", "suffix")
        with triton_asked_every_time():
            ordinary = times("ngram", "value", "fill", "count")
    return {"num_reqs": num_reqs, "kept_us": kept, "ordinary_us": ordinary}


def main() -> None:
    """Time every batch size and write ``host_launches.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    parser.add_argument("--tiny", action="store_true", help="small cases, on the CPU")
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("no GPU here: --tiny runs on the CPU")
    rng = torch.Generator().manual_seed(SEED)
    cases = []
    names = ("ngram", "value", "fill", "count", "suffix")
    print("host us a step, kept (ordinary)", flush=True)
    print(f"{'reqs':>5s}" + "".join(f"{name:>16s}" for name in names), flush=True)
    for num_reqs in TINY_NUM_REQS if args.tiny else NUM_REQS:
        case = time_case(num_reqs, rng, args.tiny)
        cases.append(case)
        cells = []
        for name in names:
            other = case["ordinary_us"].get(name)
            text = "" if other is None else f" ({other:.1f})"
            cells.append(f"{case['kept_us'][name]:.1f}{text}".rjust(16))
        print(f"{num_reqs:5d}" + "".join(cells), flush=True)
    record = {**machine(args.commit), "seed": SEED, "k": K, "cases": cases}
    print(save("host_launches", record, args.out))


if __name__ == "__main__":
    main()
