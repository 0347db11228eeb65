"""How long suffix drafting takes on the GPU: the whole propose step with its memory.

    python bench/bench_suffix.py [--out DIR] [--commit HASH]

Each launch learns from the last draft, appends NEW tokens a request to a full memory
and drafts, on another set of rows than the launch before. Every case is checked against
the tensor version first. A tiny launch that makes the tokens new again is counted in.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, gpu_time_us, machine, save

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
CUDA = torch.device("cuda:0")
CASES = [
    {"num_reqs": num_reqs, "row_len": row_len, "text": text}
    for text in ("prose", "template", "loop")
    for num_reqs, row_len in (
        (1, 4096),
        (16, 4096),
        (64, 4096),
        (256, 1024),
        (256, 4096),
    )
]


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

    def __init__(self, case: dict[str, Any], rng: torch.Generator) -> None:
        reqs, width = case["num_reqs"], case["row_len"]
        self.settings = SuffixSettings(max_model_len=width + 64)
        self.cuda = CudaSuffix(self.settings, 256, CUDA)
        self.state = make_state(self.settings, 256, CUDA)
        self.fill(case["text"], rng)
        self.sets = [
            text(case["text"], (reqs, width), rng).to(CUDA)
            for _ in range(NUM_INPUT_SETS)
        ]
        self.mapping = torch.randperm(reqs, generator=rng).to(CUDA)
        self.total = torch.full((reqs,), width, dtype=torch.int32, device=CUDA)
        self.prompt = torch.full_like(self.total, width // 2)
        self.sampled = torch.full_like(self.total, NEW)
        self.ids = torch.empty(0, dtype=torch.int32, device=CUDA)
        self.drafts = torch.zeros(256, K, dtype=torch.int64, device=CUDA)
        self.num_drafts = torch.zeros(256, dtype=torch.int32, device=CUDA)
        self.confidences = torch.zeros(256, K, device=CUDA)
        for slot in range(reqs):
            fields = [*layout.new_slot(100000 + slot, 0, 3, 100000 + slot)]
            fields[layout.COMMITTED] = width - NEW
            self.state.slots[slot] = torch.tensor(fields, dtype=torch.int32)
        self.again = torch.zeros(1, layout.NUM_SLOT_FIELDS, dtype=torch.int32)
        self.again[0, layout.COMMITTED] = self.again[0, layout.DRAFT_LEN] = NEW
        self.again = self.again.to(CUDA)

    def fill(self, kind: str, rng: torch.Generator) -> None:
        """Fill the whole ring with responses of 256 requests at a time."""
        one = torch.ones(256, dtype=torch.int32, device=CUDA)
        mapping = torch.arange(256, device=CUDA)
        uid = 0
        while int(self.state.counters[layout.NEXT_PAGE]) < self.settings.num_pages:
            rows = text(kind, (256, 1024), rng).to(CUDA)
            slots = torch.tensor(layout.NEW_SLOT, dtype=torch.int32).repeat(256, 1)
            slots[:, layout.UID] = torch.arange(uid, uid + 256)
            slots[:, layout.NUMBER] = slots[:, layout.UID]
            slots[:, layout.FLAGS] = 3
            self.state.slots.copy_(slots)
            uid += 256
            for total in range(64, 1025, 64):
                self.cuda.update(self.state, rows, mapping, one * total, one * 0, one)

    def inputs(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return rows, self.mapping, self.total, self.prompt, self.sampled

    def outputs(self) -> tuple[torch.Tensor, ...]:
        return self.drafts, self.num_drafts, self.confidences

    def propose(self, rows: torch.Tensor) -> None:
        """Make the last NEW tokens new again, update, draft."""
        self.state.slots.sub_(self.again)
        self.cuda.update(self.state, *self.inputs(rows))
        self.cuda.draft(
            self.state, *self.inputs(rows), self.ids, *self.outputs(), num_steps=K
        )

    def draft(self, rows: torch.Tensor) -> None:
        """Draft alone."""
        self.cuda.draft(
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
            self.cuda.update(self.state, *few)
            self.cuda.draft(self.state, *few, self.ids, *self.outputs(), num_steps=K)
            update_suffix(copy, self.settings, *few)
            draft_suffix(copy, self.settings, *few, self.ids, *expected, num_steps=K)
            num = min(8, rows.shape[0])
            for got, want in zip(self.outputs(), expected, strict=True):
                if got.dim() == 2 and not torch.equal(got[:num], want[:num]):
                    raise SystemExit("the CUDA version differs from the tensor version")
        return float(self.num_drafts[self.mapping[:8]].float().mean())


FIELDS = list(SuffixState.__dataclass_fields__)


def main() -> None:
    """Time every case and write ``suffix.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    args = parser.parse_args()
    rng = torch.Generator().manual_seed(SEED)
    results = []
    print(f"{'text':9s}{'reqs':>5s}{'row':>6s}{'step p50':>12s}{'p20':>7s}{'p80':>7s}"
          f"{'draft p50':>10s}{'drafted':>9s}{'MiB':>7s}  us")  # fmt: skip
    for case in CASES:
        run = Case(case, rng)
        drafted = run.check()
        whole = gpu_time_us([partial(run.propose, s) for s in run.sets])
        alone = gpu_time_us([partial(run.draft, s) for s in run.sets])
        mib = run.state.nbytes() / 2**20
        results.append(
            {
                **case, "k": K, "new_tokens": NEW, "drafted_per_row": drafted,
                "corpus_tokens": run.settings.corpus_tokens, "state_mib": mib,
                "propose_us": dict(zip(("p20", "p50", "p80"), whole, strict=True)),
                "draft_us": dict(zip(("p20", "p50", "p80"), alone, strict=True)),
            }
        )  # fmt: skip
        print(f"{case['text']:9s}{case['num_reqs']:5d}{case['row_len']:6d}"
              f"{whole[1]:12.1f}{whole[0]:7.1f}{whole[2]:7.1f}{alone[1]:10.1f}"
              f"{drafted:9.2f}{mib:7.1f}", flush=True)  # fmt: skip
        if case["num_reqs"] == 256 and case["text"] == "prose":
            results[-1]["reference_us"] = reference_time(run)
        del run
    record = {**machine(args.commit), "seed": SEED, "repeats": 50, "cases": results}
    print("saved", save("suffix", record, args.out))


def reference_time(run: Case) -> float:
    """Return the time of the reference's scoring over the same rows and memory."""
    counts = CudaCounts(run.settings, CountRules(), 256, CUDA)

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
