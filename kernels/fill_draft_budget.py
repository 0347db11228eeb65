"""Fill a draft budget exactly: the likeliest real drafts first, fillers last.

A draft's value is its chance of being accepted: the product of the confidences from
the first draft of its request up to it. Values become integer keys that strictly fall
along a request (the position breaks ties), so each request has at most one draft per
key, admitting everything above a threshold admits a prefix of each request, and one
histogram of the keys finds that threshold without sorting.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl

from mrv2_spec.kernels.launching import Launches

# Rows of drafts that are in registers at once, for few and for many requests. A pass
# over a block waits for memory several times, so few large blocks are faster: one pass
# over 256 requests instead of four.
FEW_ROWS = 64
MANY_ROWS = 256
# Keys told apart; the levels of value are this over the padded draft length.
MIN_BINS = 1024


@triton.jit
def _draft_keys(
    rows,
    mask,
    idx_mapping_ptr,
    num_valid_drafts_ptr,
    num_draft_tokens_ptr,
    confidences_ptr,
    confidences_stride,
    K: tl.constexpr,
    K_PO2: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Return the [rows, K_PO2] keys of a block, 0 where there is no real draft."""
    slots = tl.load(idx_mapping_ptr + rows, mask=mask, other=0).to(tl.int64)
    num_valid = tl.load(num_valid_drafts_ptr + slots, mask=mask, other=0)
    drafts = tl.load(num_draft_tokens_ptr + rows, mask=mask, other=0)
    num_real = tl.minimum(tl.minimum(drafts, num_valid), K)
    k = tl.arange(0, K_PO2)
    is_real = k[None, :] < num_real[:, None]
    confidence = tl.load(
        confidences_ptr + slots[:, None] * confidences_stride + k[None, :],
        mask=is_real,
        other=0.0,
    )
    # A drafter may publish anything: NaN counts as no chance, the rest is clamped.
    confidence = tl.where(confidence == confidence, confidence, 0.0)
    confidence = tl.minimum(tl.maximum(confidence, 0.0), 1.0)
    value = tl.cumprod(confidence, axis=1)
    # The square root spends more levels on small values.
    level = 1 + (tl.sqrt(value) * (LEVELS - 2) + 0.5).to(tl.int32)
    return tl.where(is_real, level * K_PO2 + (K_PO2 - 1 - k)[None, :], 0)


@triton.jit
def _lay_out(
    rows,
    mask,
    width,
    num_plain,
    num_logits,
    num_tokens,
    cu_num_logits_ptr,
    query_start_loc_ptr,
    NUM_BONUS_TOKENS: tl.constexpr,
):
    """Lay a block's rows out behind those before; return the totals with it."""
    logits = tl.where(mask, width + NUM_BONUS_TOKENS, 0)
    tokens = num_plain + width
    tl.store(
        cu_num_logits_ptr + 1 + rows, num_logits + tl.cumsum(logits, axis=0), mask=mask
    )
    tl.store(
        query_start_loc_ptr + 1 + rows,
        num_tokens + tl.cumsum(tokens, axis=0),
        mask=mask,
    )
    return num_logits + tl.sum(logits, axis=0), num_tokens + tl.sum(tokens, axis=0)


@triton.jit
def _fill_tail(
    query_start_loc_ptr, num_tokens, num_reqs, max_num_reqs, BLOCK_ROWS: tl.constexpr
):
    # Full CUDA graphs read the padded end, which must not decrease.
    for start in range(num_reqs, max_num_reqs, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        tl.store(query_start_loc_ptr + 1 + rows, num_tokens, mask=rows < max_num_reqs)


@triton.jit(do_not_specialize=["num_reqs", "max_num_reqs", "draft_budget"])
def _fill_draft_budget_kernel(
    idx_mapping_ptr,  # *int64 [num_reqs], batch_idx -> req_state_idx
    num_valid_drafts_ptr,  # *int32 [max_num_reqs]
    num_draft_tokens_ptr,  # *int32 [num_reqs]
    num_scheduled_tokens_ptr,  # *int32 [num_reqs]
    confidences_ptr,  # *float32 [max_num_reqs, K]
    confidences_stride,
    cu_num_logits_ptr,  # *int32 [num_reqs + 1] (output)
    query_start_loc_ptr,  # *int32 [max_num_reqs + 1] (output)
    num_reqs,
    max_num_reqs,
    draft_budget,
    NUM_BONUS_TOKENS: tl.constexpr,
    K: tl.constexpr,
    K_PO2: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    tl.store(cu_num_logits_ptr, 0)
    tl.store(query_start_loc_ptr, 0)
    num_logits = tl.zeros((), tl.int32)
    num_tokens = tl.zeros((), tl.int32)
    num_scheduled_drafts = tl.zeros((), tl.int32)
    for start in range(0, num_reqs, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        drafts = tl.load(num_draft_tokens_ptr + rows, mask=rows < num_reqs, other=0)
        num_scheduled_drafts += tl.sum(drafts, axis=0)
    if draft_budget >= num_scheduled_drafts:
        # Room for all, as with few requests: nobody need be told from the others.
        for start in range(0, num_reqs, BLOCK_ROWS):
            rows = start + tl.arange(0, BLOCK_ROWS)
            mask = rows < num_reqs
            scheduled = tl.load(num_scheduled_tokens_ptr + rows, mask=mask, other=0)
            drafts = tl.load(num_draft_tokens_ptr + rows, mask=mask, other=0)
            num_logits, num_tokens = _lay_out(
                rows,
                mask,
                drafts,
                scheduled - drafts,
                num_logits,
                num_tokens,
                cu_num_logits_ptr,
                query_start_loc_ptr,
                NUM_BONUS_TOKENS,
            )
        _fill_tail(query_start_loc_ptr, num_tokens, num_reqs, max_num_reqs, BLOCK_ROWS)
        return

    BINS: tl.constexpr = LEVELS * K_PO2
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_reqs, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        keys = _draft_keys(
            rows,
            rows < num_reqs,
            idx_mapping_ptr,
            num_valid_drafts_ptr,
            num_draft_tokens_ptr,
            confidences_ptr,
            confidences_stride,
            K,
            K_PO2,
            LEVELS,
        )
        counts += tl.histogram(tl.reshape(keys, [BLOCK_ROWS * K_PO2]), BINS)
    # Keys below K_PO2 are no drafts.
    counts = tl.where(bins >= K_PO2, counts, 0)
    num_real = tl.sum(counts, axis=0)
    at_or_above = num_real - tl.cumsum(counts, axis=0) + counts
    fits = (at_or_above <= draft_budget) & (bins >= K_PO2)
    threshold = tl.min(tl.where(fits, bins, BINS), axis=0)
    # Of the first key that does not fit whole, the first requests get theirs.
    left_at_tie = draft_budget - tl.sum(tl.where(bins >= threshold, counts, 0), axis=0)
    left_for_fillers = tl.maximum(draft_budget - num_real, 0)

    num_ties = tl.zeros((), tl.int32)
    num_places = tl.zeros((), tl.int32)
    for start in range(0, num_reqs, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)
        mask = rows < num_reqs
        keys = _draft_keys(
            rows,
            mask,
            idx_mapping_ptr,
            num_valid_drafts_ptr,
            num_draft_tokens_ptr,
            confidences_ptr,
            confidences_stride,
            K,
            K_PO2,
            LEVELS,
        )
        scheduled = tl.load(num_scheduled_tokens_ptr + rows, mask=mask, other=0)
        drafts = tl.load(num_draft_tokens_ptr + rows, mask=mask, other=0)
        width = tl.sum((keys >= threshold).to(tl.int32), axis=1)
        is_tie = (keys == threshold - 1) & (keys >= K_PO2)
        tie = tl.sum(is_tie.to(tl.int32), axis=1)
        tie_rank = num_ties + tl.cumsum(tie, axis=0) - tie
        width += tl.where(tie_rank < left_at_tie, tie, 0)
        # Fillers take the places that are left, in batch order.
        places = drafts - width
        place_rank = num_places + tl.cumsum(places, axis=0) - places
        fillers = tl.minimum(tl.maximum(left_for_fillers - place_rank, 0), places)
        width += fillers
        num_logits, num_tokens = _lay_out(
            rows,
            mask,
            width,
            scheduled - drafts,
            num_logits,
            num_tokens,
            cu_num_logits_ptr,
            query_start_loc_ptr,
            NUM_BONUS_TOKENS,
        )
        num_ties += tl.sum(tie, axis=0)
        num_places += tl.sum(places, axis=0)
    _fill_tail(query_start_loc_ptr, num_tokens, num_reqs, max_num_reqs, BLOCK_ROWS)


def _num_levels(padded_num_slots: int) -> int:
    return max(MIN_BINS // padded_num_slots, 16)


def fill_draft_budget(
    idx_mapping: torch.Tensor,
    num_valid_drafts: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    num_scheduled_tokens: torch.Tensor,
    confidences: torch.Tensor,
    cu_num_logits: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    draft_budget: int,
    num_bonus_tokens: int,
) -> None:
    """Lay out a batch that verifies exactly ``draft_budget`` draft places.

    Args:
        idx_mapping: [num_reqs] int64, request slot of each batch entry.
        num_valid_drafts: [max_num_reqs] int32, real drafts by slot.
        num_draft_tokens: [num_reqs] int32, scheduled drafts, at most K each.
        num_scheduled_tokens: [num_reqs] int32, scheduled tokens, drafts included.
        confidences: [max_num_reqs, K] float32 by slot, the chance that the target
            accepts a draft given those before it.
        cu_num_logits: [>= num_reqs + 1] int32 (output).
        query_start_loc: [max_num_reqs + 1] int32 (output), its tail filled with the
            total, which is all scheduled tokens that are no drafts plus the budget.
        draft_budget: places to verify, at most the sum of the scheduled drafts.
        num_bonus_tokens: logits rows of a request beside those of its drafts.
    """
    num_reqs = idx_mapping.shape[0]
    num_slots = confidences.shape[1]
    assert idx_mapping.dtype == torch.int64 and confidences.stride(1) == 1
    assert num_draft_tokens.shape[0] >= num_reqs
    assert num_scheduled_tokens.shape[0] >= num_reqs
    assert cu_num_logits.shape[0] > num_reqs
    max_num_reqs = query_start_loc.shape[0] - 1
    block_rows = FEW_ROWS if num_reqs <= FEW_ROWS else MANY_ROWS
    launch = _launches(num_bonus_tokens, num_slots, block_rows)
    launch(
        (1, 1, 1),
        (
            idx_mapping,
            num_valid_drafts,
            num_draft_tokens,
            num_scheduled_tokens,
            confidences,
            confidences.stride(0),
            cu_num_logits,
            query_start_loc,
            num_reqs,
            max_num_reqs,
            draft_budget,
        ),
    )


@cache
def _launches(num_bonus_tokens: int, num_slots: int, block_rows: int) -> Launches:
    padded_num_slots = triton.next_power_of_2(num_slots)
    constants = {
        "NUM_BONUS_TOKENS": num_bonus_tokens,
        "K": num_slots,
        "K_PO2": padded_num_slots,
        "LEVELS": _num_levels(padded_num_slots),
        "BLOCK_ROWS": block_rows,
    }
    num_warps = 8 if block_rows == FEW_ROWS else 16
    return Launches(_fill_draft_budget_kernel, constants, num_warps=num_warps)


def fill_draft_budget_ref(
    slots: list[int],
    num_valid_drafts: list[int],
    num_draft_tokens: list[int],
    confidences: list[list[float]],
    *,
    draft_budget: int,
) -> list[int]:
    """Choose each request's number of verified places by sorting.

    Returns:
        The widths, in batch order; they sum to ``draft_budget``.
    """
    num_slots = len(confidences[0])
    padded_num_slots = 1 << (num_slots - 1).bit_length()
    levels = _num_levels(padded_num_slots)
    real = []
    for i, slot in enumerate(slots):
        value = 1.0
        for k in range(min(num_draft_tokens[i], num_valid_drafts[slot], num_slots)):
            confidence = confidences[slot][k]
            value *= 0.0 if math.isnan(confidence) else min(max(confidence, 0.0), 1.0)
            real.append((-int(math.sqrt(value) * (levels - 2) + 0.5), k, i))
    widths = [0] * len(slots)
    for _, _, i in sorted(real)[:draft_budget]:
        widths[i] += 1
    left = max(draft_budget - len(real), 0)
    for i, drafts in enumerate(num_draft_tokens):
        fillers = min(left, drafts - widths[i])
        widths[i] += fillers
        left -= fillers
    return widths
