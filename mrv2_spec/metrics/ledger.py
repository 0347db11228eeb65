"""Books steps by request and by engine. Vectors throughout: it runs in every step."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from mrv2_spec.counters import (
    KINDS,
    PROPOSED,
    SOURCES,
    DraftCounts,
    Int64Array,
    vector_size,
)
from mrv2_spec.metrics.step import Ended, Int32Array, StepCounts, settle

# How many ended requests are remembered, the newest ones.
NUM_REMEMBERED = 4096


class Ledger:
    """The counters of one engine and of its requests.

    A request's counts live in the row of its slot; when it ends they are remembered
    for a while. They are parked while its slot is not known: when it is preempted, or
    took its slot in a step whose counts never came, until the next step that has it.

    Args:
        num_drafts: K, the most drafts a round.
        num_slots: how many slots there are.
        num_remembered: how many ended requests are remembered.
    """

    def __init__(
        self, num_drafts: int, num_slots: int, num_remembered: int = NUM_REMEMBERED
    ) -> None:
        self.num_drafts = num_drafts
        self.total = DraftCounts(num_drafts)
        self._sent = DraftCounts(num_drafts)
        self._size = vector_size(num_drafts)
        self._rows = np.zeros((num_slots, self._size), dtype=np.int64)
        # The same as one long row.
        self._cells = self._rows.reshape(-1)
        self._slot_of: dict[str, int] = {}
        self._parked: dict[str, DraftCounts] = {}
        self._ended: deque[tuple[str, DraftCounts]] = deque(maxlen=num_remembered)
        self._kind_size = len(SOURCES) * (num_drafts + 1)
        self._kind_offsets = np.arange(len(KINDS))[:, None] * self._kind_size
        self._num_lengths = len(KINDS) * self._kind_size

    def book(
        self,
        step: StepCounts,
        req_ids: Sequence[str],
        *,
        new: Collection[str] = (),
        finished: Collection[str] = (),
        dropped: Sequence[int] = (),
    ) -> None:
        """Book one step.

        Args:
            step: what the runner found.
            req_ids: requests, in the order of the step.
            new: those that took their slots in this step.
            finished: requests that ended before it; others that gave up their slots
                were preempted.
            dropped: batch indices whose output nobody takes any more: their drafts
                count as never issued, their rounds do not count.
        """
        self._end(step.ended, finished)
        slots = step.slots
        if slots.shape[0] == 0:
            return
        self._begin(slots, req_ids, new)
        counted = step.is_round
        if dropped:
            counted = counted.copy()
            counted[list(dropped)] = False
        num_counted = np.count_nonzero(counted)
        all_count = num_counted == slots.shape[0]
        drafts = step.drafts
        if drafts is None:
            self._add_bare(slots if all_count else slots[counted])
            return
        lengths, fillers = settle(step, drafts, self.num_drafts)
        sources = drafts[2]
        for i in dropped:
            if step.is_round[i]:
                self._lose(req_ids[i], int(lengths[PROPOSED, i]), int(sources[i]))
        if not all_count:
            slots, sources, fillers = slots[counted], sources[counted], fillers[counted]
            lengths = lengths[:, counted]
        if num_counted:
            self._add(slots, lengths, sources, fillers)

    def skip(
        self,
        new: Collection[str],
        finished: Collection[str],
        preempted: Collection[str],
    ) -> None:
        """Note who came and went in a step that told nothing of its drafts.

        Args:
            new: requests that took their slots in it.
            finished: requests that ended before it.
            preempted: requests that were preempted before it.
        """
        gone = self._slot_of.keys() & {*finished, *preempted}
        self._end([Ended(req_id, 0, 0) for req_id in gone], finished)
        for req_id in new:
            self._parked.setdefault(req_id, DraftCounts(self.num_drafts))

    def _add(
        self,
        slots: Int64Array,
        lengths: Int32Array,
        sources: Int32Array,
        fillers: Int32Array,
    ) -> None:
        places = lengths + self._kind_offsets
        if np.count_nonzero(sources):
            # There are two; without a draft it is the first, whatever the drafter says.
            second = np.logical_and(sources > 0, lengths[PROPOSED])
            places += second * (self.num_drafts + 1)
        starts = slots * self._size
        np.add.at(self._cells, (places + starts).ravel(), 1)
        np.add.at(self.total.values, places.ravel(), 1)
        if np.count_nonzero(fillers):
            self._cells[starts + self._num_lengths] += fillers
            self.total.values[self._num_lengths] += fillers.sum()

    def _add_bare(self, slots: Int64Array) -> None:
        """Add rounds without a draft, or a place for one."""
        places = self._kind_offsets + slots * self._size
        np.add.at(self._cells, places.ravel(), 1)
        self.total.values[: self._num_lengths : self._kind_size] += slots.shape[0]

    def _lose(self, req_id: str, num_drafts: int, source: int) -> None:
        num_drafts = min(max(num_drafts, 0), self.num_drafts)
        source = min(max(source, 0), len(SOURCES) - 1)
        place = source - len(SOURCES)
        self.total.values[place] += num_drafts
        if req_id in self._slot_of:
            self._rows[self._slot_of[req_id], place] += num_drafts
        elif req_id in self._parked:
            self._parked[req_id].values[place] += num_drafts

    def _begin(
        self, slots: Int64Array, req_ids: Sequence[str], new: Collection[str]
    ) -> None:
        if not new and not self._parked:
            return
        for i, req_id in enumerate(req_ids):
            if req_id not in new and req_id not in self._parked:
                continue
            slot = int(slots[i])
            self._slot_of[req_id] = slot
            before = self._parked.pop(req_id, None)
            self._rows[slot] = 0 if before is None else before.values

    def _end(self, ended: Iterable[Ended], finished: Collection[str]) -> None:
        for req_id, num_drafts, source in ended:
            self._lose(req_id, num_drafts, source)
            slot = self._slot_of.pop(req_id, None)
            if slot is None:
                continue
            counts = DraftCounts(self.num_drafts, self._rows[slot].copy())
            self._rows[slot] = 0
            if req_id in finished:
                self._ended.append((req_id, counts))
            else:
                self._parked[req_id] = counts
        for req_id in self._parked.keys() & finished:
            self._ended.append((req_id, self._parked.pop(req_id)))

    def of_request(self, req_id: str) -> DraftCounts | None:
        """Return what a request counted so far, or None if it is not remembered."""
        if req_id in self._slot_of:
            row = self._rows[self._slot_of[req_id]].copy()
            return DraftCounts(self.num_drafts, row)
        if req_id in self._parked:
            return self._parked[req_id]
        return next((c for name, c in reversed(self._ended) if name == req_id), None)

    def requests(self) -> list[tuple[str, DraftCounts]]:
        """Return all requests that are remembered, the ended ones first."""
        found = list(self._ended)
        for req_id in (*self._parked, *self._slot_of):
            counts = self.of_request(req_id)
            assert counts is not None
            found.append((req_id, counts))
        return found

    def take_unsent(self) -> DraftCounts | None:
        """Return what was booked since the last call, or None for nothing."""
        unsent = self.total - self._sent
        if not unsent.values.any():
            return None
        self._sent += unsent
        return unsent
