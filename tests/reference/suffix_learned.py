"""Plain model of the learned scoring: loops over one request at a time.

The rules of docs/suffix.md written down directly, with lists of places and counts, a
dictionary of keys and none of the chains, ranks, packed counters or hash votes of the
device versions. Numba, where it is installed, compiles the same source, which is what
the replays run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mrv2_spec.kernels import suffix_state as layout
from mrv2_spec.kernels.suffix_state import SuffixSettings

try:
    from numba import njit, types
    from numba.typed import Dict

    def new_dict() -> Any:
        """Return an empty dictionary that compiled code can use."""
        return Dict.empty(types.UniTuple(types.int64, 7), types.int64)

except ImportError:

    def new_dict() -> Any:
        """Return an empty dictionary."""
        return {}

    def njit(function: Callable[..., Any]) -> Callable[..., Any]:
        """Leave the function as it is."""
        return function


class Constants(NamedTuple):
    """The settings as integers, the key masks as an array."""

    k: int
    max_model_len: int
    max_cached: int
    page: int
    num_pages: int
    max_page_seq: int
    ways: int
    tail: int
    max_new: int
    window: int
    own_gap: int
    memory_gap: int
    response_weight: int
    own_weight: int
    slope: int
    steps: int
    max_own: int
    masks: np.ndarray


class Memory(NamedTuple):
    """Responses of all requests."""

    tokens: np.ndarray  # [num_pages, page]
    seq: np.ndarray  # [num_pages], page number or -1
    uid: np.ndarray
    namespace: np.ndarray
    length: np.ndarray
    prev: np.ndarray
    next: np.ndarray
    base: np.ndarray  # way of the page's first token
    # (namespace, key, way, four tokens) -> seq; what is dead stays in it unseen
    entries: Any
    counters: np.ndarray


class Slots(NamedTuple):
    """What is kept a request slot, the last draft included."""

    uid: np.ndarray
    namespace: np.ndarray
    flags: np.ndarray
    committed: np.ndarray
    page: np.ndarray
    length: np.ndarray  # total length when drafting, -1 = no draft pending
    num: np.ndarray
    valid: np.ndarray
    number: np.ndarray  # requests of the namespace before this one
    learner: np.ndarray  # row of `Learned`
    pages: np.ndarray  # pages given to the request
    tokens: np.ndarray  # [slots, k]
    predicted: np.ndarray  # [slots, k, predictions]
    bins: np.ndarray  # [slots, k, predictions]
    source: np.ndarray  # of the last draft, OWN if there is none


class Learned(NamedTuple):
    """Acceptance by bin and the threshold, a row a namespace."""

    accepted: np.ndarray  # [rows, bins]
    observed: np.ndarray  # [rows, bins]
    threshold: np.ndarray  # [rows]


class Work(NamedTuple):
    """Places that one draft may use."""

    place: np.ndarray  # own: position; memory: seq
    quality: np.ndarray
    weight: np.ndarray
    token: np.ndarray
    ahead: np.ndarray  # [places, k] what follows in the memory
    key: np.ndarray


@njit
def hash_step(h: int, value: int) -> int:
    """Mix one value into a 32-bit hash."""
    h = ((h ^ value) * 0x85EBCA6B) & 0xFFFFFFFF
    return h ^ (h >> 15)


@njit
def page_base(c: Constants, number: int, ordinal: int) -> int:
    """Return the way of a page's first token: of which request, and its how-manieth."""
    return hash_step((number * 0x9E3779B1) & 0xFFFFFFFF, ordinal) % c.ways


@njit
def is_live(m: Memory, page: int) -> bool:
    """Tell whether a page number still names its page."""
    return page >= 0 and m.seq[page % m.seq.shape[0]] == page


@njit
def key_of_place(c: Constants, m: Memory, seq: int, key: int) -> Any:
    """Return (whether it can be read, its key) of a place in a live page."""
    page = seq // c.page
    offset = seq % c.page
    at = page % c.num_pages
    namespace = m.namespace[at]
    way = (m.base[at] + offset) % c.ways
    t0, t1, t2, t3 = -1, -1, -1, -1
    for back in range(32):
        if c.masks[key] >> back == 0:
            break
        if offset < 0:
            page = m.prev[page % c.num_pages]
            offset = c.page - 1
            if not is_live(m, page):
                return False, (-1, -1, -1, -1, -1, -1, -1)
        if (c.masks[key] >> back) & 1:
            t0, t1, t2, t3 = m.tokens[page % c.num_pages, offset], t0, t1, t2
        offset -= 1
    return True, (namespace, key, way, t0, t1, t2, t3)


@njit
def is_known(c: Constants, m: Memory, seq: int, key: int) -> bool:
    """Tell whether a place is in a live page and its key can still be read."""
    return is_live(m, seq // c.page) and key_of_place(c, m, seq, key)[0]


@njit
def known_places(c: Constants, m: Memory) -> np.ndarray:
    """Return (key, seq) of all places that can be found, [num_places, 2]."""
    result = np.zeros((len(m.entries), 2), np.int64)
    num = 0
    for name, seq in m.entries.items():
        if is_known(c, m, seq, name[1]):
            result[num, 0] = name[1]
            result[num, 1] = seq
            num += 1
    return result[:num]


@njit
def enter(c: Constants, m: Memory, seq: int) -> None:
    """Let each key of a place name it, unless a newer place is there."""
    for key in range(c.masks.shape[0]):
        readable, name = key_of_place(c, m, seq, key)
        if not readable:
            continue
        old = m.entries.get(name, -1)
        if old < seq or not is_known(c, m, old, key):
            m.entries[name] = seq


@njit
def observe(s: Slots, lr: Learned, slot: int, row: Any, total: int, out: Any) -> None:
    """Compare the pending draft with what was emitted.

    `out` is [rows, 3]; its row of this request grows by (waste, accepted, 1).
    """
    row_of = s.learner[slot]
    start = s.length[slot]
    if start < 0:
        return
    right = 0
    missed = False
    for j in range(min(s.num[slot], total - start)):
        truth = row[start + j]
        for q in range(s.bins.shape[2]):
            b = s.bins[slot, j, q]
            if b >= 0:
                lr.observed[row_of, b] += 16
                if s.predicted[slot, j, q] == truth:
                    lr.accepted[row_of, b] += 16
        if s.tokens[slot, j] != truth:
            missed = True
            break
        right += 1
    if missed:
        out[row_of, 0] += max(0, s.valid[slot] - right)
    out[row_of, 1] += min(right, s.valid[slot])
    out[row_of, 2] += 1
    s.length[slot] = -1


@njit
def adjust(
    lr: Learned,
    sums: Any,
    limit: int,
    budget: int,
    slope: int,
    shift: int,
    low: int,
    high: int,
) -> None:
    """Halve the full bins and steer the thresholds to the waste budget."""
    for row in range(lr.observed.shape[0]):
        if sums[row, 2] == 0:
            continue
        for b in range(lr.observed.shape[1]):
            while lr.observed[row, b] > limit:
                lr.observed[row, b] >>= 1
                lr.accepted[row, b] >>= 1
        error = sums[row, 0] * 16 + sums[row, 1] * slope // 16 - budget * sums[row, 2]
        bound = 1 << (shift - 3)
        error = min(max(error, -bound), bound)
        t = lr.threshold[row]
        lr.threshold[row] = min(max(t + ((t * error) >> shift), low), high)


@njit
def commit(
    c: Constants, m: Memory, s: Slots, slots: Any, rows: Any, totals: Any, prompts: Any
) -> None:
    """Append the new tokens of a batch: pages first, then tokens and hash entries."""
    n = c.num_pages
    num = slots.shape[0]
    start = np.zeros(num, np.int64)
    stop = np.zeros(num, np.int64)
    old = np.zeros(num, np.int64)
    room = np.zeros(num, np.int64)
    base = np.zeros(num, np.int64)
    need = 0
    for i in range(num):
        slot = slots[i]
        m.counters[layout.NEWEST_UID] = max(m.counters[layout.NEWEST_UID], s.uid[slot])
        if s.flags[slot] & layout.FLAG_CONTRIBUTE:
            start[i] = max(s.committed[slot], max(0, prompts[i] - c.tail))
            stop[i] = max(start[i], min(totals[i], start[i] + c.max_new))
            need += (stop[i] - start[i] + c.page - 1) // c.page + 1
    if m.counters[layout.NEXT_PAGE] + need >= c.max_page_seq:
        m.seq[:] = -1
        m.entries.clear()
        m.counters[layout.NEXT_PAGE] = 0
    for i in range(num):
        slot = slots[i]
        old[i] = s.page[slot]
        base[i] = m.counters[layout.NEXT_PAGE]
        if is_live(m, old[i]):
            room[i] = c.page - m.length[old[i] % n]
        rest = stop[i] - start[i] - room[i]
        if rest > 0:
            m.counters[layout.NEXT_PAGE] += (rest + c.page - 1) // c.page
    # Every page that was given out, then what of it outlived the others of this step.
    for i in range(num):
        slot = slots[i]
        rest = stop[i] - start[i] - room[i]
        fresh = max(0, (rest + c.page - 1) // c.page)
        for f in range(fresh):
            page = base[i] + f
            if page < m.counters[layout.NEXT_PAGE] - n:
                continue
            at = page % n
            m.seq[at] = page
            m.uid[at] = s.uid[slot]
            m.namespace[at] = s.namespace[slot]
            m.length[at] = 0
            m.prev[at] = page - 1 if f > 0 else old[i]
            m.next[at] = page + 1 if f < fresh - 1 else -1
            m.base[at] = page_base(c, s.number[slot], s.pages[slot] + f)
        s.pages[slot] += fresh
        if fresh > 0:
            s.page[slot] = base[i] + fresh - 1
    for i in range(num):
        slot = slots[i]
        rest = stop[i] - start[i] - room[i]
        if rest > 0 and is_live(m, old[i]):
            m.next[old[i] % n] = base[i]
        for t in range(start[i], stop[i]):
            into = t - start[i]
            if into < room[i]:
                page = old[i]
                offset = c.page - room[i] + into
            else:
                page = base[i] + (into - room[i]) // c.page
                offset = (into - room[i]) % c.page
            if not is_live(m, page):
                continue
            m.tokens[page % n, offset] = rows[i, t]
            m.length[page % n] = max(m.length[page % n], offset + 1)
        if stop[i] > start[i]:
            s.committed[slot] = stop[i]
    for i in range(num):
        for into in range(stop[i] - start[i]):
            if into < room[i]:
                seq = old[i] * c.page + c.page - room[i] + into
            else:
                seq = base[i] * c.page + into - room[i]
            if is_live(m, seq // c.page):
                enter(c, m, seq)


@njit
def match_class(quality: int) -> int:
    """Return the class of a match quality: 1, 2, 3, 4, 5-6, 7-9, 10-15, 16."""
    if quality <= 4:
        return quality - 1
    if quality <= 6:
        return 4
    if quality <= 9:
        return 5
    if quality <= 15:
        return 6
    return 7


@njit
def share_class(count: int, total: int) -> int:
    """Return the class of a share of the votes."""
    if count * 100 > total * 99:
        return 4
    if count * 5 > total * 4:
        return 3
    if count * 2 > total:
        return 2
    if count * 4 > total:
        return 1
    return 0


@njit
def count_class(count: int) -> int:
    """Return the class of a number of votes: 1, 2, 3-4, more."""
    if count <= 2:
        return count - 1
    return 2 if count < 5 else 3


@njit
def find_own(c: Constants, w: Work, row: Any, total: int, prompt: int) -> int:
    """Collect the places of the row where its last token occurs; return how many."""
    num = 0
    for pos in range(total - 1, 0, -1):
        if row[pos - 1] != row[total - 1]:
            continue
        run = 1
        while (
            run < c.window
            and pos - 1 - run >= 0
            and row[pos - 1 - run] == row[total - 1 - run]
        ):
            run += 1
        again = 0
        while (
            run + 1 + again < c.window
            and pos - 2 - run - again >= 0
            and row[pos - 2 - run - again] == row[total - 2 - run - again]
        ):
            again += 1
        w.place[num] = pos
        w.quality[num] = run + again // c.own_gap
        w.key[num] = w.quality[num] * 2**32 + pos
        num += 1
    if num > c.max_own:
        cut = np.sort(w.key[:num])[num - c.max_own]
        kept = 0
        for i in range(num):
            if w.key[i] >= cut:
                w.place[kept] = w.place[i]
                w.quality[kept] = w.quality[i]
                kept += 1
        num = kept
    for i in range(num):
        w.weight[i] = c.response_weight if w.place[i] >= prompt else 1
    return num


@njit
def find_memory(
    c: Constants,
    m: Memory,
    s: Slots,
    w: Work,
    slot: int,
    row: Any,
    total: int,
    num: int,
) -> int:
    """Add the places of other requests that the row's keys name; return how many."""
    n = c.num_pages
    own = num
    for key in range(c.masks.shape[0]):
        if total < 32 and c.masks[key] >> total != 0:
            continue
        t0, t1, t2, t3 = -1, -1, -1, -1
        for back in range(min(total, 32)):
            if (c.masks[key] >> back) & 1:
                t0, t1, t2, t3 = row[total - 1 - back], t0, t1, t2
        for way in range(c.ways):
            name = (s.namespace[slot], key, way, t0, t1, t2, t3)
            seq = m.entries.get(name, -1)
            page = seq // c.page
            offset = seq % c.page
            at = page % n
            if seq < 0 or not is_known(c, m, seq, key) or m.uid[at] == s.uid[slot]:
                continue
            if m.counters[layout.NEWEST_UID] - m.uid[at] >= c.max_cached:
                continue
            known = False
            for i in range(own, num):
                known = known or w.place[i] == seq
            if known:
                continue
            run = 0
            again = 0
            unbroken = True
            at_page = page
            at_offset = offset
            for back in range(min(c.window, total)):
                if at_offset < 0:
                    at_page = m.prev[at_page % n]
                    at_offset = c.page - 1
                    if not is_live(m, at_page):
                        break
                if m.tokens[at_page % n, at_offset] != row[total - 1 - back]:
                    unbroken = False
                elif unbroken:
                    run += 1
                else:
                    again += 1
                at_offset -= 1
            if run == 0:
                continue
            w.place[num] = seq
            w.quality[num] = run + again // c.memory_gap
            w.weight[num] = 1
            w.ahead[num, :] = -1
            at_page = page
            at_offset = offset + 1
            for j in range(c.k):
                if at_offset >= c.page:
                    at_page = m.next[at_page % n]
                    at_offset = 0
                    if not is_live(m, at_page):
                        break
                if at_offset >= m.length[at_page % n]:
                    break
                w.ahead[num, j] = m.tokens[at_page % n, at_offset]
                at_offset += 1
            num += 1
    return num


@njit
def draft(
    c: Constants,
    m: Memory,
    s: Slots,
    lr: Learned,
    w: Work,
    slot: int,
    row: Any,
    total: int,
    prompt: int,
    limit: int,
    placeholders: Any,
    chances: Any,
) -> int:
    """Draft for one row and remember it; return how many tokens to verify.

    Tokens stand in s.tokens, their chances (of 65536) in `chances`.
    """
    s.length[slot] = -1
    s.source[slot] = layout.OWN
    if total < 2 or limit <= 0 or (placeholders == row[total - 1]).any():
        return 0
    own = find_own(c, w, row, total, prompt)
    num = own
    if s.flags[slot] & layout.FLAG_READ:
        num = find_memory(c, m, s, w, slot, row, total, num)
    alive = np.ones(num, np.bool_)
    sums = np.zeros((2, layout.NUM_CLASSES), np.int64)
    drafted = 0
    valid = -1
    all_right = 65536
    threshold = lr.threshold[s.learner[slot]] >> 8
    learned = s.learner[slot]
    for j in range(limit):
        totals = np.zeros((2, layout.NUM_CLASSES), np.int64)
        for i in range(num):
            if not alive[i]:
                continue
            if i >= own:
                w.token[i] = w.ahead[i, j]
            elif w.place[i] + j < total:
                w.token[i] = row[w.place[i] + j]
            else:
                w.token[i] = s.tokens[slot, w.place[i] + j - total]
            if w.token[i] < 0:
                alive[i] = False
                continue
            source = 0 if i < own else 1
            for b in range(match_class(min(w.quality[i] + j, 16)) + 1):
                totals[source, b] += w.weight[i]
        if not alive.any():
            break
        stage = 0 if j == 0 else (1 if j < 4 else 2)
        best_count = np.zeros((3, layout.NUM_CLASSES), np.int64)
        best_token = np.zeros((3, layout.NUM_CLASSES), np.int64)
        best_age = np.full((3, layout.NUM_CLASSES), -1, np.int64)
        newest = np.full((3, layout.NUM_CLASSES), -1, np.int64)
        for i in range(num):
            if not alive[i]:
                continue
            first = True
            for z in range(i):
                if alive[z] and w.token[z] == w.token[i]:
                    first = False
                    break
            if not first:
                continue
            sums[:] = 0
            own_age = -1
            memory_age = -1
            for z in range(i, num):
                if alive[z] and w.token[z] == w.token[i]:
                    source = 0 if z < own else 1
                    for b in range(match_class(min(w.quality[z] + j, 16)) + 1):
                        sums[source, b] += w.weight[z]
                    if z < own:
                        own_age = max(own_age, w.place[z])
                    else:
                        memory_age = max(memory_age, w.place[z])
            for x in range(3):
                for b in range(layout.NUM_CLASSES):
                    if x < 2:
                        count = sums[x, b]
                        age = own_age if x == 0 else memory_age
                    else:
                        count = sums[0, b] * c.own_weight + sums[1, b]
                        age = memory_age if own_age < 0 else 2**50 + own_age
                    if count == 0:
                        continue
                    newest[x, b] = max(newest[x, b], age)
                    if count > best_count[x, b] or (
                        count == best_count[x, b] and age > best_age[x, b]
                    ):
                        best_count[x, b] = count
                        best_token[x, b] = w.token[i]
                        best_age[x, b] = age
        chance = -1
        token = -1
        winner = -1
        for x in range(3):
            for b in range(layout.NUM_CLASSES):
                q = x * layout.NUM_CLASSES + b
                s.bins[slot, j, q] = -1
                count = best_count[x, b]
                if count == 0:
                    continue
                if x < 2:
                    votes = totals[x, b]
                else:
                    votes = totals[0, b] * c.own_weight + totals[1, b]
                at = q * layout.NUM_SHARES + share_class(count, votes)
                at = at * layout.NUM_COUNTS + count_class(count)
                at = at * layout.NUM_STAGES + stage
                at = at * 2 + (1 if best_age[x, b] == newest[x, b] else 0)
                s.bins[slot, j, q] = at
                s.predicted[slot, j, q] = best_token[x, b]
                guess = (lr.accepted[learned, at] << 16) // lr.observed[learned, at]
                if guess >= chance:
                    chance = guess
                    token = best_token[x, b]
                    winner = b
        if (placeholders == token).any():
            break
        all_right = (all_right * chance) >> 16
        s.tokens[slot, j] = token
        chances[j] = chance
        drafted = j + 1
        if all_right * 4 < threshold * (4 + c.slope * min(j, c.steps)):
            valid = j
            break
        # Would the own row have said so, from places that match as well?
        alike = best_count[0, winner] > 0 and best_token[0, winner] == token
        if j == 0 and not alike:
            s.source[slot] = layout.MEMORY
        for i in range(num):
            if w.token[i] != token:
                alive[i] = False
    if valid < 0:
        valid = drafted
    s.length[slot] = total
    s.num[slot] = drafted
    s.valid[slot] = valid
    return valid


@dataclass
class LearnedModel:
    """All state of the learned scoring, and the two calls of a step."""

    settings: SuffixSettings
    max_num_reqs: int
    num_learners: int = 1

    def __post_init__(self) -> None:
        st = self.settings
        n, k = st.num_pages, st.num_speculative_tokens
        self.constants = Constants(
            k,
            st.max_model_len,
            st.max_cached_requests,
            st.page_size,
            n,
            st.max_page_seq,
            st.ways,
            st.prompt_tail,
            st.max_new_tokens,
            st.window,
            st.own_gap,
            st.memory_gap,
            st.response_weight,
            st.own_weight,
            st.threshold_slope,
            st.threshold_steps,
            layout.MAX_OWN_CANDIDATES,
            np.array(st.key_masks, np.int64),
        )

        def full(value: int, *shape: int) -> np.ndarray:
            return np.full(shape, value, np.int64)

        self.memory = Memory(
            full(0, n, st.page_size),
            *(full(-1, n) for _ in range(7)),
            new_dict(),
            full(0, layout.NUM_COUNTERS),
        )
        self.memory.counters[layout.NEWEST_UID] = -1
        reqs = self.max_num_reqs
        self.slots = Slots(
            *(full(value, reqs) for value in layout.NEW_SLOT),
            full(0, reqs, k),
            full(0, reqs, k, layout.NUM_PREDICTIONS),
            full(-1, reqs, k, layout.NUM_PREDICTIONS),
            full(layout.OWN, reqs),
        )
        prior = np.tile(
            layout.prior().numpy().astype(np.int64), (self.num_learners, 1, 1)
        )
        self.learned = Learned(
            prior[..., 0].copy(),
            prior[..., 1].copy(),
            full(st.first_threshold, self.num_learners),
        )
        self.started: dict[int, int] = {}
        places = 2**13 + st.max_model_len
        self.work = Work(
            *(full(0, places) for _ in range(4)), full(0, places, k), full(0, places)
        )

    def start(self, slot: int, uid: int, namespace: int = 0, flags: int = 3) -> None:
        """Put a new request into a slot; its namespace is its row of `Learned` too."""
        number = self.started.get(namespace, 0)
        self.started[namespace] = number + 1
        fields = layout.new_slot(uid, namespace, flags, number, namespace)
        for column, value in zip(self.slots, fields, strict=False):
            column[slot] = value

    def update(
        self,
        slots: np.ndarray,
        rows: np.ndarray,
        totals: np.ndarray,
        prompts: np.ndarray,
    ) -> None:
        """Learn from what was emitted and append it to the memory."""
        st = self.settings
        sums = np.zeros((self.num_learners, 3), np.int64)
        for i, slot in enumerate(slots):
            observe(self.slots, self.learned, slot, rows[i], totals[i], sums)
        adjust(
            self.learned,
            sums,
            st.max_observations,
            st.waste_budget,
            st.waste_slope,
            st.waste_shift,
            st.min_threshold,
            st.max_threshold,
        )
        commit(self.constants, self.memory, self.slots, slots, rows, totals, prompts)

    def draft(
        self,
        slot: int,
        row: np.ndarray,
        total: int,
        prompt: int,
        num_steps: int,
        placeholders: tuple[int, ...] = (),
    ) -> tuple[list[int], list[float]]:
        """Return the tokens to verify and the chance of each."""
        k = self.settings.num_speculative_tokens
        limit = min(k, num_steps, self.settings.max_model_len - total - 1)
        chances = np.zeros(k, np.int64)
        valid = draft(
            self.constants,
            self.memory,
            self.slots,
            self.learned,
            self.work,
            slot,
            row,
            total,
            prompt,
            limit,
            np.array(placeholders, np.int64),
            chances,
        )
        tokens = [int(t) for t in self.slots.tokens[slot, :valid]]
        return tokens, [float(x) / 65536 for x in chances[:valid]]
