"""Gather what a step did with the drafts, for the host to count."""

from functools import cache

import torch
import triton
import triton.language as tl

from mrv2_spec.kernels.launching import Launches

# Rows of the result.
WIDTH, PROPOSED, SOURCE = range(3)
NUM_ROWS = 3

BLOCK = 256


@triton.jit(do_not_specialize=["num_reqs"])
def _count_drafts_kernel(
    idx_mapping_ptr,  # *int64 [num_reqs], batch_idx -> req_state_idx
    cu_num_logits_ptr,  # *int32 [num_reqs + 1]
    num_valid_drafts_ptr,  # *int32 [max_num_reqs]
    draft_sources_ptr,  # *int32 [max_num_reqs]
    counts_ptr,  # *int32 [3, num_reqs] (output)
    num_reqs,
    HAS_SOURCES: tl.constexpr,
    NUM_BONUS_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    batch_idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = batch_idx < num_reqs
    slots = tl.load(idx_mapping_ptr + batch_idx, mask=mask, other=0).to(tl.int64)
    start = tl.load(cu_num_logits_ptr + batch_idx, mask=mask, other=0)
    end = tl.load(cu_num_logits_ptr + batch_idx + 1, mask=mask, other=0)
    width = tl.maximum(end - start - NUM_BONUS_TOKENS, 0)
    proposed = tl.load(num_valid_drafts_ptr + slots, mask=mask, other=0)
    source = tl.zeros([BLOCK], tl.int32)
    if HAS_SOURCES:
        source = tl.load(draft_sources_ptr + slots, mask=mask, other=0)
    tl.store(counts_ptr + batch_idx, width, mask=mask)
    tl.store(counts_ptr + num_reqs + batch_idx, proposed, mask=mask)
    tl.store(counts_ptr + 2 * num_reqs + batch_idx, source, mask=mask)


def count_drafts(
    idx_mapping: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_valid_drafts: torch.Tensor,
    draft_sources: torch.Tensor | None,
    *,
    num_bonus_tokens: int = 1,
) -> torch.Tensor:
    """Gather a step's drafts, after it was verified and before it drafts again.

    Args:
        idx_mapping: [num_reqs] int64, request slot of each batch entry.
        cu_num_logits: [>= num_reqs + 1] int32, prefix sum of the verified rows.
        num_valid_drafts: [max_num_reqs] int32, by slot, real drafts that were proposed
            for this step.
        draft_sources: [max_num_reqs] int32, by slot, where they came from (0: the own
            history, 1: the memory), or None where there is one source only.
        num_bonus_tokens: logits rows of a request beside those of its drafts.

    Returns:
        [3, num_reqs] int32: the places verified, the real drafts, their source.
    """
    num_reqs = idx_mapping.shape[0]
    counts = torch.empty(
        NUM_ROWS, num_reqs, dtype=torch.int32, device=idx_mapping.device
    )
    if num_reqs == 0:
        return counts
    assert idx_mapping.dtype == torch.int64
    assert cu_num_logits.dtype == num_valid_drafts.dtype == torch.int32
    assert cu_num_logits.shape[0] > num_reqs
    assert draft_sources is None or draft_sources.dtype == torch.int32
    launch = _launches(draft_sources is not None, num_bonus_tokens, BLOCK)
    launch(
        # Plain division rounded up: triton.cdiv is slow on the host.
        (-(-num_reqs // BLOCK), 1, 1),
        (
            idx_mapping,
            cu_num_logits,
            num_valid_drafts,
            num_valid_drafts if draft_sources is None else draft_sources,
            counts,
            num_reqs,
        ),
    )
    return counts


@cache
def _launches(has_sources: bool, num_bonus_tokens: int, block: int) -> Launches:
    constants = {
        "HAS_SOURCES": has_sources,
        "NUM_BONUS_TOKENS": num_bonus_tokens,
        "BLOCK": block,
    }
    return Launches(_count_drafts_kernel, constants, num_warps=4)


def count_drafts_ref(
    slots: list[int],
    widths: list[int],
    num_valid_drafts: list[int],
    draft_sources: list[int] | None,
) -> list[list[int]]:
    """Return the same rows, from lists."""
    return [
        list(widths),
        [num_valid_drafts[slot] for slot in slots],
        [0 if draft_sources is None else draft_sources[slot] for slot in slots],
    ]
