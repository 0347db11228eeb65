"""Draft by the CPU reference's scoring: counts over every match length.

For each match length p the places where the last p tokens occur vote token by token;
the chance of a token is the share of the places that go on with it. The length with the
highest sum of chances wins, the own row unless the memory has more.

Of equal counts the oldest token wins where each was seen once, else the one seen last.
The reference's order depends on how its tree grew; this is the nearest to it that
places alone can give, and drafts as well (docs/suffix.md).

Plain tensor operations: what runs without a GPU, and what suffix_counts.cu is held
equal to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mrv2_spec.kernels import suffix_state as layout
from mrv2_spec.kernels.suffix_state import SuffixSettings, SuffixState

_NOTHING = -1


@dataclass(frozen=True)
class CountRules:
    """Limits of a draft, by vLLM's names.

    `max_places` bounds the places of one source; the newest are kept.
    """

    max_tree_depth: int = 24
    max_spec_factor: float = 1.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1
    max_places: int = 8192

    def limits(self, k: int) -> list[int]:
        """Return the most draft tokens by match length, 0 to max_tree_depth - 1."""
        result = []
        for p in range(self.max_tree_depth):
            scaled = int(p * self.max_spec_factor + self.max_spec_offset + 1e-6)
            result.append(max(0, min(k, scaled, self.max_tree_depth - p)))
        return result


@dataclass
class _Places:
    """Places of one source, newest first."""

    length: torch.Tensor  # [num_places] tokens that match the end of the row
    at: torch.Tensor  # [num_places] index of the next token in `tokens`
    tokens: torch.Tensor  # token by index
    succ: torch.Tensor  # index of the following token, -1 = none


def draft_by_counts(
    state: SuffixState,
    settings: SuffixSettings,
    rules: CountRules,
    token_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    total_len: torch.Tensor,
    num_sampled: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    confidences: torch.Tensor,
    *,
    num_steps: int,
) -> None:
    """Draft for a batch; arguments as for `draft_suffix`.

    `state.draft_sources` gets what was chosen, the own row or the memory, and OWN where
    nothing is drafted.
    """
    limits = rules.limits(settings.num_speculative_tokens)
    for b, slot in enumerate(idx_mapping.tolist()):
        total = int(total_len[slot])
        drafts[b] = token_ids[slot, max(0, total - 1)].long()
        confidences[b] = 0.0
        num_drafts[slot] = 0
        state.draft_sources[slot] = layout.OWN
        room = min(num_steps, settings.max_model_len - total - 1)
        if int(num_sampled[b]) <= 0 or total < 2 or room <= 0:
            continue
        row = token_ids[slot, :total].long()
        capped = [min(limit, room) for limit in limits]
        depth = min(rules.max_tree_depth, total) - 1
        score, tokens, chances = _best(_own_places(row, depth, rules), capped, rules)
        if int(state.slots[slot, layout.FLAGS]) & layout.FLAG_READ:
            places = _memory_places(state, settings, rules, slot, row, depth)
            other = _best(places, capped, rules)
            if other[0] > score:
                score, tokens, chances = other
                state.draft_sources[slot] = layout.MEMORY
        num = len(tokens)
        num_drafts[slot] = num
        drafts[b, :num] = torch.tensor(tokens, dtype=torch.long)
        confidences[b, :num] = torch.tensor(chances)


def _own_places(row: torch.Tensor, depth: int, rules: CountRules) -> _Places:
    total = row.shape[0]
    at = torch.arange(total, 0, -1)
    length = torch.zeros(total, dtype=torch.long)
    alive = torch.ones(total, dtype=torch.bool)
    for back in range(depth):
        before = at - 1 - back
        alive &= (before >= 0) & (row[before.clamp(min=0)] == row[total - 1 - back])
        length += alive
    found = length > 0
    succ = torch.arange(1, total + 1)
    succ[-1] = _NOTHING
    at = torch.where(at == total, _NOTHING, at)
    cut = slice(rules.max_places)
    return _Places(length[found][cut], at[found][cut], row, succ)


def _memory_places(
    state: SuffixState,
    settings: SuffixSettings,
    rules: CountRules,
    slot: int,
    row: torch.Tensor,
    depth: int,
) -> _Places:
    size, num_pages = settings.page_size, settings.num_pages
    pages = state.pages.long()
    seq = pages[:, layout.PAGE_SEQ]
    namespace = state.slots[slot, layout.NAMESPACE]
    age = state.counters[layout.NEWEST_UID] - pages[:, layout.PAGE_UID]
    live = seq >= 0
    seen = live & (pages[:, layout.PAGE_NAMESPACE] == namespace)
    seen &= age < settings.max_cached_requests

    def link(column: int) -> torch.Tensor:
        page = pages[:, column]
        index = page.clamp(min=0) % num_pages
        return torch.where((page >= 0) & (seq[index] == page), index, _NOTHING)

    offset = torch.arange(size)[None, :]
    index = torch.arange(num_pages)[:, None] * size + offset
    length = pages[:, layout.PAGE_LEN, None]
    prev_page, next_page = link(layout.PAGE_PREV), link(layout.PAGE_NEXT)
    last = prev_page * size + size - 1
    prev = torch.where(
        offset > 0, index - 1, torch.where(prev_page >= 0, last, _NOTHING)[:, None]
    ).flatten()
    has_next = (next_page >= 0) & (pages[next_page.clamp(min=0), layout.PAGE_LEN] > 0)
    over = torch.where(has_next, next_page * size, _NOTHING)[:, None]
    succ = torch.where(offset + 1 < size, index + 1, over)
    succ = torch.where((offset + 1 < length) | (offset + 1 == size), succ, _NOTHING)
    succ = succ.flatten()
    tokens = state.tokens.flatten().long()

    start = (seen[:, None] & (offset < length)).flatten().nonzero().flatten()
    place_seq = seq[start // size] * size + start % size
    start = start[place_seq.argsort(descending=True)]
    here = start
    matched = torch.zeros_like(start)
    alive = torch.ones_like(start, dtype=torch.bool)
    for back in range(depth):
        alive &= (here >= 0) & (tokens[here.clamp(min=0)] == row[-1 - back])
        matched += alive
        here = torch.where(here >= 0, prev[here.clamp(min=0)], _NOTHING)
    found = matched > 0
    cut = slice(rules.max_places)
    return _Places(matched[found][cut], succ[start[found][cut]], tokens, succ)


def _best(
    places: _Places, limits: list[int], rules: CountRules
) -> tuple[np.float32, list[int], list[float]]:
    """Return (score, tokens, chance of each given the ones before)."""
    best: tuple[np.float32, list[int], list[float]] = (np.float32(0), [], [])
    if places.length.numel() == 0:
        return best
    # Longest first: a shorter match must have a higher score, not an equal one.
    for p in range(int(places.length.max()), 0, -1):
        if limits[p] <= best[0]:
            continue
        result = _follow(places, p, limits[p], rules)
        if result[0] > best[0]:
            best = result
    return best


def _follow(
    places: _Places, p: int, limit: int, rules: CountRules
) -> tuple[np.float32, list[int], list[float]]:
    at = places.at[places.length >= p]
    chance_of_all, score = np.float32(1), np.float32(0)
    tokens: list[int] = []
    chances: list[float] = []
    for _ in range(limit):
        num = at.shape[0]
        at = at[at >= 0]
        if at.numel() == 0:
            break
        token, inverse, count = places.tokens[at].unique(
            return_inverse=True, return_counts=True
        )
        # The newest place stands first.
        equal = inverse[count[inverse] == count.max()]
        winner = int(equal[-1] if count.max() == 1 else equal[0])
        chance = np.float32(int(count[winner])) / np.float32(num)
        chance_of_all = np.float32(chance_of_all * chance)
        if chance_of_all < np.float32(rules.min_token_prob):
            break
        score = np.float32(score + chance_of_all)
        tokens.append(int(token[winner]))
        chances.append(float(chance))
        at = places.succ[at[inverse == winner]]
    return score, tokens, chances
