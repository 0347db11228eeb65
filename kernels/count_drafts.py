"""Count what became of the drafts, on the device, with no host round trip."""

import torch
import triton
import triton.language as tl

# The counter vector, [len(COUNTERS)] int64, in this order.
COUNTERS = (
    "proposed",
    "verified",
    "accepted",
    "never_issued",
    "invalid",
    "fillers",
    "rounds",
    "rounds_with_draft",
)

BLOCK = 256


@triton.jit(do_not_specialize=["num_reqs"])
def _count_drafts_kernel(
    idx_mapping_ptr,  # *int64 [num_reqs], batch_idx -> req_state_idx
    num_sampled_ptr,  # *int32 [num_reqs]
    cu_num_logits_ptr,  # *int32 [num_reqs + 1]
    num_acceptable_ptr,  # *int32 [num_reqs]
    total_len_ptr,  # *int32 [max_num_reqs]
    prefill_len_ptr,  # *int32 [max_num_reqs]
    num_valid_drafts_ptr,  # *int32 [max_num_reqs]
    in_flight_ptr,  # *int32 [max_num_reqs] (in and out)
    counters_ptr,  # *int64 [NUM_COUNTERS] (in and out)
    num_reqs,
    HAS_GRAMMAR: tl.constexpr,
    NUM_BONUS_TOKENS: tl.constexpr,
    NUM_COUNTERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    totals = tl.zeros([NUM_COUNTERS], tl.int64)
    which = tl.arange(0, NUM_COUNTERS)
    for start in range(0, num_reqs, BLOCK):
        batch_idx = start + tl.arange(0, BLOCK)
        mask = batch_idx < num_reqs
        slots = tl.load(idx_mapping_ptr + batch_idx, mask=mask, other=0).to(tl.int64)
        num_sampled = tl.load(num_sampled_ptr + batch_idx, mask=mask, other=0)
        logits_start = tl.load(cu_num_logits_ptr + batch_idx, mask=mask, other=0)
        logits_end = tl.load(cu_num_logits_ptr + batch_idx + 1, mask=mask, other=0)
        total_len = tl.load(total_len_ptr + slots, mask=mask, other=0)
        prefill_len = tl.load(prefill_len_ptr + slots, mask=mask, other=0)
        proposed = tl.load(num_valid_drafts_ptr + slots, mask=mask, other=0)
        in_flight = tl.load(in_flight_ptr + slots, mask=mask, other=0)

        # The first token of a request ends its prefill; it is no decode round. Drafts
        # still in flight there belong to the slot's former request: never issued.
        is_round = mask & (num_sampled > 0) & (total_len - num_sampled > prefill_len)
        width = tl.maximum(logits_end - logits_start - NUM_BONUS_TOKENS, 0)
        width = tl.where(is_round, width, 0)
        issued = tl.minimum(width, in_flight)
        valid = issued
        if HAS_GRAMMAR:
            limit = tl.load(num_acceptable_ptr + batch_idx, mask=mask, other=0)
            valid = tl.minimum(issued, limit)
        accepted = tl.where(is_round, tl.minimum(num_sampled - 1, valid), 0)

        # Added up in the order of COUNTERS.
        rounds = is_round.to(tl.int32)
        with_draft = (is_round & (in_flight > 0)).to(tl.int32)
        totals += tl.where(which == 0, tl.sum(proposed, axis=0), 0)
        totals += tl.where(which == 1, tl.sum(valid, axis=0), 0)
        totals += tl.where(which == 2, tl.sum(accepted, axis=0), 0)
        totals += tl.where(which == 3, tl.sum(in_flight - issued, axis=0), 0)
        totals += tl.where(which == 4, tl.sum(issued - valid, axis=0), 0)
        totals += tl.where(which == 5, tl.sum(width - issued, axis=0), 0)
        totals += tl.where(which == 6, tl.sum(rounds, axis=0), 0)
        totals += tl.where(which == 7, tl.sum(with_draft, axis=0), 0)
        tl.store(in_flight_ptr + slots, proposed, mask=mask)
    tl.store(counters_ptr + which, tl.load(counters_ptr + which) + totals)


def count_drafts(
    idx_mapping: torch.Tensor,
    num_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_acceptable: torch.Tensor | None,
    total_len: torch.Tensor,
    prefill_len: torch.Tensor,
    num_valid_drafts: torch.Tensor,
    in_flight: torch.Tensor,
    counters: torch.Tensor,
    *,
    num_bonus_tokens: int = 1,
) -> None:
    """Book one step: the drafts it verified, and those just proposed.

    Args:
        idx_mapping: [num_reqs] int64, request slot of each batch entry.
        num_sampled: [num_reqs] int32, tokens the step emitted, 0 inside a prefill.
        cu_num_logits: [num_reqs + 1] int32, prefix sum of the verified rows.
        num_acceptable: [num_reqs] int32, drafts that the grammar let pass, or None
            where no request has a grammar.
        total_len: [max_num_reqs] int32, after the step.
        prefill_len: [max_num_reqs] int32.
        num_valid_drafts: [max_num_reqs] int32, drafts proposed after the step.
        in_flight: [max_num_reqs] int32 (in and out), proposed and not yet booked.
        counters: [len(COUNTERS)] int64 (in and out).
        num_bonus_tokens: logits rows of a request beside those of its drafts.
    """
    num_reqs = idx_mapping.shape[0]
    if num_reqs == 0:
        return
    assert idx_mapping.dtype == torch.int64 and counters.dtype == torch.int64
    assert cu_num_logits.shape[0] > num_reqs and counters.shape[0] == len(COUNTERS)
    _count_drafts_kernel[(1,)](
        idx_mapping,
        num_sampled,
        cu_num_logits,
        num_sampled if num_acceptable is None else num_acceptable,
        total_len,
        prefill_len,
        num_valid_drafts,
        in_flight,
        counters,
        num_reqs,
        HAS_GRAMMAR=num_acceptable is not None,
        NUM_BONUS_TOKENS=num_bonus_tokens,
        NUM_COUNTERS=len(COUNTERS),
        BLOCK=BLOCK,
        num_warps=4,
    )


def count_drafts_ref(
    slots: list[int],
    num_sampled: list[int],
    widths: list[int],
    num_acceptable: list[int] | None,
    total_len: list[int],
    prefill_len: list[int],
    num_valid_drafts: list[int],
    in_flight: list[int],
    counters: dict[str, int],
) -> None:
    """Book the same step with plain loops; changes the last two arguments."""
    for i, slot in enumerate(slots):
        drafts = in_flight[slot]
        counters["proposed"] += num_valid_drafts[slot]
        in_flight[slot] = num_valid_drafts[slot]
        if num_sampled[i] == 0 or total_len[slot] - num_sampled[i] <= prefill_len[slot]:
            counters["never_issued"] += drafts
            continue
        issued = min(drafts, widths[i])
        valid = issued if num_acceptable is None else min(issued, num_acceptable[i])
        counters["verified"] += valid
        counters["invalid"] += issued - valid
        counters["never_issued"] += drafts - issued
        counters["accepted"] += min(num_sampled[i] - 1, valid)
        counters["fillers"] += widths[i] - issued
        counters["rounds"] += 1
        counters["rounds_with_draft"] += drafts > 0
