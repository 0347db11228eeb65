"""How long suffix drafting takes on the GPU: the whole propose step with its memory.

    python bench/bench_suffix.py [--out DIR] [--commit HASH] [--tiny]

Each launch learns from the last draft, appends NEW tokens a request to a full memory
and drafts, on another set of rows than the launch before. Every case is checked against
the tensor version first. A tiny launch that makes the tokens new again is counted in.
The floor is the time of reading the rows once at the bandwidth of a large copy,
measured in the same run. With ``--tiny`` the tensor version runs small cases on the
CPU, to see that the script works.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, Floor, device, gpu_time_us, machine, save

from mrv2_spec.kernels import suffix_state as layout
from mrv2_spec.kernels.suffix_counts import CountRules
from mrv2_spec.kernels.suffix_cuda import CudaCounts, CudaSuffix
from mrv2_spec.kernels.suffix_draft import draft_suffix
from mrv2_spec.kernels.suffix_state import SuffixSettings, SuffixState, make_state
from mrv2_spec.kernels.suffix_update import update_suffix

SEED = 20261129
K = 16
NEW = 3
NUM_INPUT_SETS = 4
# Request slots, and requests that fill the memory at a time.
SLOTS, FILLING = 512, 256
SIZES = (
    (1, 4096),
    (16, 4096),
    (64, 4096),
    (256, 1024),
    (256, 4096),
    (512, 4096),
    (1, 32768),
    (64, 32768),
)
TINY_SIZES = ((2, 256),)


class TensorSuffix:
    """The tensor version behind the interface of the CUDA one."""

    def __init__(self, settings: SuffixSettings) -> None:
        self.settings = settings

    def update(self, state: SuffixState, *inputs: torch.Tensor) -> None:
        """Append what the rows gained."""
        update_suffix(state, self.settings, *inputs)

    def draft(self, state: SuffixState, *args: torch.Tensor, num_steps: int) -> None:
        """Draft for the batch."""
        draft_suffix(state, self.settings, *args, num_steps=num_steps)


def text(kind: str, shape: tuple[int, int], rng: torch.Generator) -> torch.Tensor:
    """Return rows of tokens.

    ``prose``: Zipf-like, so that the last token occurs often and long matches are rare;
    ``template``: pieces of 64 shared texts with one token in 16 changed; ``loop``: a
    period of 7, where every place matches.
    """
    if kind == "loop":
        return (torch.arange(shape[1]) % 7 + 10).expand(shape).int().clone()
    zipf = (torch.rand(shape, generator=rng) * 10.8).exp().long().clamp(max=49000)
    if kind == "prose":
        return zipf.int()
    pieces = torch.randint(49000, (64, 128), generator=rng)
    which = torch.randint(64, (shape[0], shape[1] // 128), generator=rng)
    rows = pieces[which].flatten(1)
    changed = torch.rand(shape, generator=rng) < 1 / 16
    return torch.where(changed, zipf, rows).int()


class Case:
    """Rows, a full memory and the launches of one case."""

    def __init__(self, case: dict[str, Any], rng: torch.Generator, tiny: bool) -> None:
        reqs, width = case["num_reqs"], case["row_len"]
        self.place = device()
        self.filling = 4 if tiny else FILLING
        small = {"corpus_tokens": 2**12, "num_buckets": 2**8} if tiny else {}
        self.settings = SuffixSettings(max_model_len=width + 64, **small)
        self.kernels: Any = TensorSuffix(self.settings)
        if self.place.type == "cuda":
            self.kernels = CudaSuffix(self.settings, SLOTS, self.place)
        self.state = make_state(self.settings, SLOTS, self.place)
        self.fill(case["text"], rng)
        self.sets = [
            text(case["text"], (reqs, width), rng).to(self.place)
            for _ in range(2 if tiny else NUM_INPUT_SETS)
        ]
        self.mapping = torch.randperm(reqs, generator=rng).to(self.place)
        self.total = torch.full((reqs,), width, dtype=torch.int32, device=self.place)
        self.prompt = torch.full_like(self.total, width // 2)
        self.sampled = torch.full_like(self.total, NEW)
        self.ids = torch.empty(0, dtype=torch.int32, device=self.place)
        self.drafts = torch.zeros(SLOTS, K, dtype=torch.int64, device=self.place)
        self.num_drafts = torch.zeros(SLOTS, dtype=torch.int32, device=self.place)
        self.confidences = torch.zeros(SLOTS, K, device=self.place)
        for slot in range(reqs):
            fields = [*layout.new_slot(100000 + slot, 0, 3, 100000 + slot)]
            fields[layout.COMMITTED] = width - NEW
            self.state.slots[slot] = torch.tensor(fields, dtype=torch.int32)
        self.again = torch.zeros(1, layout.NUM_SLOT_FIELDS, dtype=torch.int32)
        self.again[0, layout.COMMITTED] = self.again[0, layout.DRAFT_LEN] = NEW
        self.again = self.again.to(self.place)

    def fill(self, kind: str, rng: torch.Generator) -> None:
        """Fill the whole ring with responses of many requests at a time."""
        one = torch.ones(self.filling, dtype=torch.int32, device=self.place)
        mapping = torch.arange(self.filling, device=self.place)
        uid = 0
        while int(self.state.counters[layout.NEXT_PAGE]) < self.settings.num_pages:
            rows = text(kind, (self.filling, 1024), rng).to(self.place)
            slots = torch.tensor(layout.NEW_SLOT, dtype=torch.int32).repeat(
                self.filling, 1
            )
            slots[:, layout.UID] = torch.arange(uid, uid + self.filling)
            slots[:, layout.NUMBER] = slots[:, layout.UID]
            slots[:, layout.FLAGS] = 3
            self.state.slots[: self.filling].copy_(slots)
            uid += self.filling
            for total in range(64, 1025, 64):
                self.kernels.update(
                    self.state, rows, mapping, one * total, one * 0, one
                )

    def inputs(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rows, self.mapping, self.total, self.prompt, self.sampled

    def outputs(self) -> tuple[torch.Tensor, ...]:
        return self.drafts, self.num_drafts, self.confidences

    def propose(self, rows: torch.Tensor) -> None:
        """Make the last NEW tokens new again, update, draft."""
        self.state.slots.sub_(self.again)
        self.kernels.update(self.state, *self.inputs(rows))
        self.kernels.draft(
            self.state, *self.inputs(rows), self.ids, *self.outputs(), num_steps=K
        )

    def draft(self, rows: torch.Tensor) -> None:
        """Draft alone."""
        self.kernels.draft(
            self.state, *self.inputs(rows), self.ids, *self.outputs(), num_steps=K
        )

    def check(self) -> float:
        """Compare 8 rows with the tensor version; return the tokens drafted a row."""
        copy = SuffixState(*(getattr(self.state, f).clone() for f in FIELDS))
        for rows in self.sets[:2]:
            few = (rows, self.mapping[:8], self.total, self.prompt, self.sampled[:8])
            expected = tuple(torch.zeros_like(x) for x in self.outputs())
            self.state.slots.sub_(self.again)
            copy.slots.sub_(self.again)
            self.kernels.update(self.state, *few)
            self.kernels.draft(self.state, *few, self.ids, *self.outputs(), num_steps=K)
            update_suffix(copy, self.settings, *few)
            draft_suffix(copy, self.settings, *few, self.ids, *expected, num_steps=K)
            num = min(8, rows.shape[0])
            for got, want in zip(self.outputs(), expected, strict=True):
                if got.dim() == 2 and not torch.equal(got[:num], want[:num]):
                    raise SystemExit("the kernels differ from the tensor version")
        return float(self.num_drafts[self.mapping[:8]].float().mean())


FIELDS = list(SuffixState.__dataclass_fields__)


def main() -> None:
    """Time every case and write ``suffix.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    parser.add_argument("--tiny", action="store_true", help="small cases, on the CPU")
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("no GPU here: --tiny runs on the CPU")
    cases = [
        {"num_reqs": num_reqs, "row_len": row_len, "text": text}
        for text in ("prose", "template", "loop")
        for num_reqs, row_len in (TINY_SIZES if args.tiny else SIZES)
    ]
    rng = torch.Generator().manual_seed(SEED)
    floor = Floor()
    results = []
    print(f"{'text':9s}{'reqs':>5s}{'row':>6s}{'step p50':>12s}{'p20':>7s}{'p80':>7s}"
          f"{'draft p50':>10s}{'drafted':>9s}{'MiB':>7s}{'floor':>7s}  us")  # fmt: skip
    for case in cases:
        run = Case(case, rng, args.tiny)
        drafted = run.check()
        whole = gpu_time_us([partial(run.propose, s) for s in run.sets])
        alone = gpu_time_us([partial(run.draft, s) for s in run.sets])
        mib = run.state.nbytes() / 2**20
        read_us = floor.us(case["num_reqs"] * case["row_len"] * 4)
        results.append(
            {
                **case, "k": K, "new_tokens": NEW, "drafted_per_row": drafted,
                "corpus_tokens": run.settings.corpus_tokens, "state_mib": mib,
                "read_floor_us": read_us,
                "propose_us": dict(zip(("p20", "p50", "p80"), whole, strict=True)),
                "draft_us": dict(zip(("p20", "p50", "p80"), alone, strict=True)),
            }
        )  # fmt: skip
        print(f"{case['text']:9s}{case['num_reqs']:5d}{case['row_len']:6d}"
              f"{whole[1]:12.1f}{whole[0]:7.1f}{whole[2]:7.1f}{alone[1]:10.1f}"
              f"{drafted:9.2f}{mib:7.1f}{read_us:7.1f}", flush=True)  # fmt: skip
        if case["num_reqs"] == 256 and case["text"] == "prose" and not args.tiny:
            results[-1]["reference_us"] = reference_time(run)
        del run
    record = {
        **machine(args.commit), "seed": SEED, "repeats": 50,
        "copy_bandwidth_gb_s": floor.bandwidth_gb_s, "cases": results,
    }  # fmt: skip
    print("saved", save("suffix", record, args.out))


def reference_time(run: Case) -> float:
    """Return the time of the reference's scoring over the same rows and memory."""
    counts = CudaCounts(run.settings, CountRules(), SLOTS, run.place)

    def launch(rows: torch.Tensor) -> None:
        counts.draft(
            run.state,
            rows,
            run.mapping,
            run.total,
            run.sampled,
            *run.outputs(),
            num_steps=K,
        )

    p50 = gpu_time_us([partial(launch, s) for s in run.sets], repeats=10)[1]
    print(
        f"  reference scoring, all {run.settings.corpus_tokens} tokens read: {p50:.0f}"
    )
    return p50


if __name__ == "__main__":
    main()
