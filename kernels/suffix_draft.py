"""Draft from the own row and the memory by votes that learned how far to trust them.

Plain tensor operations over all requests at once: what runs without a GPU, and what
the CUDA version is held equal to. The rules are in docs/suffix.md.
"""

from __future__ import annotations

import torch

from mrv2_spec.kernels import suffix_state as layout
from mrv2_spec.kernels.suffix_state import SuffixSettings, SuffixState
from mrv2_spec.kernels.suffix_update import (
    bucket_of,
    is_live,
    namespace_and_way,
    oldest_seq,
    read_key,
)

_MEMORY = layout.MAX_MEMORY_CANDIDATES
# Places of a request's candidates: memory 0.., own row from _MEMORY, each by age, so
# that the place itself orders them: the newest own one is the highest.
_NUM_PLACES = 2 * _MEMORY
# match quality (1 to 16) -> class
_CLASS = (0, 0, 1, 2, 3, 4, 4, 5, 5, 5, 6, 6, 6, 6, 6, 6, 7)


def draft_suffix(
    state: SuffixState,
    settings: SuffixSettings,
    token_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    total_len: torch.Tensor,
    prompt_len: torch.Tensor,
    num_sampled: torch.Tensor,
    placeholder_ids: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    confidences: torch.Tensor,
    *,
    num_steps: int,
) -> None:
    """Draft for a batch and remember the drafts until `update_suffix` sees the truth.

    `state.draft_sources` says where a draft came from, by its first token: OWN if the
    own row predicts the same token by itself, counting places that match at least as
    well as those of the prediction that was drafted; else MEMORY. It is OWN where
    nothing is drafted, and slots that are not in the batch keep theirs, as they do
    in `num_drafts`.

    Args:
        state: pending drafts and `draft_sources` are changed in place.
        settings: constants.
        token_ids: [max_num_reqs, max_model_len] int32, resident rows.
        idx_mapping: [num_reqs] int64, batch index to request slot.
        total_len: [max_num_reqs] int32.
        prompt_len: [max_num_reqs] int32.
        num_sampled: [num_reqs] int32; 0 = draft nothing.
        placeholder_ids: [num_placeholders] int32, tokens never drafted.
        drafts: [>= num_reqs, K] int64 (output), unused places hold the last token.
        num_drafts: [max_num_reqs] int32 (output), by slot.
        confidences: [>= num_reqs, K] float32 (output), 0 where unused.
        num_steps: most drafts a request.
    """
    num_reqs = idx_mapping.shape[0]
    total = total_len[idx_mapping].long()
    last_at = (total - 1).clamp(0, token_ids.shape[1] - 1)
    last = token_ids[idx_mapping, last_at].long()
    drafts[:num_reqs] = last[:, None]
    confidences[:num_reqs] = 0.0
    num_drafts[idx_mapping] = 0
    state.draft_sources[idx_mapping] = layout.OWN
    room = (settings.max_model_len - total - 1).clamp(max=num_steps)
    limit = room.clamp(max=settings.num_speculative_tokens)
    sampled = num_sampled > 0
    state.slots[idx_mapping[sampled], layout.DRAFT_LEN] = -1
    eligible = sampled & (total >= 2) & (limit > 0) & ~torch.isin(last, placeholder_ids)
    batch = eligible.nonzero().flatten()
    if batch.numel() == 0:
        return
    slots = idx_mapping[batch]
    rows = token_ids[slots, : int(total[batch].max())].long()
    quality, weight, ahead = _candidates(
        state, settings, rows, slots, total[batch], prompt_len[slots].long()
    )
    _vote(
        state,
        settings,
        slots,
        batch,
        total[batch],
        limit[batch],
        quality,
        weight,
        ahead,
        placeholder_ids,
        drafts,
        num_drafts,
        confidences,
    )


def _candidates(
    state: SuffixState,
    settings: SuffixSettings,
    rows: torch.Tensor,
    slots: torch.Tensor,
    total: torch.Tensor,
    prompt: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (quality, weight, ahead) of all places; quality 0 = no candidate.

    `ahead` is [num_reqs, places, K]: a token, -1 = nothing follows, or -2 - j = the
    draft's own token j (a copy that has reached the end of the row).
    """
    device = rows.device
    num_reqs, k = rows.shape[0], settings.num_speculative_tokens
    quality = torch.zeros(num_reqs, _NUM_PLACES, dtype=torch.long, device=device)
    weight = torch.ones_like(quality)
    ahead = torch.full((num_reqs, _NUM_PLACES, k), -1, device=device)

    found, pos = _own_places(settings, rows, total)
    own = found.shape[1]
    quality[:, _MEMORY : _MEMORY + own] = found
    answer = torch.where(pos >= prompt[:, None], settings.response_weight, 1)
    weight[:, _MEMORY : _MEMORY + own] = answer
    at = pos[:, :, None] + torch.arange(k, device=device)
    end = total[:, None, None]
    copied = rows.gather(1, at.clamp(max=rows.shape[1] - 1).flatten(1)).view_as(at)
    ahead[:, _MEMORY : _MEMORY + own] = torch.where(at < end, copied, -2 - (at - end))

    reads = (state.slots[slots, layout.FLAGS] & layout.FLAG_READ) > 0
    found, seq = _memory_places(state, settings, rows, slots, total)
    found = torch.where(reads[:, None], found, 0)
    num = found.shape[1]
    quality[:, :num] = found
    ahead[:, :num] = _memory_ahead(state, settings, seq, k)
    return quality, weight, ahead


def _own_places(
    settings: SuffixSettings, rows: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (quality, position of the next token), oldest first, 0 = none."""
    pos = torch.arange(rows.shape[1], device=rows.device)[None, :].expand_as(rows)
    run = torch.zeros_like(rows)
    again = torch.zeros_like(rows)
    unbroken = (pos >= 1) & (pos < total[:, None])
    resumed = torch.zeros_like(unbroken)
    for back in range(settings.window):
        end = rows.gather(1, (total - 1 - back).clamp(min=0)[:, None])
        there = pos - 1 - back >= 0
        equal = there & (rows.gather(1, (pos - 1 - back).clamp(min=0)) == end)
        run += unbroken & equal
        again += resumed & equal
        # The first difference is skipped: what follows it may agree again.
        resumed = torch.where(unbroken & ~equal, run > 0, resumed & equal)
        unbroken = unbroken & equal
    quality = torch.where(run > 0, run + again // settings.own_gap, 0)
    key = torch.where(quality > 0, (quality << 32) + pos, 0)
    best = key.topk(min(layout.MAX_OWN_CANDIDATES, key.shape[1]), dim=1).values
    order = torch.sort(torch.where(best > 0, best & 0xFFFFFFFF, -1), dim=1)
    return best.gather(1, order.indices) >> 32, order.values.clamp(min=0)


def _memory_places(
    state: SuffixState,
    settings: SuffixSettings,
    rows: torch.Tensor,
    slots: torch.Tensor,
    total: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (quality, seq) of what the keys name, oldest first, 0 = none."""
    size, num_pages = settings.page_size, settings.num_pages
    fields = state.slots[slots].long()
    namespace = fields[:, layout.NAMESPACE]
    entries = [
        _chained(state, settings, key, rows, namespace, total)
        for key in range(len(settings.key_masks))
    ]
    seq = torch.cat(entries, 1).sort(1).values  # [num_reqs, num_keys * ways]
    once = torch.ones_like(seq, dtype=torch.bool)
    once[:, 1:] = seq[:, 1:] != seq[:, :-1]

    page, offset = seq // size, seq % size
    info = state.pages[page.clamp(min=0) % num_pages].long()
    good = (
        once & (seq >= 0) & is_live(state, page) & (offset < info[..., layout.PAGE_LEN])
    )
    good &= info[..., layout.PAGE_UID] != fields[:, layout.UID, None]
    age = state.counters[layout.NEWEST_UID] - info[..., layout.PAGE_UID]
    good &= age < settings.max_cached_requests

    run = torch.zeros_like(seq)
    again = torch.zeros_like(seq)
    unbroken, inside = good.clone(), good.clone()
    for back in range(settings.window):
        crossed = offset < 0
        prev = state.pages[page.clamp(min=0) % num_pages, layout.PAGE_PREV].long()
        page = torch.where(crossed, prev, page)
        offset = torch.where(crossed, size - 1, offset)
        inside &= is_live(state, page) & (back < total)[:, None]
        here = state.tokens[page.clamp(min=0) % num_pages, offset].long()
        end = rows.gather(1, (total - 1 - back).clamp(min=0)[:, None])
        equal = inside & (here == end)
        again += equal & ~unbroken
        unbroken = unbroken & equal
        run += unbroken
        offset = offset - 1
    return torch.where(run > 0, run + again // settings.memory_gap, 0), seq


def _chained(
    state: SuffixState,
    settings: SuffixSettings,
    key: int,
    rows: torch.Tensor,
    namespace: torch.Tensor,
    total: torch.Tensor,
) -> torch.Tensor:
    """Return the place that a row's key names in each way, [num_reqs, ways], or -1."""
    mask = settings.key_masks[key]
    backs = [back for back in range(mask.bit_length()) if (mask >> back) & 1]
    at = total[:, None] - 1 - torch.tensor(backs, device=rows.device)
    want = rows.gather(1, at.clamp(min=0))  # [num_reqs, tokens of the key]
    bucket = bucket_of(settings, namespace, mask, want)
    way = torch.arange(settings.ways, device=rows.device)
    links = state.links[key].view(-1)
    oldest = oldest_seq(state, settings)
    here = state.table[key][bucket].long()  # [num_reqs, ways]
    here = torch.where((total >= mask.bit_length())[:, None], here, -1)
    found = torch.full_like(here, -1)
    while True:
        here = torch.where((here >= oldest) & (found < 0), here, -1)
        if not bool((here >= 0).any()):
            return found
        tokens, equal = read_key(state, settings, here, mask)
        equal = equal & (tokens == want[:, None, :]).all(-1)
        name, its_way = namespace_and_way(state, settings, here)
        equal &= (name == namespace[:, None]) & (its_way == way)
        found = torch.where(equal, here, found)
        older = links[here.clamp(min=0) % links.shape[0]].long()
        here = torch.where(here >= 0, older, -1)


def _memory_ahead(
    state: SuffixState, settings: SuffixSettings, seq: torch.Tensor, k: int
) -> torch.Tensor:
    """Return what follows each place, [num_reqs, places, K], -1 from its end on."""
    size, num_pages = settings.page_size, settings.num_pages
    page, offset = seq // size, seq % size + 1
    inside = seq >= 0
    ahead = []
    for _ in range(k):
        crossed = offset >= size
        succ = state.pages[page.clamp(min=0) % num_pages, layout.PAGE_NEXT].long()
        page = torch.where(crossed, succ, page)
        offset = torch.where(crossed, 0, offset)
        at = page.clamp(min=0) % num_pages
        inside = inside & is_live(state, page)
        inside = inside & (offset < state.pages[at, layout.PAGE_LEN])
        ahead.append(torch.where(inside, state.tokens[at, offset].long(), -1))
        offset = offset + 1
    return torch.stack(ahead, 2)


def _vote(
    state: SuffixState,
    settings: SuffixSettings,
    slots: torch.Tensor,
    batch: torch.Tensor,
    total: torch.Tensor,
    limit: torch.Tensor,
    quality: torch.Tensor,
    weight: torch.Tensor,
    ahead: torch.Tensor,
    placeholder_ids: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    confidences: torch.Tensor,
) -> None:
    device = slots.device
    num_reqs, places = quality.shape
    classes = torch.tensor(_CLASS, device=device)
    class_ids = torch.arange(layout.NUM_CLASSES, device=device)
    # Only places that some request uses are compared with each other.
    place = (quality > 0).any(0).nonzero().flatten()
    column = torch.zeros(places, dtype=torch.long, device=device)
    column[place] = torch.arange(place.shape[0], device=device)
    quality, weight, ahead = quality[:, place], weight[:, place], ahead[:, place]
    is_own = place >= _MEMORY
    alive = quality > 0
    going = torch.ones(num_reqs, dtype=torch.bool, device=device)
    all_right = torch.full((num_reqs,), 65536, device=device)
    learner = state.slots[slots, layout.LEARNER].long()
    threshold = state.steering[learner, layout.THRESHOLD].long() >> 8
    valid = torch.zeros(num_reqs, dtype=torch.long, device=device)
    num = torch.zeros_like(valid)
    history = torch.zeros(num_reqs, 0, dtype=torch.long, device=device)
    for j in range(int(limit.max())):
        token = ahead[:, :, j]
        if j > 0:
            own_token = history.gather(1, (-2 - token).clamp(0, j - 1))
            token = torch.where(token <= -2, own_token, token)
        alive = alive & (token >= 0)
        going = going & (j < limit) & alive.any(1)
        if not bool(going.any()):
            break
        # Votes for a place's token, by source and class: [num_reqs, places, 8].
        level = classes[(quality + j).clamp(max=16)]
        ballots = (class_ids <= level[:, :, None]) & alive[:, :, None]
        ballots = torch.where(ballots, weight[:, :, None], 0).float()
        same = (token[:, :, None] == token[:, None, :]) & alive[:, None, :]
        same &= alive[:, :, None]
        own_votes = same.float() @ (ballots * is_own[None, :, None])
        memory_votes = same.float() @ (ballots * ~is_own[None, :, None])
        own_age = torch.where(same & is_own, place, -1).amax(2)
        memory_age = torch.where(same & ~is_own, place, -1).amax(2)
        both = own_votes * settings.own_weight + memory_votes
        votes = torch.stack((own_votes, memory_votes, both), 2).long()
        age = torch.stack((own_age, memory_age, torch.maximum(own_age, memory_age)), 2)[
            ..., None
        ].expand_as(votes)
        key = torch.where(votes > 0, votes * 256 + age, 0)
        best = key.amax(1).flatten(1)  # [num_reqs, NUM_PREDICTIONS]
        newest = torch.where(votes > 0, age, -1).amax(1).flatten(1)
        mine = (ballots * is_own[None, :, None]).sum(1).long()
        theirs = ballots.sum(1).long() - mine
        sums = torch.cat((mine, theirs, mine * settings.own_weight + theirs), 1)
        count = best >> 8
        bins = _bins(count, sums, (best & 255) == newest, j)
        predicted = token.gather(1, column[best & 255])
        some = count > 0
        at = torch.where(some, bins, 0)
        learned = state.learned[learner[:, None], at].long()
        chance = (learned[..., 0] << 16) // learned[..., 1]
        order = torch.where(some, chance * 32 + torch.arange(24, device=device), -1)
        winner = order.amax(1)
        lane = (winner.clamp(min=0) & 31)[:, None]
        chosen = predicted.gather(1, lane)[:, 0]
        going = going & ~torch.isin(chosen, placeholder_ids)
        r = going.nonzero().flatten()
        state.pending_bins[slots[r], j] = torch.where(some, bins, -1)[r].int()
        state.pending_predicted[slots[r], j] = predicted[r].int()
        state.pending_tokens[slots[r], j] = chosen[r].int()
        num[r] = j + 1
        chance = winner >> 5
        all_right = torch.where(going, (all_right * chance) >> 16, all_right)
        rise = 4 + settings.threshold_slope * min(j, settings.threshold_steps)
        kept = going & (all_right * 4 >= threshold * rise)
        valid[kept] = j + 1
        if j == 0:
            # The own row's prediction of the same class comes first.
            own_says = torch.where(some, predicted, -1).gather(
                1, lane % layout.NUM_CLASSES
            )[:, 0]
            by_memory = kept & (own_says != chosen)
            state.draft_sources[slots[by_memory]] = layout.MEMORY
        drafts[batch[kept], j] = chosen[kept]
        confidences[batch[kept], j] = chance[kept].float() / 65536
        going = kept
        alive = alive & (token == chosen[:, None])
        history = torch.cat((history, chosen[:, None]), 1)
    num_drafts[slots] = valid.int()
    state.slots[slots, layout.DRAFT_LEN] = total.int()
    state.slots[slots, layout.DRAFT_NUM] = num.int()
    state.slots[slots, layout.DRAFT_VALID] = valid.int()


def _bins(
    count: torch.Tensor, sums: torch.Tensor, is_newest: torch.Tensor, j: int
) -> torch.Tensor:
    """Return the bin of each prediction from its votes, all votes and position."""
    share = (count * 4 > sums).long() + (count * 2 > sums) + (count * 5 > sums * 4)
    share += count * 100 > sums * 99
    size = (count >= 2).long() + (count >= 3) + (count >= 5)
    stage = 0 if j == 0 else (1 if j < 4 else 2)
    at = torch.arange(layout.NUM_PREDICTIONS, device=count.device)
    at = (at * layout.NUM_SHARES + share) * layout.NUM_COUNTS + size
    return (at * layout.NUM_STAGES + stage) * 2 + is_newest.long()
