"""A batch of rows for the n-gram kernel, with guards round all that it may write."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mrv2_spec.kernels.propose_ngram import (
    NUM_CLASSES,
    match_class_ref,
    propose_ngram,
    propose_ngram_ref,
)

# What rows hold past their total length, and what outputs hold before a launch.
POISON = 0x7FFFFFFF
SENTINEL = -77
GUARD = 8


def random_row(rng: random.Random, length: int, alphabet: int) -> list[int]:
    """Return a row that is repetitive now and then."""
    row: list[int] = []
    while len(row) < length:
        if row and rng.random() < 0.3:
            start = rng.randrange(len(row))
            row += row[start : start + rng.randrange(1, 12)]
        else:
            row.append(rng.randrange(alphabet))
    return row[:length]


@dataclass
class Batch:
    """Rows in scattered slots and the buffers of repeated launches over them."""

    contexts: Sequence[Sequence[int]]
    device: torch.device
    num_slots: int = 5
    min_n: int = 2
    max_n: int = 4
    max_model_len: int = 4096
    latest: bool = False
    placeholder_ids: Sequence[int] = ()
    slots: Sequence[int] | None = None
    num_sampled: Sequence[int] | None = None
    # What the grid is sized for; the longest row that sampled, by default.
    max_total_len: int | None = None

    def __post_init__(self) -> None:
        num_reqs = len(self.contexts)
        if self.slots is None:
            self.slots = range(num_reqs)
        if self.num_sampled is None:
            self.num_sampled = [1] * num_reqs
        self.max_num_reqs = max(self.slots, default=0) + 2
        width = max(map(len, self.contexts), default=0) + GUARD
        rows = torch.full((self.max_num_reqs, width), POISON, dtype=torch.int32)
        total_len = torch.full((self.max_num_reqs,), width, dtype=torch.int32)
        for slot, context in zip(self.slots, self.contexts, strict=True):
            rows[slot, : len(context)] = torch.tensor(context, dtype=torch.int32)
            total_len[slot] = len(context)
        self.rows = rows.to(self.device)
        self.total_len = total_len.to(self.device)
        shape = (NUM_CLASSES, self.num_slots)
        self.prior = torch.rand(shape, device=self.device).clamp(0.01, 0.99)
        size = num_reqs + GUARD
        self.best = torch.zeros(size, dtype=torch.int64, device=self.device)
        self.arrivals = torch.zeros(size, dtype=torch.int32, device=self.device)
        shape = (size, self.num_slots)
        self.drafts = torch.full(shape, SENTINEL, device=self.device)
        self.confidences = torch.full(shape, float(SENTINEL), device=self.device)
        self.num_drafts = torch.full(
            (self.max_num_reqs,), SENTINEL, dtype=torch.int32, device=self.device
        )
        self.classes = self.num_drafts.clone()

    def launch(self, num_steps: int | None = None) -> list[list[int]]:
        """Draft for all rows; check all that was written but for the drafts.

        Returns:
            The real drafts, in batch order.
        """
        assert self.slots is not None and self.num_sampled is not None
        pairs = zip(self.contexts, self.num_sampled, strict=True)
        longest = max((len(c) for c, sampled in pairs if sampled), default=0)
        ints = {"dtype": torch.int32, "device": self.device}
        propose_ngram(
            self.rows,
            torch.tensor(self.slots, dtype=torch.int64, device=self.device),
            self.total_len,
            torch.tensor(self.num_sampled, **ints),
            torch.tensor(self.placeholder_ids, **ints),
            self.prior,
            self.best,
            self.arrivals,
            self.drafts,
            self.num_drafts,
            self.confidences,
            self.classes,
            max_total_len=max(self.max_total_len or longest, 1),
            max_model_len=self.max_model_len,
            num_steps=self.num_slots if num_steps is None else num_steps,
            min_n=self.min_n,
            max_n=self.max_n,
            latest=self.latest,
        )
        num_reqs = len(self.contexts)
        assert not self.best.any() and not self.arrivals.any(), "scratch is left over"
        assert (self.drafts[num_reqs:] == SENTINEL).all()
        assert (self.confidences[num_reqs:] == SENTINEL).all()
        others = sorted(set(range(self.max_num_reqs)) - set(self.slots))
        assert (self.num_drafts[others] == SENTINEL).all()
        assert (self.classes[others] == SENTINEL).all()

        widths = self.num_drafts[list(self.slots)].tolist()
        drafts = self.drafts[:num_reqs].tolist()
        for context, width, draft in zip(self.contexts, widths, drafts, strict=True):
            assert 0 <= width <= self.num_slots
            last = context[-1] if context else 0
            assert draft[width:] == [last] * (self.num_slots - width)
        return [draft[:width] for draft, width in zip(drafts, widths, strict=True)]

    def expected(self, num_steps: int | None = None) -> list[tuple[list[int], int]]:
        """Return the reference's drafts and match lengths, in batch order."""
        assert self.num_sampled is not None
        return [
            propose_ngram_ref(
                list(context),
                num_steps=self.num_slots if num_steps is None else num_steps,
                min_n=self.min_n,
                max_n=self.max_n,
                max_model_len=self.max_model_len,
                latest=self.latest,
                placeholder_ids=frozenset(self.placeholder_ids),
            )
            if sampled
            else ([], 0)
            for context, sampled in zip(self.contexts, self.num_sampled, strict=True)
        ]

    def check(self, num_steps: int | None = None) -> None:
        """Launch and compare drafts and confidences with the reference."""
        want = self.expected(num_steps)
        assert self.launch(num_steps) == [draft for draft, _ in want]
        assert self.slots is not None
        for i, (draft, match_len) in enumerate(want):
            found = int(self.classes[self.slots[i]])
            # With no place to fill nothing is looked for.
            match_len = 0 if num_steps == 0 else match_len
            assert found == self.expected_class(i, match_len), self.contexts[i]
            confidences = torch.zeros(self.num_slots, device=self.device)
            confidences[: len(draft)] = self.prior[found, : len(draft)]
            assert torch.equal(self.confidences[i], confidences)

    def expected_class(self, i: int, match_len: int) -> int:
        """Return the class of a match, given where the reference's rule finds it."""
        if match_len == 0:
            return 0
        context = list(self.contexts[i])
        suffix = context[len(context) - match_len :]
        ends = [
            end
            for end in range(match_len, len(context))
            if context[end - match_len : end] == suffix
        ]
        return match_class_ref(context, ends[-1] if self.latest else ends[0])
