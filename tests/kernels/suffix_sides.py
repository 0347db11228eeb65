"""Two versions of suffix drafting on the same traffic, compared step by step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

import torch

from mrv2_spec.kernels import suffix_state as layout
from mrv2_spec.kernels.suffix_counts import CountRules, draft_by_counts
from mrv2_spec.kernels.suffix_draft import draft_suffix
from mrv2_spec.kernels.suffix_state import SuffixSettings, SuffixState, make_state
from mrv2_spec.kernels.suffix_update import update_suffix
from tests.kernels.suffix_batch import Traffic, entries, start_slots

GUARD = -77


@dataclass
class Outputs:
    """Output tensors with a guard row behind them."""

    drafts: torch.Tensor
    num_drafts: torch.Tensor
    confidences: torch.Tensor

    @classmethod
    def make(cls, reqs: int, k: int, device: torch.device | str) -> Outputs:
        return cls(
            torch.full((reqs + 1, k), GUARD, dtype=torch.int64, device=device),
            torch.full((reqs,), GUARD, dtype=torch.int32, device=device),
            torch.full((reqs + 1, k), float(GUARD), device=device),
        )

    def all(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.drafts, self.num_drafts, self.confidences


class Sides:
    """The tensor version and a CUDA version (on a GPU or on the host).

    Args:
        traffic: what to draft for.
        cuda: `CudaSuffix`.
        counts: `CudaCounts`, and its rules, to compare the reference's scoring too.
        device: where the CUDA version's tensors live.
        plain_device: where the tensor version runs.
    """

    def __init__(
        self,
        traffic: Traffic,
        cuda: Any,
        device: torch.device | str = "cpu",
        counts: Any = None,
        rules: CountRules | None = None,
        placeholders: tuple[int, ...] = (),
        plain_device: torch.device | str = "cpu",
    ) -> None:
        self.traffic = traffic
        self.cuda, self.counts, self.rules = cuda, counts, rules
        self.device = device
        self.plain_device = plain_device
        self.settings = traffic.settings
        reqs, k = traffic.max_num_reqs, self.settings.num_speculative_tokens
        self.plain = make_state(self.settings, reqs, plain_device)
        self.other = make_state(self.settings, reqs, device)
        self.outputs = [Outputs.make(reqs, k, d) for d in (plain_device, device)]
        self.placeholders = torch.tensor(placeholders, dtype=torch.int32)
        self.rows = 0  # that could draft so far
        # Drafts so far, and those of the reference's scoring, by source.
        self.sources, self.count_sources = Counter[int](), Counter[int]()

    def step(self, num_steps: int) -> int:
        """Run and compare one step; return the tokens drafted."""
        t, device = self.traffic, self.device
        idx_mapping, num_sampled = t.step()
        self.rows += int((num_sampled > 0).sum())
        start_slots(self.plain, t)
        start_slots(self.other, t)
        self.plain.draft_sources.fill_(GUARD)
        self.other.draft_sources.fill_(GUARD)
        batch = (t.rows, idx_mapping, t.total, t.prompt, num_sampled)
        inputs = tuple(x.to(self.plain_device) for x in batch)
        there = tuple(x.to(device) for x in batch)
        mine, theirs = (o.all() for o in self.outputs)
        update_suffix(self.plain, self.settings, *inputs)
        self.cuda.update(self.other, *there)
        same_state(self.settings, self.plain, self.other, pending=False)
        if self.counts is not None:
            assert self.rules is not None
            rows = (inputs[0], inputs[1], inputs[2], inputs[4])
            draft_by_counts(
                self.plain, self.settings, self.rules, *rows, *mine, num_steps=num_steps
            )
            rows = (there[0], there[1], there[2], there[4])
            self.counts.draft(self.other, *rows, *theirs, num_steps=num_steps)
            self.count_sources += self.same_outputs(idx_mapping)
        ids = self.placeholders.to(self.plain_device)
        draft_suffix(
            self.plain, self.settings, *inputs, ids, *mine, num_steps=num_steps
        )
        self.cuda.draft(
            self.other, *there, ids.to(device), *theirs, num_steps=num_steps
        )
        self.sources += self.same_outputs(idx_mapping)
        same_state(self.settings, self.plain, self.other, pending=True)
        return int(self.outputs[0].num_drafts.cpu()[idx_mapping].sum())

    def same_outputs(self, idx_mapping: torch.Tensor) -> Counter[int]:
        """Compare what both published; return the drafts by source."""
        mine, theirs = (o.all() for o in self.outputs)
        for a, b in zip(mine, theirs, strict=True):
            there = b.to(a.device)
            assert torch.equal(a, there), (a, there)
        assert (mine[0][-1] == GUARD).all() and (mine[2][-1] == GUARD).all()
        sources, theirs_too = (s.draft_sources.cpu() for s in (self.plain, self.other))
        assert torch.equal(sources, theirs_too)
        drafted = mine[1].cpu() > 0
        written = torch.zeros_like(drafted)
        written[idx_mapping] = True
        assert torch.equal(sources != GUARD, written)
        assert (sources[written & ~drafted] == layout.OWN).all()
        return Counter(sources[written & drafted].tolist())


def same_state(
    settings: SuffixSettings, mine: SuffixState, theirs: SuffixState, pending: bool
) -> None:
    """Raise unless both states say the same."""
    a, b = mine, theirs
    if a.tokens.device != b.tokens.device:
        a, b = (
            SuffixState(*(getattr(state, f.name).cpu() for f in fields(SuffixState)))
            for state in (mine, theirs)
        )
    device = a.tokens.device
    live = a.pages[:, layout.PAGE_SEQ] >= 0
    assert torch.equal(live, b.pages[:, layout.PAGE_SEQ] >= 0)
    used = slice(layout.PAGE_SEQ, layout.PAGE_NEXT + 1)
    assert torch.equal(a.pages[live, used], b.pages[live, used])
    length = a.pages[:, layout.PAGE_LEN, None]
    offset = torch.arange(a.tokens.shape[1], device=device)
    written = live[:, None] & (offset < length)
    assert torch.equal(a.tokens[written], b.tokens[written])
    for name in ("counters", "slots", "learned", "steering", "draft_sources"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    if not pending:
        # Drafting does not change them.
        assert torch.equal(entries(a, settings), entries(b, settings))
        return
    num = torch.where(
        a.slots[:, layout.DRAFT_LEN] >= 0, a.slots[:, layout.DRAFT_NUM], 0
    )
    step = torch.arange(a.pending_tokens.shape[1], device=device)
    made = step < num[:, None]
    assert torch.equal(a.pending_tokens[made], b.pending_tokens[made])
    bins = a.pending_bins[made]
    assert torch.equal(bins, b.pending_bins[made])
    some = bins >= 0
    predicted = b.pending_predicted[made][some]
    assert torch.equal(a.pending_predicted[made][some], predicted)
