"""Move the memory between the device's tensors and documents.

Packing leaves the tensors as if every document had been streamed through
`update_suffix` in order, each by a request of its own, numbered from 0, in the memory
and in its namespace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mrv2_spec.corpus.documents import Documents
from mrv2_spec.kernels import suffix_state as layout
from mrv2_spec.kernels.suffix_state import SuffixSettings, SuffixState
from mrv2_spec.kernels.suffix_update import bucket_of, page_base


@dataclass(frozen=True, slots=True)
class Kept:
    """What of the documents fits."""

    num_documents: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Responses:
    """What the memory holds, oldest first, on the host."""

    tokens: torch.Tensor  # [num_tokens] int32
    lengths: torch.Tensor  # [num_documents] int64
    namespaces: torch.Tensor  # [num_documents] int64, the device's numbers


def pack(
    state: SuffixState,
    settings: SuffixSettings,
    documents: Documents,
    numbers: list[int],
) -> Kept:
    """Fill an empty memory with the newest documents that fit.

    The tensors are made on the host first: a failure there leaves the state as it was.

    Args:
        state: fresh; its memory (tokens, pages, table, links, counters) is written.
        settings: the state's.
        documents: oldest first.
        numbers: the device's numbers of `documents.names`.

    Returns:
        How many documents and tokens are in the memory now; the oldest document may
        have lost its beginning.
    """
    if documents.num_documents == 0:
        return Kept(0, 0)
    with _one_thread():
        return _pack(state, settings, documents, numbers)


@contextmanager
def _one_thread() -> Iterator[None]:
    # Many short operations: where other processes want the cores too, the threads of
    # each would wait for one another, five times as long as one thread takes.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _pack(
    state: SuffixState,
    settings: SuffixSettings,
    documents: Documents,
    numbers: list[int],
) -> Kept:
    size, num_pages = settings.page_size, settings.num_pages
    num_documents = documents.num_documents
    lengths = torch.from_numpy(documents.lengths)
    uid = torch.arange(num_documents)
    end_page = ((lengths + size - 1) // size).cumsum(0)
    next_page = int(end_page[-1])
    if next_page >= settings.max_page_seq:
        # Streaming would have begun anew somewhere: count from the first page kept.
        end_page -= next_page - num_pages
        next_page = num_pages
    first_page = end_page - (lengths + size - 1) // size
    oldest_page = max(next_page - num_pages, 0)
    kept = end_page > oldest_page
    kept &= num_documents - 1 - uid < settings.max_cached_requests
    lengths, uid = lengths[kept], uid[kept]
    first_page, end_page = first_page[kept], end_page[kept]
    which = torch.from_numpy(documents.namespaces)
    request = _number_in_namespace(which, len(numbers))[kept]
    namespace = torch.tensor(numbers)[which[kept]]
    # Kept are the last ones, so their tokens are too.
    num_tokens = int(lengths.sum())
    source = torch.from_numpy(documents.tokens)[documents.num_tokens - num_tokens :]

    pages = torch.full((num_pages, layout.NUM_PAGE_FIELDS), -1, dtype=torch.int32)
    tokens = torch.zeros(num_pages, size, dtype=torch.int32)
    table = torch.full(state.table.shape, -1, dtype=torch.int32)
    links = torch.full(state.links.shape, -1, dtype=torch.int32)

    page = torch.arange(max(int(first_page[0]), oldest_page), next_page)
    owner = torch.searchsorted(end_page, page, right=True)
    inner = page - first_page[owner]
    for column, value in (
        (layout.PAGE_SEQ, page),
        (layout.PAGE_UID, uid[owner]),
        (layout.PAGE_NAMESPACE, namespace[owner]),
        (layout.PAGE_LEN, (lengths[owner] - inner * size).clamp(max=size)),
        (layout.PAGE_PREV, torch.where(inner > 0, page - 1, -1)),
        (layout.PAGE_NEXT, torch.where(page + 1 < end_page[owner], page + 1, -1)),
        (layout.PAGE_BASE, page_base(request[owner], inner, settings.ways)),
    ):
        pages[page % num_pages, column] = value.int()

    end = lengths.cumsum(0)
    at = torch.arange(num_tokens)
    owner = torch.searchsorted(end, at, right=True)
    pos = at - (end - lengths)[owner]
    page, offset = first_page[owner] + pos // size, pos % size
    # The oldest document may have lost its beginning.
    live = page >= oldest_page
    at, owner, pos, page, offset = (x[live] for x in (at, owner, pos, page, offset))
    pos = torch.where(owner == 0, pos - pos[0], pos)
    tokens[page % num_pages, offset] = source[at]
    way = (pages[page % num_pages, layout.PAGE_BASE].long() + offset) % settings.ways
    name, seq = namespace[owner], page * size + offset
    for key, mask in enumerate(settings.key_masks):
        whole = pos >= mask.bit_length() - 1
        backs = [back for back in range(mask.bit_length()) if (mask >> back) & 1]
        named = torch.stack([source[at[whole] - back].long() for back in backs], 1)
        bucket = bucket_of(settings, name[whole], mask, named)
        chain = bucket * settings.ways + way[whole]
        _link(
            table[key].view(-1),
            links[key].view(-1),
            chain,
            torch.cat((name[whole, None], named), 1),
            seq[whole],
        )

    state.pages.copy_(pages)
    state.tokens.copy_(tokens)
    state.table.copy_(table)
    state.links.copy_(links)
    state.counters[layout.NEXT_PAGE] = next_page
    state.counters[layout.NEWEST_UID] = num_documents - 1
    return Kept(int(lengths.shape[0]), int(at.shape[0]))


def _number_in_namespace(which: torch.Tensor, num_namespaces: int) -> torch.Tensor:
    """Return how many documents before each are of the same namespace."""
    order = which.argsort(stable=True)
    counts = which.bincount(minlength=num_namespaces)
    first = counts.cumsum(0) - counts
    number = torch.empty_like(which)
    number[order] = torch.arange(which.shape[0]) - first[which[order]]
    return number


def _link(
    head: torch.Tensor,
    links: torch.Tensor,
    chain: torch.Tensor,
    name: torch.Tensor,
    seq: torch.Tensor,
) -> None:
    """Link the newest place of each key into its chain, newest first.

    Args:
        head: newest place of each chain (output).
        links: the next older place, by token of the ring (output).
        chain: [num_places] int64, the chain of each.
        name: [num_places, columns] int64, keys that differ have another one.
        seq: [num_places] int64, ascending.
    """
    # Keys whose hashes are equal may stand between equal ones and keep a place too
    # many in a chain, which is never found: a newer one of its key stands before it.
    mixed = torch.zeros_like(chain)
    for column in (chain, *name.unbind(1)):
        # Small numbers are multiplied apart before the next is mixed in.
        mixed = (mixed ^ column) * 0x9E3779B97F4A7C1
        mixed ^= mixed >> 29
    order = mixed.argsort(stable=True)
    chain, name, seq = chain[order], name[order], seq[order]
    newest = torch.ones_like(seq, dtype=torch.bool)
    newest[:-1] = (chain[1:] != chain[:-1]) | (name[1:] != name[:-1]).any(1)
    chain, seq = chain[newest], seq[newest]
    order = ((chain << 31) - seq).argsort()
    chain, seq = chain[order], seq[order]
    first = torch.ones_like(newest[newest])
    first[1:] = chain[1:] != chain[:-1]
    head[chain[first]] = seq[first].int()
    older = torch.full_like(seq, -1)
    older[:-1] = torch.where(first[1:], -1, seq[1:])
    links[seq % links.shape[0]] = older.int()


def unpack(state: SuffixState, settings: SuffixSettings) -> Responses:
    """Read the memory back, as far as lookups would see it; waits for the device."""
    size, num_pages = settings.page_size, settings.num_pages
    pages = state.pages.cpu().long()
    newest = int(state.counters[layout.NEWEST_UID])
    seq, uid = pages[:, layout.PAGE_SEQ], pages[:, layout.PAGE_UID]
    used = pages[:, layout.PAGE_LEN]
    live = (seq >= 0) & (seq % num_pages == torch.arange(num_pages)) & (used > 0)
    live &= newest - uid < settings.max_cached_requests
    place = live.nonzero().flatten()
    place = place[torch.argsort((uid[place] << 32) + seq[place])]

    # A response's pages follow each other by number; where the link is to another
    # page, the memory was purged in between.
    begins = torch.ones(place.shape[0], dtype=torch.bool)
    follows = pages[place[1:], layout.PAGE_PREV] == seq[place[:-1]]
    begins[1:] = ~(follows & (uid[place[1:]] == uid[place[:-1]]))
    document = begins.long().cumsum(0) - 1
    lengths = torch.zeros(int(begins.sum()), dtype=torch.int64)
    lengths.index_add_(0, document, used[place])
    filled = torch.arange(size) < used[place, None]
    return Responses(
        tokens=state.tokens.cpu()[place][filled],
        lengths=lengths,
        namespaces=pages[place[begins], layout.PAGE_NAMESPACE],
    )
