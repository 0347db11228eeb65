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


def page_base(number: torch.Tensor, ordinal: torch.Tensor, ways: int) -> torch.Tensor:
    """Return the way of a page's first token: of which request, its how-manieth."""
    return hash_step((number.long() * 0x9E3779B1) & _M32, ordinal.long()) % ways


def is_live(state: SuffixState, page: torch.Tensor) -> torch.Tensor:
    """Tell which page numbers still name their page."""
    seq = state.pages[:, layout.PAGE_SEQ].long()
    return (page >= 0) & (seq[page.clamp(min=0) % seq.shape[0]] == page)


def oldest_seq(state: SuffixState, settings: SuffixSettings) -> torch.Tensor:
    """Return the first token of the ring; what is older ends a chain."""
    page = state.counters[layout.NEXT_PAGE].long() - settings.num_pages
    return page.clamp(min=0) * settings.page_size


def read_key(
    state: SuffixState, settings: SuffixSettings, seq: torch.Tensor, mask: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that a key names before and at a place, newest first.

    Args:
        state: the memory.
        settings: constants.
        seq: [...] places, or below 0 for none.
        mask: which tokens the key names.

    Returns:
        [..., tokens of the key] int64, and [...] bool, whether all are still there.
    """
    size, num_pages = settings.page_size, settings.num_pages
    page, offset = seq // size, seq % size
    there = is_live(state, page)
    tokens = []
    for back in range(mask.bit_length()):
        if back > 0:
            offset = offset - 1
            crossed = offset < 0
            prev = state.pages[page.clamp(min=0) % num_pages, layout.PAGE_PREV].long()
            page = torch.where(crossed, prev, page)
            offset = torch.where(crossed, size - 1, offset)
            there = there & is_live(state, page)
        if (mask >> back) & 1:
            tokens.append(state.tokens[page.clamp(min=0) % num_pages, offset].long())
    return torch.stack(tokens, -1), there


def namespace_and_way(
    state: SuffixState, settings: SuffixSettings, seq: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the namespace of each place and the way that it takes."""
    size = settings.page_size
    info = state.pages[(seq // size).clamp(min=0) % settings.num_pages].long()
    way = (info[..., layout.PAGE_BASE] + seq % size) % settings.ways
    return info[..., layout.PAGE_NAMESPACE], way


def bucket_of(
    settings: SuffixSettings, namespace: torch.Tensor, mask: int, tokens: torch.Tensor
) -> torch.Tensor:
    """Return the bucket of each key; `tokens` is [..., tokens of the key]."""
    h = hash_start(namespace, mask)
    for i in range(tokens.shape[-1]):
        h = hash_step(h, tokens[..., i])
    return h % settings.num_buckets


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
    _adjust(state, settings, slots)
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
    learner = fields[:, layout.LEARNER]
    at = (learner[:, None, None] * layout.NUM_BINS + bins)[counted]
    both = torch.stack((true[counted], torch.ones_like(at, dtype=torch.bool)), 1)
    state.learned.view(-1, 2).index_add_(0, at, both.int() * 16)
    num_right = all_right.sum(1)
    missed = pending & (num_right < num)
    valid = fields[:, layout.DRAFT_VALID]
    waste = torch.where(missed, (valid - num_right).clamp(min=0), 0)
    accepted = torch.where(pending, torch.minimum(num_right, valid), 0)
    sums = torch.stack((waste, accepted, pending.long()), 1).int()
    state.steering[:, layout.WASTE :].index_add_(0, learner, sums)
    state.slots[slots, layout.DRAFT_LEN] = -1


def _adjust(state: SuffixState, settings: SuffixSettings, slots: torch.Tensor) -> None:
    rows = state.slots[slots, layout.LEARNER].long().unique()
    learned = state.learned[rows]
    while bool((full := learned[..., 1] > settings.max_observations).any()):
        learned[full] >>= 1
    state.learned[rows] = learned
    now, waste, accepted, rounds = state.steering[rows].long().unbind(1)
    error = waste * 16 + accepted * settings.waste_slope // 16
    bound = 1 << (settings.waste_shift - 3)
    error = (error - settings.waste_budget * rounds).clamp(-bound, bound)
    new = now + ((now * error) >> settings.waste_shift)
    new = new.clamp(settings.min_threshold, settings.max_threshold)
    state.steering[rows] = 0
    state.steering[rows, layout.THRESHOLD] = torch.where(rounds > 0, new, now).int()


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
    number, given, ways = (
        fields[:, layout.NUMBER],
        fields[:, layout.PAGES],
        settings.ways,
    )
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
        (layout.PAGE_BASE, page_base(number[:, None], given[:, None] + f, ways)),
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

    for key in range(len(settings.key_masks)):
        _enter(state, settings, key, (page * size + offset)[written])

    moved = num > 0
    state.slots[slots[moved], layout.COMMITTED] = (start + num)[moved].int()
    grown = fresh > 0
    state.slots[slots[grown], layout.PAGE] = (base + fresh - 1)[grown].int()
    state.slots[slots, layout.PAGES] += fresh.int()


def _enter(
    state: SuffixState, settings: SuffixSettings, key: int, new: torch.Tensor
) -> None:
    """Put places into the chains of one key, newest first, one of a key and way.

    Args:
        state: the table and the links are changed.
        settings: constants.
        key: which key.
        new: [num_places] int64, in live pages.
    """
    mask = settings.key_masks[key]
    new = new[read_key(state, settings, new, mask)[1]]
    if new.numel() == 0:
        return
    tokens, _ = read_key(state, settings, new, mask)
    namespace, way = namespace_and_way(state, settings, new)
    chain = bucket_of(settings, namespace, mask, tokens) * settings.ways + way
    # All that is in the chains to be changed, and where it goes.
    head, links = state.table[key].view(-1), state.links[key].view(-1)
    ring = links.shape[0]
    oldest = oldest_seq(state, settings)
    chains = chain.unique()
    place, into = [new], [chain]
    at = head[chains].long()
    owner = chains
    while True:
        owner, at = owner[at >= oldest], at[at >= oldest]
        if at.numel() == 0:
            break
        place.append(at)
        into.append(owner)
        at = links[at % ring].long()
    seq, chain = torch.cat(place), torch.cat(into)
    tokens, readable = read_key(state, settings, seq, mask)
    # Of each key the newest place; one whose key is gone stays and is never found.
    namespace, _ = namespace_and_way(state, settings, seq)
    name = torch.cat((torch.stack((chain, namespace), 1), tokens), 1)
    name[~readable] = -1
    name[~readable, 1] = seq[~readable]
    _, group = name.unique(dim=0, return_inverse=True)
    newest = torch.full_like(seq, -1).scatter_reduce_(0, group, seq, "amax")
    kept = newest[group] == seq
    seq, chain = seq[kept], chain[kept]
    order = seq.argsort(descending=True)
    order = order[chain[order].argsort(stable=True)]
    seq, chain = seq[order], chain[order]
    first = torch.ones_like(seq, dtype=torch.bool)
    first[1:] = chain[1:] != chain[:-1]
    head[chain[first]] = seq[first].int()
    older = torch.full_like(seq, -1)
    older[:-1] = torch.where(first[1:], -1, seq[1:])
    links[seq % ring] = older.int()
