"""Settings and device tensors of suffix decoding, one layout for every version.

All integers are int32 unless a shape says otherwise. A token of the memory is named
by `seq = page_seq * page_tokens + offset`; pages are given out round robin, so page
`page_seq` lies at index `page_seq % num_pages` and is alive while `page_seq[index]`
still holds that number. Every link and hash entry is such a number, so a stale one is
recognised by comparing and never followed.

What one namespace does is not seen by another: a place is found by its exact key, the
namespace included, and hash entries are chained, so that none takes another's. The way
of a token follows from which request of its namespace it belongs to, and each namespace
learns in a row of its own. Only the ring is shared: the oldest page goes first.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

# Votes are counted per source (own row, memory, both) and match class.
NUM_SOURCES = 3
NUM_CLASSES = 8
NUM_PREDICTIONS = NUM_SOURCES * NUM_CLASSES
NUM_SHARES = 5
NUM_COUNTS = 4
NUM_STAGES = 3
NUM_BINS = NUM_PREDICTIONS * NUM_SHARES * NUM_COUNTS * NUM_STAGES * 2

# Candidates sit in 256 places: memory in 0..127, own row in 128.., each by age. A
# class count of one source must fit 8 bits with the weight of a response token (2).
MAX_MEMORY_CANDIDATES = 128
MAX_OWN_CANDIDATES = 120

FLAG_READ = 1
FLAG_CONTRIBUTE = 2

# Columns of `slots`. NUMBER counts the requests of the namespace before this one,
# LEARNER is its row of `learned` and `steering`, PAGES the pages it was given so far.
UID, NAMESPACE, FLAGS, COMMITTED, PAGE, DRAFT_LEN, DRAFT_NUM, DRAFT_VALID = range(8)
NUMBER, LEARNER, PAGES = range(8, 11)
NUM_SLOT_FIELDS = 11
NEW_SLOT = (-1, 0, 0, 0, -1, -1, 0, 0, 0, 0, 0)

# Columns of `pages`. PAGE_BASE is the way of the page's first token.
PAGE_SEQ, PAGE_UID, PAGE_NAMESPACE, PAGE_LEN, PAGE_PREV, PAGE_NEXT, PAGE_BASE = range(7)
NUM_PAGE_FIELDS = 8

# Entries of `counters`.
NEXT_PAGE, NEWEST_UID = range(2)
NUM_COUNTERS = 2

# Columns of `steering`: the threshold, and sums of a step that are 0 between steps.
THRESHOLD, WASTE, ACCEPTED, ROUNDS = range(4)
NUM_STEERING_FIELDS = 4

# Values of `draft_sources`.
OWN, MEMORY = range(2)

# Most tokens that a key names.
MAX_KEY_TOKENS = 8

# Page numbers stay below this many tokens; then the memory starts afresh.
SEQ_LIMIT = 2**31 - 2**20


def new_slot(
    uid: int, namespace: int, flags: int, number: int = 0, learner: int = 0
) -> tuple[int, ...]:
    """Return the fields of a slot that a request was just put in."""
    fields = [*NEW_SLOT]
    fields[UID], fields[NAMESPACE], fields[FLAGS] = uid, namespace, flags
    fields[NUMBER], fields[LEARNER] = number, learner
    return tuple(fields)


@dataclass(frozen=True)
class SuffixSettings:
    """Constants of one drafter. Tuned on replayed trajectories, see docs/suffix.md.

    A match looks at `window` tokens. Its quality is the length of the exact match
    plus, behind the first differing token, a share of what agrees again: the run
    there (own row, 1/`own_gap`) or all equal places (memory, 1/`memory_gap`).
    """

    num_speculative_tokens: int = 16
    max_model_len: int = 4096
    corpus_tokens: int = 4 * 2**20
    max_cached_requests: int = 10000
    page_tokens: int = 64
    # Bit i set: the token i before the end is part of the key.
    key_masks: tuple[int, ...] = (0b1, 0b11, 0b1101, 0b111001)
    ways: int = 32
    num_buckets: int = 2**16
    prompt_tail: int = 4
    max_new_tokens: int = 64
    window: int = 16
    own_gap: int = 3
    memory_gap: int = 2
    # A response token of the own row counts twice, and the own row ten times the
    # memory where both are counted together.
    response_weight: int = 2
    own_weight: int = 10
    # The draft ends where the chance of all its tokens falls below
    # threshold * (1 + min(position, 8) / 2).
    first_threshold: int = 2**20  # Q24
    min_threshold: int = 2**16
    max_threshold: int = 2**23
    threshold_slope: int = 2  # quarters a position
    threshold_steps: int = 8
    # Rejected tokens a round that the threshold is steered to, in sixteenths, less
    # 14/256 a token accepted.
    waste_budget: int = 46
    waste_slope: int = 14
    waste_shift: int = 13
    # Observations weigh 16; a bin is halved above this.
    max_observations: int = 200 * 16
    # Namespaces that learn at the same time; a new one takes the place of the one that
    # was used longest ago.
    num_learners: int = 512

    @property
    def num_pages(self) -> int:
        """Pages of the token ring."""
        return max(1, self.corpus_tokens // self.page_size)

    @property
    def page_size(self) -> int:
        """Tokens of a page, smaller where the whole memory is."""
        return max(1, min(self.page_tokens, self.corpus_tokens))

    @property
    def max_page_seq(self) -> int:
        """First page number that is not used."""
        return SEQ_LIMIT // self.page_size

    @property
    def memory_bytes(self) -> int:
        """Device bytes of the token ring, its pages, hash entries and their links."""
        entries = len(self.key_masks) * self.num_buckets * self.ways
        page = self.page_size * (1 + len(self.key_masks)) + NUM_PAGE_FIELDS
        return 4 * (entries + self.num_pages * page)

    def check(self) -> None:
        """Raise ValueError where a kernel could not hold the settings."""
        lookups = len(self.key_masks) * self.ways
        if lookups > MAX_MEMORY_CANDIDATES:
            raise ValueError(
                f"key_masks x ways = {lookups}: at most {MAX_MEMORY_CANDIDATES}"
            )
        for mask in self.key_masks:
            if mask.bit_count() > MAX_KEY_TOKENS or mask.bit_length() > self.window:
                raise ValueError(
                    f"key_masks: {mask:#b} names more than {MAX_KEY_TOKENS} tokens or "
                    f"some beyond the window of {self.window}"
                )
        if self.num_buckets & (self.num_buckets - 1):
            raise ValueError(f"num_buckets = {self.num_buckets}: not a power of two")
        if not 1 <= self.num_speculative_tokens <= 48:
            raise ValueError(
                f"num_speculative_tokens = {self.num_speculative_tokens}: 1 to 48, "
                "what the shared memory of a block holds"
            )
        if not 1 <= self.window < 32:
            raise ValueError(f"window = {self.window}: 1 to 31")
        if not 64 <= self.max_observations < 2**16:
            raise ValueError(f"max_observations = {self.max_observations}: 64 to 65535")


@dataclass
class SuffixState:
    """Device tensors; `slots`, `pending_*`, `draft_sources` go by request slot."""

    tokens: torch.Tensor  # [num_pages, page_size]
    pages: torch.Tensor  # [num_pages, NUM_PAGE_FIELDS]
    table: torch.Tensor  # [num_keys, num_buckets, ways] newest seq or -1
    links: torch.Tensor  # [num_keys, num_pages, page_size] the next older, by token
    counters: torch.Tensor  # [NUM_COUNTERS]
    slots: torch.Tensor  # [max_num_reqs, NUM_SLOT_FIELDS]
    pending_tokens: torch.Tensor  # [max_num_reqs, K] the last draft, uncut
    pending_predicted: torch.Tensor  # [max_num_reqs, K, NUM_PREDICTIONS] tokens
    pending_bins: torch.Tensor  # [max_num_reqs, K, NUM_PREDICTIONS] or -1
    # [learners, NUM_BINS, 2] observations that came true, and all; weight 16
    learned: torch.Tensor
    steering: torch.Tensor  # [learners, NUM_STEERING_FIELDS]
    # [max_num_reqs] where the last draft's first token came from, OWN if there is none
    draft_sources: torch.Tensor

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(
            getattr(self, f.name).numel() * getattr(self, f.name).element_size()
            for f in fields(self)
        )


def prior() -> torch.Tensor:
    """Return a row of `learned` before anything was seen: four observations a bin.

    The chance is that of the share of the votes times a guess by match class. It is
    not fitted: the bins learn within some hundred rounds.
    """
    share = torch.tensor([0.15, 0.35, 0.65, 0.9, 1.0])
    match = torch.tensor([0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.9, 0.95])
    chance = (64 * match[:, None] * share[None, :] + 1e-3).to(torch.int32)
    accepted = chance[None, :, :, None, None, None].expand(
        NUM_SOURCES, NUM_CLASSES, NUM_SHARES, NUM_COUNTS, NUM_STAGES, 2
    )
    accepted = accepted.reshape(-1)
    return torch.stack((accepted, torch.full_like(accepted, 64)), 1)


def make_state(
    settings: SuffixSettings, max_num_reqs: int, device: torch.device | str
) -> SuffixState:
    """Allocate everything that suffix decoding keeps on the device."""
    settings.check()
    k = settings.num_speculative_tokens

    def full(value: int, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    keys = len(settings.key_masks)
    # A row for each request that may be running, so that none is taken away from one.
    learners = max(settings.num_learners, max_num_reqs)
    learned = full(0, learners, NUM_BINS, 2)
    learned[:] = prior().to(device)
    steering = full(0, learners, NUM_STEERING_FIELDS)
    steering[:, THRESHOLD] = settings.first_threshold
    counters = full(0, NUM_COUNTERS)
    counters[NEWEST_UID] = -1
    slots = full(0, max_num_reqs, NUM_SLOT_FIELDS)
    slots[:] = torch.tensor(NEW_SLOT, dtype=torch.int32)
    return SuffixState(
        tokens=full(0, settings.num_pages, settings.page_size),
        pages=full(-1, settings.num_pages, NUM_PAGE_FIELDS),
        table=full(-1, keys, settings.num_buckets, settings.ways),
        links=full(-1, keys, settings.num_pages, settings.page_size),
        counters=counters,
        slots=slots,
        pending_tokens=full(0, max_num_reqs, k),
        pending_predicted=full(0, max_num_reqs, k, NUM_PREDICTIONS),
        pending_bins=full(-1, max_num_reqs, k, NUM_PREDICTIONS),
        learned=learned,
        steering=steering,
        draft_sources=full(OWN, max_num_reqs),
    )
