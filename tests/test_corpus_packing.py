"""Packing: what is loaded drafts like what was streamed, and is what was saved."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from mrv2_spec.corpus.documents import PAGE_TOKENS, Documents
from mrv2_spec.corpus.namespaces import StoredNamespace
from mrv2_spec.corpus.packing import Kept, pack, unpack
from mrv2_spec.kernels import suffix_state as layout
from mrv2_spec.kernels.suffix_counts import CountRules, draft_by_counts
from mrv2_spec.kernels.suffix_draft import draft_suffix
from mrv2_spec.kernels.suffix_state import SuffixSettings, SuffixState, make_state
from mrv2_spec.kernels.suffix_update import update_suffix
from tests.kernels.suffix_batch import entries

NAMES = tuple(StoredNamespace(None, None, name) for name in ("a", "b", "c"))
# The device's numbers of the names above; the order is another one on purpose.
NUMBERS = [5, 0, 9]


def random_documents(rng: random.Random, settings: SuffixSettings) -> Documents:
    """Return documents of shared motifs, of lengths around the page size and more."""
    alphabet = rng.choice([2, 4, 50])
    size = settings.page_size
    motifs = [
        [rng.randrange(alphabet) for _ in range(rng.randint(2, 40))] for _ in range(3)
    ]
    texts: list[list[int]] = []
    for _ in range(rng.randint(1, 30)):
        length = rng.choice([1, 2, size - 1, size, size + 1, rng.randint(1, 150)])
        length = max(1, length)
        text: list[int] = []
        while len(text) < length:
            text += [*rng.choice(motifs)[rng.randrange(2) :], rng.randrange(alphabet)]
        texts.append(text[:length])
    return Documents(
        tokens=np.array([token for text in texts for token in text], dtype=np.int32),
        lengths=np.array([len(text) for text in texts], dtype=np.int64),
        namespaces=np.array([rng.randrange(3) for _ in texts], dtype=np.int64),
        names=NAMES,
    )


def split(documents: Documents) -> list[list[int]]:
    """Return the documents' tokens as lists."""
    ends = np.cumsum(documents.lengths)[:-1]
    return [part.tolist() for part in np.split(documents.tokens, ends)]


def random_settings(rng: random.Random) -> SuffixSettings:
    """Return settings small enough that the ring and the buckets overflow."""
    return SuffixSettings(
        num_speculative_tokens=rng.choice([1, 8]),
        max_model_len=200,
        corpus_tokens=rng.choice([1, 7, 23, 24, 25, 100, 1000, 5000]),
        max_cached_requests=rng.choice([1, 3, 10000]),
        page_tokens=rng.choice([4, 16, 64]),
        key_masks=rng.choice([SuffixSettings.key_masks, (0b1,), (0b11, 0b10101)]),
        ways=rng.choice([1, 4, 32]),
        num_buckets=rng.choice([1, 4, 256]),
        max_new_tokens=rng.choice([8, 64]),
        first_threshold=rng.choice([2**16, 2**20]),
    )


def streamed(
    rng: random.Random, settings: SuffixSettings, documents: Documents
) -> SuffixState:
    """Return a state that took up the documents as requests emit them."""
    state = make_state(settings, 2, "cpu")
    rows = torch.zeros(2, settings.max_model_len, dtype=torch.int32)
    total = torch.zeros(2, dtype=torch.int32)
    prompt = torch.zeros(2, dtype=torch.int32)
    for uid, text in enumerate(split(documents)):
        state.slots[1] = slot_of(documents, uid)
        rows[1, : len(text)] = torch.tensor(text)
        total[1] = 0
        while total[1] < len(text):
            step = rng.randint(1, settings.max_new_tokens)
            total[1] = min(len(text), int(total[1]) + step)
            one = torch.ones(1, dtype=torch.int32)
            update_suffix(state, settings, rows, torch.tensor([1]), total, prompt, one)
    return state


def slot_of(documents: Documents, uid: int) -> torch.Tensor:
    """Return the fields of a request that emits a document."""
    which = documents.namespaces
    fields = layout.new_slot(
        uid,
        NUMBERS[which[uid]],
        layout.FLAG_CONTRIBUTE,
        int((which[:uid] == which[uid]).sum()),
    )
    return torch.tensor(fields, dtype=torch.int32)


def packed(settings: SuffixSettings, documents: Documents) -> tuple[SuffixState, Kept]:
    """Return a state that loaded the documents."""
    state = make_state(settings, 2, "cpu")
    return state, pack(state, settings, documents, NUMBERS)


def draft(
    state: SuffixState, settings: SuffixSettings, text: list[int], number: int
) -> list[tuple[list[int], int, list[float]]]:
    """Return what a reading request of this text is drafted, by either scoring."""
    k = settings.num_speculative_tokens
    rows = torch.zeros(2, settings.max_model_len, dtype=torch.int32)
    rows[0, : len(text)] = torch.tensor(text)
    newest = int(state.counters[layout.NEWEST_UID])
    fields = layout.new_slot(newest + 1, number, layout.FLAG_READ)
    state.slots[0] = torch.tensor(fields, dtype=torch.int32)
    batch = (rows, torch.tensor([0]), torch.tensor([len(text), 0], dtype=torch.int32))
    sampled = torch.ones(1, dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.int32)
    prompt = torch.zeros(2, dtype=torch.int32)
    outputs = [
        (
            torch.zeros(2, k, dtype=torch.int64),
            torch.zeros(2, dtype=torch.int32),
            torch.zeros(2, k),
        )
        for _ in range(2)
    ]
    draft_suffix(
        state,
        settings,
        *batch,
        prompt,
        sampled,
        none,
        *outputs[0],
        num_steps=k,
    )
    draft_by_counts(
        state, settings, CountRules(), *batch, sampled, *outputs[1], num_steps=k
    )
    return [
        (drafts[0].tolist(), int(num[0]), confidences[0].tolist())
        for drafts, num, confidences in outputs
    ]


def within(
    state: SuffixState, settings: SuffixSettings, num_documents: int
) -> torch.Tensor:
    """Return which pages are live and young enough to be looked at."""
    age = num_documents - 1 - state.pages[:, layout.PAGE_UID]
    live = state.pages[:, layout.PAGE_SEQ] >= 0
    return live & (age < settings.max_cached_requests)


@pytest.mark.parametrize("_", range(15))
def test_loaded_is_like_streamed(_: int, rng: random.Random) -> None:
    check_loaded_is_like_streamed(rng, random_settings(rng))


def test_loaded_is_like_streamed_in_one_bucket(rng: random.Random) -> None:
    # Few tokens, chains and namespaces: small numbers that may not cancel out.
    settings = random_settings(rng)
    settings = replace(settings, num_buckets=1, ways=32, corpus_tokens=1000)
    for _ in range(12):
        check_loaded_is_like_streamed(rng, settings)


def check_loaded_is_like_streamed(rng: random.Random, settings: SuffixSettings) -> None:
    """Compare a memory that was loaded with one that saw the documents one by one."""
    documents = random_documents(rng, settings)
    old, (new, kept) = streamed(rng, settings, documents), packed(settings, documents)

    # What lookups can see is the same to the bit.
    seen = within(old, settings, documents.num_documents)
    assert torch.equal(seen, within(new, settings, documents.num_documents))
    assert torch.equal(old.pages[seen], new.pages[seen])
    used = torch.arange(settings.page_size) < old.pages[:, layout.PAGE_LEN, None]
    used &= seen[:, None]
    assert torch.equal(old.tokens[used], new.tokens[used])
    assert int(used.sum()) == kept.num_tokens
    assert torch.equal(old.counters, new.counters)
    found = entries(old, settings)
    page = found[:, 2] // settings.page_size % settings.num_pages
    assert torch.equal(found[seen[page]], entries(new, settings))

    # And so are the drafts.
    texts = split(documents)
    for _ in range(20):
        which = rng.randrange(len(texts))
        text = texts[which][: rng.randint(2, 60)] if len(texts[which]) > 1 else [0, 1]
        number = NUMBERS[documents.namespaces[which]]
        expected = draft(old, settings, text, number)
        assert draft(new, settings, text, number) == expected


def test_loaded_memory_drafts() -> None:
    settings = SuffixSettings(num_buckets=256, corpus_tokens=4096, max_model_len=200)
    tokens = np.arange(100, dtype=np.int32)
    documents = Documents(tokens, np.array([100]), np.array([0]), NAMES)
    state, _ = packed(settings, documents)
    for drafts, num, _ in draft(state, settings, [7, 8, 9], NUMBERS[0]):
        assert num > 0
        assert drafts[:num] == list(range(10, 10 + num))
    for _, num, _ in draft(state, settings, [7, 8, 9], NUMBERS[1]):
        assert num == 0


def test_use_after_loading_goes_on_as_after_streaming(rng: random.Random) -> None:
    settings = random_settings(rng)
    first, second = random_documents(rng, settings), random_documents(rng, settings)
    both = Documents(
        np.concatenate((first.tokens, second.tokens)),
        np.concatenate((first.lengths, second.lengths)),
        np.concatenate((first.namespaces, second.namespaces)),
        NAMES,
    )
    state, _ = packed(settings, first)
    other = streamed(rng, settings, both)
    rows = torch.zeros(2, settings.max_model_len, dtype=torch.int32)
    total = torch.zeros(2, dtype=torch.int32)
    for uid, text in enumerate(split(second), start=first.num_documents):
        state.slots[1] = slot_of(both, uid)
        rows[1, : len(text)] = torch.tensor(text)
        for end in [*range(1, len(text), settings.max_new_tokens), len(text)]:
            total[1] = end
            update_suffix(
                state,
                settings,
                rows,
                torch.tensor([1]),
                total,
                torch.zeros(2, dtype=torch.int32),
                torch.ones(1, dtype=torch.int32),
            )
    seen = within(other, settings, both.num_documents)
    assert torch.equal(other.pages[seen], state.pages[seen])
    assert texts_of(state, settings) == texts_of(other, settings)


def texts_of(
    state: SuffixState, settings: SuffixSettings
) -> list[tuple[int, list[int]]]:
    """Return (namespace number, tokens) of what a state would save."""
    found = unpack(state, settings)
    parts = found.tokens.split(found.lengths.tolist())
    return [
        (number, part.tolist())
        for number, part in zip(found.namespaces.tolist(), parts, strict=True)
    ]


@pytest.mark.parametrize("_", range(15))
def test_unpacked_is_the_newest_that_fits(_: int, rng: random.Random) -> None:
    settings = random_settings(rng)
    documents = random_documents(rng, settings)
    # Brute force: pages from the newest document backwards while there are any.
    free, expected = settings.num_pages, []
    newest_first = list(zip(split(documents), documents.namespaces, strict=True))[::-1]
    for text, namespace in newest_first[: settings.max_cached_requests]:
        size = settings.page_size
        starts = range(0, len(text), size)[::-1][:free]
        free -= len(starts)
        if starts:
            expected.append((NUMBERS[namespace], text[starts[-1] :]))
    for state in (
        packed(settings, documents)[0],
        streamed(rng, settings, documents),
    ):
        assert texts_of(state, settings) == expected[::-1]


@pytest.mark.parametrize("_", range(5))
def test_saved_loaded_saved_is_the_same(_: int, rng: random.Random) -> None:
    settings = random_settings(rng)
    state = streamed(rng, settings, random_documents(rng, settings))
    first = unpack(state, settings)
    place = {number: index for index, number in enumerate(NUMBERS)}
    documents = Documents(
        first.tokens.numpy(),
        first.lengths.numpy(),
        np.array([place[number] for number in first.namespaces.tolist()]),
        NAMES,
    )
    again, kept = packed(settings, documents)
    assert texts_of(again, settings) == texts_of(state, settings)
    assert kept == Kept(documents.num_documents, documents.num_tokens)


def test_requests_that_ran_together_are_told_apart() -> None:
    settings = SuffixSettings(
        corpus_tokens=64, page_tokens=4, num_buckets=16, max_model_len=64
    )
    state = make_state(settings, 3, "cpu")
    rows = torch.arange(3 * 64, dtype=torch.int32).view(3, 64)
    total = torch.zeros(3, dtype=torch.int32)
    for slot, uid in enumerate((11, 10, 12)):
        flags = layout.FLAG_CONTRIBUTE if uid != 12 else layout.FLAG_READ
        fields = layout.new_slot(uid, NUMBERS[0], flags)
        state.slots[slot] = torch.tensor(fields, dtype=torch.int32)
    slots = torch.tensor([2, 0, 1])
    for end in (3, 6, 7, 11, 13):
        total[:] = end
        sampled = torch.ones(3, dtype=torch.int32)
        prompt = torch.full((3,), 2, dtype=torch.int32)
        update_suffix(state, settings, rows, slots, total, prompt, sampled)
    assert texts_of(state, settings) == [
        (NUMBERS[0], rows[1, :13].tolist()),
        (NUMBERS[0], rows[0, :13].tolist()),
    ]
    # A purge cuts: only what came after it is left.
    state.pages[:, layout.PAGE_SEQ] = -1
    total[:] = 15
    update_suffix(state, settings, rows, slots, total, prompt, sampled)
    assert [text for _, text in texts_of(state, settings)] == [
        rows[1, 13:15].tolist(),
        rows[0, 13:15].tolist(),
    ]


def test_page_numbers_start_anew_before_they_overflow(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SuffixSettings(
        corpus_tokens=64, page_tokens=4, num_buckets=16, max_model_len=200
    )
    documents = random_documents(rng, settings)
    documents = replace(
        documents,
        tokens=np.tile(documents.tokens, 20),
        lengths=np.tile(documents.lengths, 20),
        namespaces=np.tile(documents.namespaces, 20),
    )
    plain, _ = packed(settings, documents)
    monkeypatch.setattr(layout, "SEQ_LIMIT", 80)
    state, _ = packed(settings, documents)
    assert int(state.counters[layout.NEXT_PAGE]) < settings.max_page_seq
    assert int(state.table.max()) < 80
    assert texts_of(state, settings) == texts_of(plain, settings)


def test_capacity_that_holds_everything() -> None:
    assert SuffixSettings().page_tokens == PAGE_TOKENS
    lengths = np.array([1, 64, 65, 200])
    documents = Documents(
        np.zeros(330, dtype=np.int32), lengths, np.zeros(4, dtype=np.int64), NAMES
    )
    needed = documents.page_tokens()
    assert needed == 64 * (1 + 1 + 2 + 4)
    _, kept = packed(SuffixSettings(corpus_tokens=needed, num_buckets=16), documents)
    assert kept == Kept(4, 330)
    short = SuffixSettings(corpus_tokens=needed - 64, num_buckets=16)
    assert packed(short, documents)[1] == Kept(3, 329)
