"""Clamp each request's scheduled drafts to its real ones, on the device."""

from functools import cache

import torch
import triton
import triton.language as tl

from mrv2_spec.kernels.launching import Launches

BLOCK = 1024


@triton.jit(do_not_specialize=["num_reqs", "max_num_reqs"])
def _trim_drafts_kernel(
    idx_mapping_ptr,  # *int64 [num_reqs], batch_idx -> req_state_idx
    num_valid_drafts_ptr,  # *int32 [max_num_reqs]
    num_draft_tokens_ptr,  # *int32 [num_reqs]
    num_scheduled_tokens_ptr,  # *int32 [num_reqs]
    cu_num_logits_ptr,  # *int32 [num_reqs + 1] (output)
    query_start_loc_ptr,  # *int32 [max_num_reqs + 1] (output)
    num_reqs,
    max_num_reqs,
    NUM_BONUS_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tl.store(cu_num_logits_ptr, 0)
    tl.store(query_start_loc_ptr, 0)
    num_logits = tl.zeros((), tl.int32)
    num_tokens = tl.zeros((), tl.int32)
    for start in range(0, num_reqs, BLOCK):
        batch_idx = start + tl.arange(0, BLOCK)
        mask = batch_idx < num_reqs
        req_state_idx = tl.load(idx_mapping_ptr + batch_idx, mask=mask, other=0)
        num_valid = tl.load(num_valid_drafts_ptr + req_state_idx, mask=mask, other=0)
        scheduled = tl.load(num_scheduled_tokens_ptr + batch_idx, mask=mask, other=0)
        drafts = tl.load(num_draft_tokens_ptr + batch_idx, mask=mask, other=0)
        capacity = tl.maximum(tl.minimum(drafts, num_valid), 0)
        logits = tl.where(mask, capacity + NUM_BONUS_TOKENS, 0)
        tokens = scheduled - drafts + capacity
        tl.store(
            cu_num_logits_ptr + 1 + batch_idx,
            num_logits + tl.cumsum(logits, axis=0),
            mask=mask,
        )
        tl.store(
            query_start_loc_ptr + 1 + batch_idx,
            num_tokens + tl.cumsum(tokens, axis=0),
            mask=mask,
        )
        num_logits += tl.sum(logits, axis=0)
        num_tokens += tl.sum(tokens, axis=0)
    # Full CUDA graphs read the padded end, which must not decrease.
    for start in range(num_reqs, max_num_reqs, BLOCK):
        batch_idx = start + tl.arange(0, BLOCK)
        tl.store(
            query_start_loc_ptr + 1 + batch_idx,
            num_tokens,
            mask=batch_idx < max_num_reqs,
        )


def trim_drafts(
    idx_mapping: torch.Tensor,
    num_valid_drafts: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    num_scheduled_tokens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    num_bonus_tokens: int,
) -> None:
    """Lay out a batch in which every request keeps its real drafts only.

    A request keeps ``capacity = min(scheduled drafts, real drafts)`` of them.

    Args:
        idx_mapping: [num_reqs] int64, request slot of each batch entry.
        num_valid_drafts: [max_num_reqs] int32, real drafts by slot; negative is none.
        num_draft_tokens: [num_reqs] int32, scheduled drafts.
        num_scheduled_tokens: [num_reqs] int32, scheduled tokens, drafts included.
        cu_num_logits: [>= num_reqs + 1] int32 (output), prefix sum of
            ``capacity + num_bonus_tokens``.
        query_start_loc: [max_num_reqs + 1] int32 (output), prefix sum of the kept
            tokens, its tail filled with the total.
        num_bonus_tokens: logits rows of a request beside those of its drafts.
    """
    num_reqs = idx_mapping.shape[0]
    assert idx_mapping.dtype == torch.int64
    assert num_draft_tokens.shape[0] >= num_reqs
    assert num_scheduled_tokens.shape[0] >= num_reqs
    assert cu_num_logits.shape[0] > num_reqs
    launch = _launches(num_bonus_tokens, BLOCK)
    launch(
        (1, 1, 1),
        (
            idx_mapping,
            num_valid_drafts,
            num_draft_tokens,
            num_scheduled_tokens,
            cu_num_logits,
            query_start_loc,
            num_reqs,
            query_start_loc.shape[0] - 1,
        ),
    )


@cache
def _launches(num_bonus_tokens: int, block: int) -> Launches:
    constants = {"NUM_BONUS_TOKENS": num_bonus_tokens, "BLOCK": block}
    return Launches(_trim_drafts_kernel, constants, num_warps=8)


def trim_drafts_ref(
    slots: list[int],
    num_valid_drafts: list[int],
    num_draft_tokens: list[int],
    num_scheduled_tokens: list[int],
    *,
    num_bonus_tokens: int,
    max_num_reqs: int,
) -> tuple[list[int], list[int]]:
    """Lay out the same batch with plain loops.

    Returns:
        ``cu_num_logits`` and ``query_start_loc``.
    """
    cu_num_logits, query_start_loc = [0], [0]
    for i, slot in enumerate(slots):
        capacity = max(0, min(num_draft_tokens[i], num_valid_drafts[slot]))
        kept = num_scheduled_tokens[i] - num_draft_tokens[i] + capacity
        cu_num_logits.append(cu_num_logits[-1] + capacity + num_bonus_tokens)
        query_start_loc.append(query_start_loc[-1] + kept)
    query_start_loc += [query_start_loc[-1]] * (max_num_reqs - len(slots))
    return cu_num_logits, query_start_loc
