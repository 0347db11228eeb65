"""Learn how often drafts come true, and say what the new ones are worth.

One launch a step. Each program takes one request. It first compares the tokens that
the step emitted with the draft made for them, whether that was verified or not, and
books which of its places came true. Then it takes the draft just made: what its places
came to before corrects the chance that the drafter gives them; the chance that all
places up to one come true is that one's *value*, which is tallied.

A place is booked in a *cell*: the class that the drafter puts the draft in and the
position, or, without classes, the chance that the drafter gives the place.

What a step reads it does not write, and it writes by integer additions only, so the
order of the programs does not matter and all ranks agree. Counts therefore lie in five
tables. A step adds to one of three. It reads the one that the step before added to, and
one of two sums, of all that came before that. One more program adds these two up, into
the other sum, for the next step, and clears the third.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cache

import torch
import triton
import triton.language as tl

from mrv2_spec.kernels.launching import Launches

# Values are told apart by powers of 2 ** -0.25, down to a 256th; the last bin holds
# what is below.
NUM_BINS = 32
BIN_STEPS_PER_OCTAVE = 4
# A tally: the bins, then the rounds that they were collected in, and the tokens that
# these emitted.
ROUNDS, TOKENS = NUM_BINS, NUM_BINS + 1
# Last, requests whose drafter published an impossible count or chance.
IMPOSSIBLE = NUM_BINS + 2
TALLY_WIDTH = NUM_BINS + 3
# The tables of counts: sums, and what single steps added.
NUM_SUMS, NUM_ADDED = 2, 3
# Both come round after so many steps.
STEP_PERIOD = NUM_SUMS * NUM_ADDED
# Cells that the program which adds up handles at a time.
CELL_BLOCK = 128
# Chances that a drafter gives are told apart finest near 0 and 1.
NUM_CONFIDENCES = 32
_LOGIT_OF_FIRST, _LOGIT_OF_LAST = -3.5, 6.0
# What the drafter says counts as much as this many places seen.
PRIOR_WEIGHT = 4
# Counts above this are halved when they fade.
MAX_COUNT = 1024


def bin_edges() -> list[float]:
    """Return the [NUM_BINS - 1] lower edges of all bins but the last, falling."""
    return [2.0 ** (-(i + 1) / BIN_STEPS_PER_OCTAVE) for i in range(NUM_BINS - 1)]


def confidence_edges() -> list[float]:
    """Return the [NUM_CONFIDENCES - 1] rising edges between the chances given."""
    step = (_LOGIT_OF_LAST - _LOGIT_OF_FIRST) / (NUM_CONFIDENCES - 2)
    return [
        1.0 / (1.0 + math.exp(-(_LOGIT_OF_FIRST + i * step)))
        for i in range(NUM_CONFIDENCES - 1)
    ]


@triton.jit
def _counts_before(
    sums_at,
    recent_at,
    cells,
    mask,
    fade,
    NUM_CELLS: tl.constexpr,
    MAX_COUNT: tl.constexpr,
):
    """Return the places decided and come true by cell, as before the step."""
    seen = tl.load(sums_at + cells, mask=mask, other=0)
    seen += tl.load(recent_at + cells, mask=mask, other=0)
    right = tl.load(sums_at + NUM_CELLS + cells, mask=mask, other=0)
    right += tl.load(recent_at + NUM_CELLS + cells, mask=mask, other=0)
    shift = fade * (seen > MAX_COUNT).to(tl.int32)
    return seen >> shift, right >> shift


@triton.jit(do_not_specialize=["step", "fade"])
def _value_drafts_kernel(
    token_ids_ptr,  # *int32 [max_num_reqs, max_model_len]
    token_ids_stride,
    idx_mapping_ptr,  # *int64 [num_reqs], batch_idx -> req_state_idx
    total_len_ptr,  # *int32 [max_num_reqs]
    num_sampled_ptr,  # *int32 [num_reqs]
    drafts_ptr,  # *int64 [num_reqs, K]
    num_drafts_ptr,  # *int32 [max_num_reqs]
    confidences_ptr,  # *float32 [num_reqs, K] (in and out)
    classes_ptr,  # *int32 [max_num_reqs]
    bin_edges_ptr,  # *float32 [NUM_BINS]
    confidence_edges_ptr,  # *float32 [NUM_CONFIDENCES]
    sums_ptr,  # *int32 [2, 2, NUM_CELLS] (in and out)
    added_ptr,  # *int32 [3, 2, NUM_CELLS] (in and out)
    made_tokens_ptr,  # *int32 [max_num_reqs, K] (in and out)
    made_cells_ptr,  # *int32 [max_num_reqs, K] (in and out)
    made_ptr,  # *int32 [max_num_reqs, 2] (in and out)
    slot_confidences_ptr,  # *float32 [max_num_reqs, K] (output)
    tallies_ptr,  # *int32 [2, TALLY_STRIDE] (in and out)
    step,
    fade,
    HAS_CLASSES: tl.constexpr,
    NUM_CELLS: tl.constexpr,
    K: tl.constexpr,
    K_PO2: tl.constexpr,
    NUM_CONFIDENCES: tl.constexpr,
    NUM_BINS: tl.constexpr,
    TALLY_STRIDE: tl.constexpr,
    PRIOR_WEIGHT: tl.constexpr,
    MAX_COUNT: tl.constexpr,
    CELL_BLOCK: tl.constexpr,
):
    sums_at = sums_ptr + (step % 2) * (2 * NUM_CELLS)
    recent_at = added_ptr + ((step + 2) % 3) * (2 * NUM_CELLS)
    counts_ptr = added_ptr + (step % 3) * (2 * NUM_CELLS)
    tally_ptr = tallies_ptr + (step % 2) * TALLY_STRIDE

    if tl.program_id(0) == tl.num_programs(0) - 1:
        # No request: get ready for the next step what nobody else looks at in this one.
        next_sums_ptr = sums_ptr + ((step + 1) % 2) * (2 * NUM_CELLS)
        next_added_ptr = added_ptr + ((step + 1) % 3) * (2 * NUM_CELLS)
        for start in range(0, NUM_CELLS, CELL_BLOCK):
            cells = start + tl.arange(0, CELL_BLOCK)
            mask = cells < NUM_CELLS
            seen, right = _counts_before(
                sums_at, recent_at, cells, mask, fade, NUM_CELLS, MAX_COUNT
            )
            tl.store(next_sums_ptr + cells, seen, mask=mask)
            tl.store(next_sums_ptr + NUM_CELLS + cells, right, mask=mask)
            tl.store(next_added_ptr + cells, 0, mask=mask)
            tl.store(next_added_ptr + NUM_CELLS + cells, 0, mask=mask)
        t = tl.arange(0, 2 * NUM_BINS)
        next_tally_ptr = tallies_ptr + ((step + 1) % 2) * TALLY_STRIDE
        tl.store(next_tally_ptr + t, 0, mask=t < NUM_BINS + 3)
        return

    batch_idx = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping_ptr + batch_idx).to(tl.int64)
    num_sampled = tl.load(num_sampled_ptr + batch_idx)
    k = tl.arange(0, K_PO2)

    # What the step emitted, beside the draft that was made for it.
    total_len = tl.load(total_len_ptr + slot)
    emitted_at = total_len - num_sampled
    num_made = tl.load(made_ptr + slot * 2)
    # Else it is the draft of the slot's former request.
    is_ours = tl.load(made_ptr + slot * 2 + 1) == emitted_at
    num_decided = tl.where(is_ours, tl.minimum(num_made, num_sampled), 0)
    emitted = tl.load(
        token_ids_ptr + slot * token_ids_stride + emitted_at + k,
        mask=k < num_decided,
        other=-1,
    )
    made = tl.load(made_tokens_ptr + slot * K + k, mask=k < num_decided, other=-1)
    cell = tl.load(made_cells_ptr + slot * K + k, mask=k < num_decided, other=0)
    first_wrong = tl.min(tl.where(emitted != made, k, K_PO2), axis=0)
    num_right = tl.minimum(first_wrong, num_decided)
    num_seen = tl.minimum(first_wrong + 1, num_decided)
    tl.atomic_add(counts_ptr + cell, 1, mask=k < num_seen, sem="relaxed")
    tl.atomic_add(counts_ptr + NUM_CELLS + cell, 1, mask=k < num_right, sem="relaxed")

    # The draft just made.
    published = tl.load(num_drafts_ptr + slot)
    num_drafts = tl.minimum(tl.maximum(published, 0), K)
    is_impossible = (published != num_drafts).to(tl.int32)
    num_drafts = tl.where(num_sampled > 0, num_drafts, 0)
    is_draft = k < num_drafts
    given = tl.load(confidences_ptr + batch_idx * K + k, mask=is_draft, other=0.0)
    # A drafter may publish anything: NaN counts as no chance, the rest is clamped.
    no_chance = (given != given) | (given < 0.0) | (given > 1.0)
    is_impossible = tl.maximum(is_impossible, tl.max(no_chance.to(tl.int32), axis=0))
    given = tl.where(given == given, given, 0.0)
    given = tl.minimum(tl.maximum(given, 0.0), 1.0)
    if HAS_CLASSES:
        cell = tl.load(classes_ptr + slot) * K + k
    else:
        edge = tl.load(confidence_edges_ptr + tl.arange(0, NUM_CONFIDENCES))
        cell = tl.sum((given[:, None] >= edge[None, :]).to(tl.int32), axis=1)
    cell = tl.where(is_draft, cell, 0)
    seen, right = _counts_before(
        sums_at, recent_at, cell, is_draft, fade, NUM_CELLS, MAX_COUNT
    )
    confidence = (right + given * PRIOR_WEIGHT) / (seen + PRIOR_WEIGHT)
    confidence = tl.where(is_draft, confidence, 0.0)
    tl.store(confidences_ptr + batch_idx * K + k, confidence, mask=k < K)
    tl.store(slot_confidences_ptr + slot * K + k, confidence, mask=k < K)

    value = tl.cumprod(confidence, axis=0)
    lower = tl.load(bin_edges_ptr + tl.arange(0, NUM_BINS))
    which = tl.sum((value[:, None] < lower[None, :]).to(tl.int32), axis=1)
    tl.atomic_add(tally_ptr + which, 1, mask=is_draft, sem="relaxed")
    is_round = (num_sampled > 0).to(tl.int32)
    tl.atomic_add(tally_ptr + NUM_BINS, is_round, sem="relaxed")
    tl.atomic_add(tally_ptr + NUM_BINS + 1, num_sampled, sem="relaxed")
    tl.atomic_add(tally_ptr + NUM_BINS + 2, is_impossible * is_round, sem="relaxed")

    tokens = tl.load(drafts_ptr + batch_idx * K + k, mask=is_draft, other=-1)
    tl.store(made_tokens_ptr + slot * K + k, tokens.to(tl.int32), mask=is_draft)
    tl.store(made_cells_ptr + slot * K + k, cell, mask=is_draft)
    tl.store(made_ptr + slot * 2, num_drafts)
    tl.store(made_ptr + slot * 2 + 1, total_len)


def value_drafts(
    token_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    total_len: torch.Tensor,
    num_sampled: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    confidences: torch.Tensor,
    classes: torch.Tensor | None,
    bin_edges: torch.Tensor,
    confidence_edges: torch.Tensor,
    sums: torch.Tensor,
    added: torch.Tensor,
    made_tokens: torch.Tensor,
    made_cells: torch.Tensor,
    made: torch.Tensor,
    slot_confidences: torch.Tensor,
    tallies: torch.Tensor,
    *,
    step: int,
    fade: bool,
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
        confidences: [>= num_reqs, K] float32 (in and out), the chance that the target
            accepts a place given those before it, as the drafter says (clamped, NaN
            counts as 0), and corrected; 0 in unused places.
        classes: [max_num_reqs] int32 by slot, what kind of draft it is; None where
            places are told apart by the chance that the drafter gives them.
        bin_edges: [NUM_BINS] float32, :func:`bin_edges` and 0.
        confidence_edges: [NUM_CONFIDENCES] float32, :func:`confidence_edges` and 2.
        sums: [2, 2, cells] int32 (in and out), how often places were decided, and how
            often they came true, up to the step before the last one. Cells are classes
            times K, or NUM_CONFIDENCES. The half read is ``step % 2``; the other is
            written for the next step.
        added: [3, 2, cells] int32 (in and out), what steps added. This one adds to
            ``step % 3``, zero before, and reads what the last one added; the third is
            zeroed for the next.
        made_tokens: [max_num_reqs, K] int32 (in and out), the newest draft by slot.
        made_cells: [max_num_reqs, K] int32 (in and out), where it is booked.
        made: [max_num_reqs, 2] int32 (in and out), its length, and where in the row
            it begins.
        slot_confidences: [max_num_reqs, K] float32 (output), the corrected chances.
        tallies: [2, >= TALLY_WIDTH] int32 (in and out). Half ``step % 2``, zero before,
            becomes the draft places by value, then rounds and the tokens that these
            emitted; the other is zeroed for the next step.
        step: number of this launch, or its rest by STEP_PERIOD.
        fade: halve what is above MAX_COUNT, before this step.
    """
    num_reqs = idx_mapping.shape[0]
    if num_reqs == 0:
        return
    num_slots = confidences.shape[1]
    assert drafts.dtype == torch.int64 and drafts.stride() == (num_slots, 1)
    assert confidences.stride() == (num_slots, 1)
    assert made.shape[1] == 2 and made_tokens.shape[1] == num_slots
    assert sums.is_contiguous() and added.is_contiguous()
    launch = _launches(classes is not None, sums.shape[2], num_slots, tallies.stride(0))
    launch(
        # One more than there are requests: it adds up.
        (num_reqs + 1, 1, 1),
        (
            token_ids,
            token_ids.stride(0),
            idx_mapping,
            total_len,
            num_sampled,
            drafts,
            num_drafts,
            confidences,
            made if classes is None else classes,
            bin_edges,
            confidence_edges,
            sums,
            added,
            made_tokens,
            made_cells,
            made,
            slot_confidences,
            tallies,
            step,
            int(fade),
        ),
    )


@cache
def _launches(
    has_classes: bool, num_cells: int, num_slots: int, tally_stride: int
) -> Launches:
    constants = {
        "HAS_CLASSES": has_classes,
        "NUM_CELLS": num_cells,
        "K": num_slots,
        "K_PO2": triton.next_power_of_2(num_slots),
        "NUM_CONFIDENCES": NUM_CONFIDENCES,
        "NUM_BINS": NUM_BINS,
        "TALLY_STRIDE": tally_stride,
        "PRIOR_WEIGHT": PRIOR_WEIGHT,
        "MAX_COUNT": MAX_COUNT,
        "CELL_BLOCK": CELL_BLOCK,
    }
    return Launches(_value_drafts_kernel, constants, num_warps=1)


@dataclass
class DraftValuesRef:
    """The same in plain Python, one request at a time."""

    num_slots: int
    has_classes: bool
    # slot -> (tokens, cells, where they begin)
    made: dict[int, tuple[list[int], list[int], int]] = field(default_factory=dict)
    # cell -> [decided, came true]
    counts: dict[int, list[int]] = field(default_factory=dict)
    known: dict[int, list[int]] = field(default_factory=dict)
    tally: list[int] = field(default_factory=lambda: [0] * TALLY_WIDTH)

    def begin_step(self) -> None:
        """Begin a step: what was counted so far is known in all of it."""
        self.known = {cell: list(counts) for cell, counts in self.counts.items()}
        self.tally = [0] * TALLY_WIDTH

    def take(
        self,
        slot: int,
        row: list[int],
        num_sampled: int,
        draft: list[int],
        given: list[float],
        draft_class: int,
        published: int,
    ) -> list[float]:
        """Take one request's step; ``row`` holds its tokens after it.

        ``published`` is how many of the drafts the drafter calls real.

        Returns:
            The corrected chances of the draft's places.
        """
        emitted = row[len(row) - num_sampled :]
        tokens, cells, begins = self.made.get(slot, ([], [], -1))
        if begins == len(row) - num_sampled:
            for token, cell, came in zip(tokens, cells, emitted, strict=False):
                count = self.counts.setdefault(cell, [0, 0])
                count[0] += 1
                if token != came:
                    break
                count[1] += 1
        if num_sampled == 0:
            self.made[slot] = ([], [], len(row))
            return []
        self.tally[ROUNDS] += 1
        self.tally[TOKENS] += num_sampled
        used = [given[k] for k in range(min(max(published, 0), self.num_slots))]
        self.tally[IMPOSSIBLE] += not 0 <= published <= self.num_slots or not all(
            0.0 <= chance <= 1.0 for chance in used
        )
        new_cells, confidences, value = [], [], 1.0
        for k in range(len(draft)):
            chance = 0.0 if math.isnan(given[k]) else min(max(given[k], 0.0), 1.0)
            cell = bisect_right(confidence_edges(), chance)
            if self.has_classes:
                cell = draft_class * self.num_slots + k
            seen, right = self.known.get(cell, [0, 0])
            confidence = (right + chance * PRIOR_WEIGHT) / (seen + PRIOR_WEIGHT)
            value *= confidence
            self.tally[sum(value < edge for edge in bin_edges())] += 1
            new_cells.append(cell)
            confidences.append(confidence)
        self.made[slot] = (list(draft), new_cells, len(row))
        return confidences
