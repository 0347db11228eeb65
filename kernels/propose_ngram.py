"""n-gram drafting from the resident token rows, in one launch.

Every program scans one chunk of one row. At each position it measures, in one pass,
how many tokens before it equal the tokens at the row's end (at most ``MAX_N``), and
keeps the best position of its chunk as one integer: match length in the high half,
the position in the low half. The last program of a row to arrive takes the maximum,
copies what followed the match, and says of which class it is: how long it is, looked
at further back than the search does. The longer a copy has run, the likelier it goes
on.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from mrv2_spec.kernels.launching import Launches

# Positions a program looks at in one iteration. 1024 with 4 warps keeps two 16-byte
# loads a thread in flight.
BLOCK = 1024
# Programs that fill the GPU: chunks grow until about this many are left, so that a
# single long row is split widely and 256 short ones are hardly split.
TARGET_PROGRAMS = 1024
# How far back a match is followed to tell its class.
CLASS_WINDOW = 32
# A match of at least this many tokens is in the class that follows; 0 is no match.
CLASS_LENGTHS = (1, 2, 3, 4, 5, 7, 10, 16, 32)
NUM_CLASSES = len(CLASS_LENGTHS) + 1


@triton.jit(do_not_specialize=["max_model_len", "num_steps", "chunk_blocks"])
def _propose_ngram_kernel(
    token_ids_ptr,  # *int32 [max_num_reqs, max_model_len]
    token_ids_stride,
    idx_mapping_ptr,  # *int64 [num_reqs], batch_idx -> req_state_idx
    total_len_ptr,  # *int32 [max_num_reqs]
    num_sampled_ptr,  # *int32 [num_reqs]
    placeholder_ids_ptr,  # *int32 [NUM_PLACEHOLDERS]
    prior_ptr,  # *float32 [NUM_CLASSES, K]
    best_ptr,  # *int64 [num_reqs], zero before and after
    arrivals_ptr,  # *int32 [num_reqs], zero before and after
    drafts_ptr,  # *int64 [num_reqs, K] (output)
    num_drafts_ptr,  # *int32 [max_num_reqs] (output)
    confidences_ptr,  # *float32 [num_reqs, K] (output)
    classes_ptr,  # *int32 [max_num_reqs] (output)
    max_model_len,
    num_steps,
    chunk_blocks,
    MIN_N: tl.constexpr,
    MAX_N: tl.constexpr,
    NUM_PLACEHOLDERS: tl.constexpr,
    LATEST: tl.constexpr,
    K: tl.constexpr,
    K_PO2: tl.constexpr,
    BLOCK: tl.constexpr,
    CLASS_WINDOW: tl.constexpr,
    CLASS_LENGTHS: tl.constexpr,
):
    batch_idx = tl.program_id(0).to(tl.int64)
    chunk_idx = tl.program_id(1)
    req_state_idx = tl.load(idx_mapping_ptr + batch_idx).to(tl.int64)
    total_len = tl.load(total_len_ptr + req_state_idx)
    num_sampled = tl.load(num_sampled_ptr + batch_idx)
    row_ptr = token_ids_ptr + req_state_idx * token_ids_stride

    # The last position ends the suffix itself, so matches end before it.
    num_positions = total_len - 1
    chunk_size = chunk_blocks * BLOCK
    # Inside a prefill the row holds the whole prompt, which may be longer than what the
    # grid was sized for: one program then writes the empty draft.
    num_chunks = tl.where(num_sampled > 0, tl.cdiv(num_positions, chunk_size), 1)
    num_chunks = tl.maximum(num_chunks, 1)
    if chunk_idx >= num_chunks:
        return
    last_token = tl.load(row_ptr + num_positions, mask=total_len > 0, other=0)
    eligible = (num_sampled > 0) & (total_len > MIN_N) & (num_steps > 0)
    for p in tl.static_range(NUM_PLACEHOLDERS):
        eligible = eligible & (last_token != tl.load(placeholder_ids_ptr + p))

    best = tl.zeros((), tl.int64)
    if eligible:
        lo = chunk_idx * chunk_size
        hi = tl.minimum(lo + chunk_size, num_positions)
        for start in range(lo, hi, BLOCK):
            pos = start + tl.arange(0, BLOCK)
            # Masked by the row's width, not by `hi`: an aligned bound keeps the loads
            # 16 bytes wide. What lies past `hi` is dropped below.
            tokens = tl.load(row_ptr + pos, mask=pos < token_ids_stride, other=-1)
            run = (pos < hi) & (tokens == last_token)
            # Most blocks hold no copy of the last token at all.
            if tl.max(run.to(tl.int32), axis=0) > 0:
                length = run.to(tl.int32)
                for j in tl.static_range(1, MAX_N):
                    suffix_token = tl.load(
                        row_ptr + num_positions - j,
                        mask=num_positions >= j,
                        other=-1,
                    )
                    # A placeholder in the suffix ends every match; -2 equals nothing.
                    for p in tl.static_range(NUM_PLACEHOLDERS):
                        if suffix_token == tl.load(placeholder_ids_ptr + p):
                            suffix_token = tl.full((), -2, tl.int32)
                    tokens = tl.load(row_ptr + pos - j, mask=run & (pos >= j), other=-3)
                    run = run & (tokens == suffix_token)
                    length += run.to(tl.int32)
                rank = pos if LATEST else 0x7FFFFFFF - pos
                key = (length.to(tl.int64) << 32) | rank.to(tl.int64)
                key = tl.where(length >= MIN_N, key, 0)
                best = tl.maximum(best, tl.max(key, axis=0))

    if num_chunks > 1:
        if best > 0:
            tl.atomic_max(best_ptr + batch_idx, best)
        # acq_rel: whoever sees the last arrival sees every chunk's maximum.
        arrived = tl.atomic_add(arrivals_ptr + batch_idx, 1)
        if arrived != num_chunks - 1:
            return
        best = tl.atomic_xchg(best_ptr + batch_idx, tl.zeros((), tl.int64))
        tl.store(arrivals_ptr + batch_idx, 0)

    match_len = (best >> 32).to(tl.int32)
    rank = (best & 0x7FFFFFFF).to(tl.int32)
    draft_start = (rank if LATEST else 0x7FFFFFFF - rank) + 1
    room = tl.minimum(total_len - draft_start, max_model_len - total_len)
    num_drafts = tl.where(match_len > 0, tl.minimum(room, num_steps), 0)
    num_drafts = tl.maximum(num_drafts, 0)

    k = tl.arange(0, K_PO2)
    tokens = tl.load(row_ptr + draft_start + k, mask=k < num_drafts, other=-1)
    for p in tl.static_range(NUM_PLACEHOLDERS):
        is_placeholder = tokens == tl.load(placeholder_ids_ptr + p)
        first = tl.min(tl.where(is_placeholder, k, K_PO2), axis=0)
        num_drafts = tl.minimum(num_drafts, first)
    is_draft = k < num_drafts

    # Follow the match further back than it was looked for.
    back = tl.arange(0, CLASS_WINDOW)
    behind = back < tl.where(match_len > 0, draft_start, 0)
    ours = tl.load(row_ptr + num_positions - back, mask=behind, other=-1)
    theirs = tl.load(row_ptr + draft_start - 1 - back, mask=behind, other=-2)
    run = tl.min(tl.where(ours == theirs, CLASS_WINDOW, back), axis=0)
    run = tl.maximum(run, match_len)
    draft_class = tl.zeros((), tl.int32)
    for length in tl.static_range(len(CLASS_LENGTHS)):
        draft_class += (run >= CLASS_LENGTHS[length]).to(tl.int32)
    confidence = tl.load(
        prior_ptr + draft_class * K + k, mask=is_draft & (k < K), other=0.0
    )
    tokens = tl.where(is_draft, tokens, last_token).to(tl.int64)
    tl.store(drafts_ptr + batch_idx * K + k, tokens, mask=k < K)
    tl.store(confidences_ptr + batch_idx * K + k, confidence, mask=k < K)
    tl.store(num_drafts_ptr + req_state_idx, num_drafts)
    tl.store(classes_ptr + req_state_idx, draft_class)


def propose_ngram(
    token_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    total_len: torch.Tensor,
    num_sampled: torch.Tensor,
    placeholder_ids: torch.Tensor,
    prior: torch.Tensor,
    best: torch.Tensor,
    arrivals: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    confidences: torch.Tensor,
    classes: torch.Tensor,
    *,
    max_total_len: int,
    max_model_len: int,
    num_steps: int,
    min_n: int,
    max_n: int,
    latest: bool,
) -> None:
    """Draft, for each row, what followed the longest earlier copy of its end.

    Args:
        token_ids: [max_num_reqs, >= max_model_len] int32, rows of known tokens;
            nothing at or past a row's total length is read.
        idx_mapping: [num_reqs] int64, row of each batch entry.
        total_len: [max_num_reqs] int32, known tokens of each row.
        num_sampled: [num_reqs] int32; entries with 0 draft nothing.
        placeholder_ids: [any] int32, tokens that neither match nor are copied.
        prior: [NUM_CLASSES, K] float32, the chance that the target accepts draft k of
            a class, given the drafts before it, before anything was seen.
        best: [>= num_reqs] int64 scratch, zero before and after.
        arrivals: [>= num_reqs] int32 scratch, zero before and after.
        drafts: [>= num_reqs, K] int64 (output), unused places hold the last token.
        num_drafts: [max_num_reqs] int32 (output), by row.
        confidences: [>= num_reqs, K] float32 (output), 0 in unused places.
        classes: [max_num_reqs] int32 (output), by row: the class of its match, see
            ``CLASS_LENGTHS``.
        max_total_len: a bound on the total length of the rows that sampled.
        max_model_len: drafts end before this position.
        num_steps: drafts a row at most, 0 to K.
        min_n: shortest match.
        max_n: longest match looked for.
        latest: on equal length take the latest occurrence, else the earliest.

    Source: the matching rule of vLLM's CPU proposer
    (``vllm/v1/spec_decode/ngram_proposer.py``, 0.33.0), for ``latest=False``.
    """
    num_reqs = idx_mapping.shape[0]
    if num_reqs == 0:
        return
    num_slots = drafts.shape[1]
    assert token_ids.dtype == torch.int32 and token_ids.stride(1) == 1
    assert idx_mapping.dtype == torch.int64 and num_sampled.dtype == torch.int32
    assert drafts.dtype == torch.int64 and drafts.is_contiguous()
    assert confidences.is_contiguous() and confidences.shape[1] == num_slots
    assert prior.shape == (NUM_CLASSES, num_slots) and prior.is_contiguous()
    assert best.dtype == torch.int64 and best.shape[0] >= num_reqs
    assert arrivals.dtype == torch.int32 and arrivals.shape[0] >= num_reqs
    assert 1 <= min_n <= max_n and 0 <= num_steps <= num_slots

    # Plain division rounded up: triton.cdiv is slow on the host.
    chunk_blocks = -(-max_total_len * num_reqs // (BLOCK * TARGET_PROGRAMS))
    num_chunks = max(1, -(-max_total_len // (BLOCK * chunk_blocks)))
    launch = _launches(min_n, max_n, placeholder_ids.shape[0], latest, num_slots, BLOCK)
    launch(
        (num_reqs, num_chunks, 1),
        (
            token_ids,
            token_ids.stride(0),
            idx_mapping,
            total_len,
            num_sampled,
            placeholder_ids,
            prior,
            best,
            arrivals,
            drafts,
            num_drafts,
            confidences,
            classes,
            max_model_len,
            num_steps,
            chunk_blocks,
        ),
    )


@cache
def _launches(
    min_n: int,
    max_n: int,
    num_placeholders: int,
    latest: bool,
    num_slots: int,
    block: int,
) -> Launches:
    constants = {
        "MIN_N": min_n,
        "MAX_N": max_n,
        "NUM_PLACEHOLDERS": num_placeholders,
        "LATEST": latest,
        "K": num_slots,
        "K_PO2": triton.next_power_of_2(num_slots),
        "BLOCK": block,
        "CLASS_WINDOW": CLASS_WINDOW,
        "CLASS_LENGTHS": CLASS_LENGTHS,
    }
    return Launches(_propose_ngram_kernel, constants, num_warps=4)


def propose_ngram_ref(
    context: list[int],
    *,
    num_steps: int,
    min_n: int,
    max_n: int,
    max_model_len: int,
    latest: bool = False,
    placeholder_ids: frozenset[int] = frozenset(),
) -> tuple[list[int], int]:
    """Draft for one row in plain Python.

    Returns:
        The drafted tokens and the match length (0 without a match).
    """
    total_len = len(context)
    starts = range(total_len)
    for n in range(min(max_n, total_len - 1), min_n - 1, -1):
        suffix = context[total_len - n :]
        if placeholder_ids.intersection(suffix):
            continue
        ends = [s + n for s in starts[: total_len - n] if context[s : s + n] == suffix]
        if not ends:
            continue
        end = ends[-1] if latest else ends[0]
        draft = context[end : end + min(num_steps, max(max_model_len - total_len, 0))]
        for i, token in enumerate(draft):
            if token in placeholder_ids:
                return draft[:i], n
        return draft, n
    return [], 0


def match_class_ref(context: list[int], draft_start: int) -> int:
    """Return the class of a match that ends before ``draft_start``."""
    run = 0
    while run < min(CLASS_WINDOW, draft_start) and (
        context[-1 - run] == context[draft_start - 1 - run]
    ):
        run += 1
    return sum(run >= length for length in CLASS_LENGTHS)
