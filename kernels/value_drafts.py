"""Learn how often drafts come true, and tally what the new ones are worth.

One launch a step. Each program takes one request. It first compares the tokens that
the step emitted with the draft it holds for the request, whether that was verified or
not, and books which draft places came true. Then it takes in the draft just made:
the chance of each place goes to the request's slot, and the chance that all places up
to it come true, its *value*, is tallied.

Counts change by integer additions only, so the order of the programs does not matter
and all ranks agree.
"""

import math
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

# Values are told apart by powers of 2 ** -0.25, down to a 256th; the last bin holds
# what is below.
NUM_BINS = 32
BIN_STEPS_PER_OCTAVE = 4
# A tally: the bins, then the rounds that they were collected in, and the tokens that
# these emitted.
ROUNDS, TOKENS = NUM_BINS, NUM_BINS + 1
TALLY_WIDTH = NUM_BINS + 2


def bin_edges() -> list[float]:
    """Return the lower edge of every bin but the last, falling."""
    return [2.0 ** (-(i + 1) / BIN_STEPS_PER_OCTAVE) for i in range(NUM_BINS - 1)]


@triton.jit
def _value_drafts_kernel(
    token_ids_ptr,  # *int32 [max_num_reqs, max_model_len]
    token_ids_stride,
    idx_mapping_ptr,  # *int64 [num_reqs], batch_idx -> req_state_idx
    total_len_ptr,  # *int32 [max_num_reqs]
    num_sampled_ptr,  # *int32 [num_reqs]
    drafts_ptr,  # *int64 [num_reqs, K]
    num_drafts_ptr,  # *int32 [max_num_reqs]
    confidences_ptr,  # *float32 [num_reqs, K]
    classes_ptr,  # *int32 [max_num_reqs]
    edges_ptr,  # *float32 [NUM_BINS]
    counts_ptr,  # *int32 [2, NUM_CLASSES, K] (in and out)
    held_tokens_ptr,  # *int32 [max_num_reqs, K] (in and out)
    held_ptr,  # *int32 [max_num_reqs, 4] (in and out)
    slot_confidences_ptr,  # *float32 [max_num_reqs, K] (output)
    tally_ptr,  # *int32 [2, TALLY_WIDTH] (in and out)
    next_tally_ptr,  # *int32 [2, TALLY_WIDTH] (output)
    HOLD: tl.constexpr,
    NUM_CLASSES: tl.constexpr,
    K: tl.constexpr,
    K_PO2: tl.constexpr,
    NUM_BINS: tl.constexpr,
    TALLY_PO2: tl.constexpr,
):
    batch_idx = tl.program_id(0).to(tl.int64)
    if batch_idx == 0:
        t = tl.arange(0, TALLY_PO2)
        tl.store(next_tally_ptr + t, 0, mask=t < 2 * (NUM_BINS + 2))
    slot = tl.load(idx_mapping_ptr + batch_idx).to(tl.int64)
    num_sampled = tl.load(num_sampled_ptr + batch_idx)
    k = tl.arange(0, K_PO2)

    # What the step emitted, beside the draft held for the request.
    total_len = tl.load(total_len_ptr + slot)
    emitted_at = total_len - num_sampled
    length = tl.load(held_ptr + slot * 4)
    seen = tl.load(held_ptr + slot * 4 + 1)
    at = tl.load(held_ptr + slot * 4 + 2)
    held_class = tl.load(held_ptr + slot * 4 + 3)
    # Another request's draft, or one whose next token was not looked at.
    length = tl.where(at + seen == emitted_at, length, 0)
    now = tl.minimum(num_sampled, length - seen)
    emitted = tl.load(
        token_ids_ptr + slot * token_ids_stride + emitted_at + k, mask=k < now, other=-1
    )
    held = tl.load(held_tokens_ptr + slot * K + seen + k, mask=k < now, other=-1)
    wrong = (k < now) & (emitted != held)
    first_wrong = tl.min(tl.where(wrong, k, K_PO2), axis=0)
    num_right = tl.minimum(first_wrong, now)
    if NUM_CLASSES > 0:
        cell = counts_ptr + held_class * K + seen + k
        tl.atomic_add(cell, 1, mask=(k < now) & (k <= first_wrong), sem="relaxed")
        tl.atomic_add(cell + NUM_CLASSES * K, 1, mask=k < num_right, sem="relaxed")

    # The draft just made.
    num_drafts = tl.load(num_drafts_ptr + slot)
    num_drafts = tl.where(num_sampled > 0, tl.minimum(tl.maximum(num_drafts, 0), K), 0)
    is_draft = k < num_drafts
    confidence = tl.load(confidences_ptr + batch_idx * K + k, mask=is_draft, other=0.0)
    # A drafter may publish anything: NaN counts as no chance, the rest is clamped.
    confidence = tl.where(confidence == confidence, confidence, 0.0)
    confidence = tl.minimum(tl.maximum(confidence, 0.0), 1.0)
    tl.store(slot_confidences_ptr + slot * K + k, confidence, mask=k < K)
    value = tl.cumprod(confidence, axis=0)
    edge = tl.load(edges_ptr + tl.arange(0, NUM_BINS))
    which = tl.sum((value[:, None] < edge[None, :]).to(tl.int32), axis=1)
    tl.atomic_add(tally_ptr + which, 1, mask=is_draft, sem="relaxed")
    sampled = num_sampled > 0
    tl.atomic_add(tally_ptr + NUM_BINS, sampled.to(tl.int32), sem="relaxed")
    tl.atomic_add(tally_ptr + NUM_BINS + 1, num_sampled, sem="relaxed")

    # A held draft stays until it is wrong or used up: what would have been drafted
    # anew had its right tokens been taken all at once.
    fresh = sampled & ((seen + now >= length) | (first_wrong < now) | (not HOLD))
    fresh_tally_ptr = tally_ptr + NUM_BINS + 2
    tl.atomic_add(
        fresh_tally_ptr + which,
        1,
        mask=k < tl.where(fresh, num_drafts, 0),
        sem="relaxed",
    )
    tl.atomic_add(fresh_tally_ptr + NUM_BINS, fresh.to(tl.int32), sem="relaxed")
    emitted_here = tl.where(fresh, num_sampled, 0)
    tl.atomic_add(fresh_tally_ptr + NUM_BINS + 1, emitted_here, sem="relaxed")
    if fresh:
        tokens = tl.load(drafts_ptr + batch_idx * K + k, mask=is_draft, other=-1)
        tl.store(held_tokens_ptr + slot * K + k, tokens.to(tl.int32), mask=is_draft)
        tl.store(held_ptr + slot * 4, num_drafts)
        tl.store(held_ptr + slot * 4 + 1, 0)
        tl.store(held_ptr + slot * 4 + 2, total_len)
        if NUM_CLASSES > 0:
            tl.store(held_ptr + slot * 4 + 3, tl.load(classes_ptr + slot))
    elif sampled:
        tl.store(held_ptr + slot * 4 + 1, seen + now)


def value_drafts(
    token_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    total_len: torch.Tensor,
    num_sampled: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    confidences: torch.Tensor,
    classes: torch.Tensor | None,
    edges: torch.Tensor,
    counts: torch.Tensor | None,
    held_tokens: torch.Tensor,
    held: torch.Tensor,
    slot_confidences: torch.Tensor,
    tally: torch.Tensor,
    next_tally: torch.Tensor,
    *,
    hold: bool,
) -> None:
    """Book the drafts that the step's tokens decide, and take in the new ones.

    Args:
        token_ids: [max_num_reqs, >= max_model_len] int32, rows of known tokens.
        idx_mapping: [num_reqs] int64, request slot of each batch entry.
        total_len: [max_num_reqs] int32, after the step.
        num_sampled: [num_reqs] int32, tokens the step emitted, 0 inside a prefill.
        drafts: [>= num_reqs, K] int64, just made.
        num_drafts: [max_num_reqs] int32 by slot, the leading drafts that are real;
            clamped to 0..K.
        confidences: [>= num_reqs, K] float32, the chance that the target accepts a
            place given those before it; clamped, NaN counts as 0.
        classes: [max_num_reqs] int32 by slot, the row of ``counts`` that a draft is
            booked in, or None to book nothing.
        edges: [NUM_BINS] float32, :func:`bin_edges` and 0.
        counts: [2, classes, K] int32 (in and out): how often a place was decided, and
            how often it came true; None with ``classes``.
        held_tokens: [max_num_reqs, K] int32 (in and out), the draft of each slot.
        held: [max_num_reqs, 4] int32 (in and out): its length, how many of its tokens
            were decided, where in the row it begins, its class.
        slot_confidences: [max_num_reqs, K] float32 (output), by slot.
        tally: [2, TALLY_WIDTH] int32 (in and out), zero before: draft places by value
            and, last, rounds and the tokens that these emitted; first all, then those
            of drafts that were taken to be held.
        next_tally: [2, TALLY_WIDTH] int32 (output), zeroed for the next step.
        hold: keep a draft until it is decided whole, though a newer one was made.
    """
    num_reqs = idx_mapping.shape[0]
    if num_reqs == 0:
        return
    num_slots = confidences.shape[1]
    assert drafts.dtype == torch.int64 and drafts.stride() == (num_slots, 1)
    assert confidences.stride() == (num_slots, 1)
    assert held.shape[1] == 4 and held_tokens.shape[1] == num_slots
    assert (classes is None) == (counts is None)
    num_classes = 0 if counts is None else counts.shape[1]
    _value_drafts_kernel[(num_reqs,)](
        token_ids,
        token_ids.stride(0),
        idx_mapping,
        total_len,
        num_sampled,
        drafts,
        num_drafts,
        confidences,
        held if classes is None else classes,
        edges,
        held if counts is None else counts,
        held_tokens,
        held,
        slot_confidences,
        tally,
        next_tally,
        HOLD=hold,
        NUM_CLASSES=num_classes,
        K=num_slots,
        K_PO2=triton.next_power_of_2(num_slots),
        NUM_BINS=NUM_BINS,
        TALLY_PO2=triton.next_power_of_2(2 * TALLY_WIDTH),
        num_warps=1,
    )


@dataclass
class HeldDraft:
    """The draft of a request that the reference still compares."""

    tokens: list[int]
    seen: int
    at: int
    draft_class: int


@dataclass
class DraftValuesRef:
    """The same in plain Python, one request at a time."""

    num_slots: int
    hold: bool = False
    held: dict[int, HeldDraft] = field(default_factory=dict)
    # (class, place) -> [decided, came true]
    counts: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    tallies: list[list[int]] = field(
        default_factory=lambda: [[0] * TALLY_WIDTH, [0] * TALLY_WIDTH]
    )

    def step(
        self,
        slot: int,
        row: list[int],
        num_sampled: int,
        draft: list[int],
        confidences: list[float],
        draft_class: int,
    ) -> None:
        """Book one request's step; ``row`` holds its tokens after it."""
        if num_sampled == 0:
            return
        emitted_at = len(row) - num_sampled
        held = self.held.get(slot)
        if held is not None and held.at + held.seen != emitted_at:
            held = None
        decided = held is None
        if held is not None:
            for token in row[emitted_at:]:
                if held.seen == len(held.tokens):
                    break
                cell = self.counts.setdefault((held.draft_class, held.seen), [0, 0])
                cell[0] += 1
                if token != held.tokens[held.seen]:
                    decided = True
                    break
                cell[1] += 1
                held.seen += 1
            decided = decided or held.seen == len(held.tokens)
        fresh = decided or not self.hold
        for tally in self.tallies if fresh else self.tallies[:1]:
            tally[ROUNDS] += 1
            tally[TOKENS] += num_sampled
            value = 1.0
            for confidence in confidences[: len(draft)]:
                bounded = 0.0 if math.isnan(confidence) else confidence
                value *= min(max(bounded, 0.0), 1.0)
                tally[sum(value < edge for edge in bin_edges())] += 1
        if fresh:
            self.held[slot] = HeldDraft(list(draft), 0, len(row), draft_class)
