"""Learn from what was emitted since the last draft and append it to the memory.

Plain tensor operations: what runs without a GPU, and what the CUDA version is held
equal to. No floating point and no order among requests other than the batch's.
"""

from __future__ import annotations

import torch

from mrv2_spec.kernels import suffix_state as layout
from mrv2_spec.kernels.suffix_state import SuffixSettings, SuffixState

_M32 = 0xFFFFFFFF


def hash_step(h: torch.Tensor, value: torch.Tensor | int) -> torch.Tensor:
    """Mix one value into a 32-bit hash, kept in int64."""
    h = ((h ^ value) * 0x85EBCA6B) & _M32
    return h ^ (h >> 15)


def hash_start(namespace: torch.Tensor, mask: int) -> torch.Tensor:
    """Begin the hash of a key."""
    return hash_step((namespace.long() * 0x9E3779B1) & _M32, mask)


def hash_way(seq: torch.Tensor, ways: int) -> torch.Tensor:
    """Return the way of its bucket that a token takes."""
    return (((seq * 0x9E3779B1) & _M32) >> 16) % ways


def is_live(state: SuffixState, page: torch.Tensor) -> torch.Tensor:
    """Tell which page numbers still name their page."""
    seq = state.pages[:, layout.PAGE_SEQ].long()
    return (page >= 0) & (seq[page.clamp(min=0) % seq.shape[0]] == page)


def update_suffix(
    state: SuffixState,
    settings: SuffixSettings,
    token_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    total_len: torch.Tensor,
    prompt_len: torch.Tensor,
    num_sampled: torch.Tensor,
) -> None:
    """Compare pending drafts with the rows, then append the rows' new tokens.

    Args:
        state: changed in place.
        settings: constants.
        token_ids: [max_num_reqs, max_model_len] int32, resident rows.
        idx_mapping: [num_reqs] int64, batch index to request slot.
        total_len: [max_num_reqs] int32.
        prompt_len: [max_num_reqs] int32.
        num_sampled: [num_reqs] int32; a request with 0 is left out.
    """
    slots = idx_mapping[num_sampled > 0]
    if slots.numel() == 0:
        return
    total = total_len[slots].long()
    _observe(state, token_ids, slots, total)
    _adjust(state, settings)
    _commit(state, settings, token_ids, slots, total, prompt_len[slots].long())


def _observe(
    state: SuffixState,
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    total: torch.Tensor,
) -> None:
    fields = state.slots[slots].long()
    start = fields[:, layout.DRAFT_LEN]
    pending = start >= 0
    step = torch.arange(state.pending_tokens.shape[1], device=slots.device)
    num = torch.minimum(fields[:, layout.DRAFT_NUM], total - start)
    inside = pending[:, None] & (step < num[:, None])  # [num_reqs, K]
    at = (start[:, None] + step).clamp(0, token_ids.shape[1] - 1)
    truth = token_ids[slots[:, None], at]
    right = (state.pending_tokens[slots] == truth) & inside
    all_right = right.int().cumprod(1)
    before = torch.ones_like(all_right)
    before[:, 1:] = all_right[:, :-1]
    seen = inside & (before > 0)
    bins = state.pending_bins[slots].long()
    counted = seen[:, :, None] & (bins >= 0)
    true = counted & (state.pending_predicted[slots] == truth[:, :, None])
    for tensor, which in ((state.observed, counted), (state.accepted, true)):
        ones = torch.full_like(bins[which], 16, dtype=torch.int32)
        tensor.index_add_(0, bins[which], ones)
    num_right = all_right.sum(1)
    missed = pending & (num_right < num)
    valid = fields[:, layout.DRAFT_VALID]
    waste = torch.where(missed, (valid - num_right).clamp(min=0), 0).sum()
    accepted = torch.where(pending, torch.minimum(num_right, valid), 0).sum()
    state.counters[layout.WASTE] += waste.int()
    state.counters[layout.ACCEPTED] += accepted.int()
    state.counters[layout.ROUNDS] += pending.sum().int()
    state.slots[slots, layout.DRAFT_LEN] = -1


def _adjust(state: SuffixState, settings: SuffixSettings) -> None:
    while bool((full := state.observed > settings.max_observations).any()):
        state.observed[full] >>= 1
        state.accepted[full] >>= 1
    counters = state.counters
    waste, accepted, rounds = (
        int(counters[i]) for i in (layout.WASTE, layout.ACCEPTED, layout.ROUNDS)
    )
    if rounds > 0:
        error = waste * 16 + accepted * settings.waste_slope // 16
        error -= settings.waste_budget * rounds
        bound = 1 << (settings.waste_shift - 3)
        error = min(max(error, -bound), bound)
        now = int(counters[layout.THRESHOLD])
        now += (now * error) >> settings.waste_shift
        counters[layout.THRESHOLD] = min(
            max(now, settings.min_threshold), settings.max_threshold
        )
    for i in (layout.WASTE, layout.ACCEPTED, layout.ROUNDS):
        counters[i] = 0


def _commit(
    state: SuffixState,
    settings: SuffixSettings,
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    total: torch.Tensor,
    prompt: torch.Tensor,
) -> None:
    size, num_pages = settings.page_size, settings.num_pages
    counters, pages = state.counters, state.pages
    fields = state.slots[slots].long()
    uid, namespace = fields[:, layout.UID], fields[:, layout.NAMESPACE]
    newest = torch.maximum(counters[layout.NEWEST_UID], uid.max().int())
    counters[layout.NEWEST_UID] = newest
    gives = (fields[:, layout.FLAGS] & layout.FLAG_CONTRIBUTE) > 0
    first = (prompt - settings.prompt_tail).clamp(min=0)
    start = torch.maximum(fields[:, layout.COMMITTED], first)
    num = torch.where(gives, (total - start).clamp(0, settings.max_new_tokens), 0)
    bound = torch.where(gives, (num + size - 1) // size + 1, 0).sum()
    if int(counters[layout.NEXT_PAGE]) + int(bound) >= settings.max_page_seq:
        pages[:, layout.PAGE_SEQ] = -1
        state.table.fill_(-1)
        counters[layout.NEXT_PAGE] = 0

    old = fields[:, layout.PAGE]
    old_at = old.clamp(min=0) % num_pages
    live = is_live(state, old)
    room = torch.where(live, size - pages[old_at, layout.PAGE_LEN].long(), 0)
    fresh = ((num - room).clamp(min=0) + size - 1) // size
    base = int(counters[layout.NEXT_PAGE]) + fresh.cumsum(0) - fresh
    next_page = int(counters[layout.NEXT_PAGE]) + int(fresh.sum())
    counters[layout.NEXT_PAGE] = next_page

    f = torch.arange(int(fresh.max()), device=slots.device)
    page = base[:, None] + f  # [num_reqs, max fresh]
    real = (f < fresh[:, None]) & (page >= next_page - num_pages)
    prev = torch.where(f > 0, page - 1, old[:, None])
    succ = torch.where(f < fresh[:, None] - 1, page + 1, -1)
    columns = (
        (layout.PAGE_SEQ, page),
        (layout.PAGE_UID, uid[:, None].expand_as(page)),
        (layout.PAGE_NAMESPACE, namespace[:, None].expand_as(page)),
        (layout.PAGE_LEN, torch.zeros_like(page)),
        (layout.PAGE_PREV, prev),
        (layout.PAGE_NEXT, succ),
    )
    for column, value in columns:
        pages[page[real] % num_pages, column] = value[real].int()
    linked = (fresh > 0) & is_live(state, old)
    pages[old_at[linked], layout.PAGE_NEXT] = base[linked].int()

    t = torch.arange(int(num.max()), device=slots.device)
    pos = start[:, None] + t  # [num_reqs, max new]
    over = t - room[:, None]
    in_old = over < 0
    page = torch.where(in_old, old[:, None], base[:, None] + over // size)
    offset = torch.where(in_old, size + over, over % size)
    written = (t < num[:, None]) & is_live(state, page)
    at = page.clamp(min=0) % num_pages
    row = slots[:, None].expand_as(pos)
    state.tokens[at[written], offset[written]] = token_ids[row[written], pos[written]]
    lengths = pages[:, layout.PAGE_LEN].clone()
    ends = (offset[written] + 1).int()
    pages[:, layout.PAGE_LEN] = lengths.scatter_reduce_(0, at[written], ends, "amax")

    seq = page * size + offset
    num_buckets, ways = settings.num_buckets, settings.ways
    for key, mask in enumerate(settings.key_masks):
        h = hash_start(namespace, mask)[:, None].expand_as(pos)
        for back in range(mask.bit_length()):
            if (mask >> back) & 1:
                token = token_ids[row, (pos - back).clamp(0, token_ids.shape[1] - 1)]
                h = hash_step(h, token.long())
        whole = written & (pos - (mask.bit_length() - 1) >= first[:, None])
        entry = ((h % num_buckets) * ways + hash_way(seq, ways))[whole]
        state.table[key].view(-1).scatter_reduce_(0, entry, seq[whole].int(), "amax")

    moved = num > 0
    state.slots[slots[moved], layout.COMMITTED] = (start + num)[moved].int()
    grown = fresh > 0
    state.slots[slots[grown], layout.PAGE] = (base + fresh - 1)[grown].int()
