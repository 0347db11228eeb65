"""How long steps take by the clock, beside what they should cost."""

import math
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from statistics import median

# Steps of one kind and about one number of requests before they tell anything.
_LEAST_STEPS = 8
# What is known is the median of the last so many: a few steps that waited for
# something, such as a kernel's first launch, say nothing of the others.
_STEPS_KEPT = 32
# A step longer than this many times what such steps took waited for something else.
# Not many times its cost: where nothing could be measured, costs have no unit.
_MOST_TIMES = 4.0
# How much cheaper plain steps may be than reckoned, as with short contexts, until some
# were seen. Where drafting gains less than that, it stops until they were; the doubt
# fades as well, as beside prompts no step tells anything.
_DOUBT = 1.25
_STEPS_TO_BELIEVE = 1000
# It comes back in about so many steps without plain ones.
_STEPS_TO_DOUBT = 500
# What was learned of steps with drafts fades in about so many plain ones, and sooner if
# it was learned of a few: a bad moment must not keep drafting off for long.
_STEPS_TO_FADE = 500
# Steps with places that come back after so many are learned anew.
_LONG_AGO = 100


class StepKind(IntEnum):
    """What a step of decodes has beside one token a request."""

    # No draft place is scheduled.
    PLAIN = 0
    # Places are scheduled, and none is verified: they take the host's time alone.
    PLACES = 1
    # Some are verified.
    DRAFTS = 2


# What the device takes is told by the steps in which it waited for nothing, if these
# are one in so many of those kept at least.
_ONE_IN = 4


@dataclass(frozen=True, slots=True)
class CostRatios:
    """By how much more than plain steps others exceed what they should cost.

    Attributes:
        drafts: steps that verify some.
        places: steps that have places for drafts and verify none.
        host: what the host takes for a step that verifies drafts, however many, in
            plain steps as they should cost; 0 where the device never waits for it.
    """

    drafts: float = 1.0
    places: float = 1.0
    host: float = 0.0


class _Known:
    """Steps of one kind, of about one number of requests.

    Attributes:
        typical: by how much they exceed their cost.
        device: by how much those do in which the device waited for nothing, or None
            if too few of them are kept.
        host_ms: what the median step took if the host is what it took so long for, or
            None. In steps that the device did not wait in the host took less than they
            did: nobody knows how much.
        last: the number of the last one, of all steps that told something.
        doubted: steps since it is known, while no plain ones are.

    Args:
        bucket: about how many requests.
    """

    def __init__(self, bucket: int) -> None:
        self.bucket = bucket
        # By how much each exceeded its cost, and what it took where it was awaited.
        self._steps: deque[tuple[float, float | None]] = deque(maxlen=_STEPS_KEPT)
        self.typical = 1.0
        self.device: float | None = None
        self.host_ms: float | None = None
        self.last = 0
        self.doubted = 0

    @property
    def steps_to_fade(self) -> float:
        return _STEPS_TO_FADE * len(self._steps) / _STEPS_KEPT

    @property
    def is_known(self) -> bool:
        return len(self._steps) >= _LEAST_STEPS

    def forget(self) -> None:
        self._steps.clear()

    def note(self, times: float, awaited_ms: float | None, number: int) -> None:
        self._steps.append((times, awaited_ms))
        self.typical = median(times for times, _ in self._steps)
        device = [times for times, awaited_ms in self._steps if awaited_ms is None]
        least = max(_LEAST_STEPS, len(self._steps) // _ONE_IN)
        self.device = median(device) if len(device) >= least else None
        host = sorted(ms for _, ms in self._steps if ms is not None)
        middle = len(self._steps) // 2 - len(device)
        self.host_ms = host[middle] if host and middle >= 0 else None
        self.last = number

    def excess(self, should: float, plain_ms: float) -> tuple[float, float]:
        """Return by how much the device and the host exceed what they should take.

        What the host takes does not grow with contexts: beside longer ones it exceeds
        by less.

        Args:
            should: what the device takes where only the host is known of: no longer
                than the steps, in any case.
            plain_ms: what a plain step should cost.

        Returns:
            The device, in costs of such steps; the host, in costs of plain ones, or 0
            where it is not known.
        """
        if self.host_ms is None:
            return self.typical, 0.0
        device = min(should, self.typical) if self.device is None else self.device
        return device, self.host_ms / plain_ms


class StepClock:
    """Tells how much dearer steps with drafts are than they should be.

    The costs measured at start know the forward pass and its rows. They do not know
    longer contexts, nor what the host does for a step. The clock of one process may
    correct them, not those of several ranks, which would disagree: the scheduler has
    one.
    """

    def __init__(self) -> None:
        # (kind, about how many requests) -> what they took.
        self._kinds: dict[tuple[StepKind, int], _Known] = {}
        self._last_ms: float | None = None
        self._last_requests = 0
        # About how many requests -> what a plain step of them should cost.
        self._plain_ms: dict[int, float] = {}
        self._num_told = 0

    def note(
        self,
        now_ms: float,
        num_requests: int,
        kind: StepKind,
        expected_ms: float,
        plain_ms: float,
        gpu_waited: bool,
    ) -> None:
        """Take in a step that was just done.

        Args:
            now_ms: the clock.
            num_requests: of the step.
            kind: of the step.
            expected_ms: what it should have cost; 0 where that cannot be said, as
                beside a prefill.
            plain_ms: what it should have cost without drafts.
            gpu_waited: whether the device had nothing to do until the host launched it.
        """
        last, self._last_ms = self._last_ms, now_ms
        drafting = self._known(StepKind.DRAFTS, num_requests)
        if drafting is not None and self._known(StepKind.PLAIN, num_requests) is None:
            drafting.doubted += 1
        same_batch = self._last_requests == num_requests
        self._last_requests = num_requests
        if last is None or expected_ms <= 0 or not same_batch:
            return
        key = (kind, num_requests.bit_length())
        known = self._kinds.setdefault(key, _Known(key[1]))
        times = (now_ms - last) / expected_ms
        if not known.is_known or times <= _MOST_TIMES * known.typical:
            self._num_told += 1
            away = self._num_told - known.last
            # Plain ones drafting goes by until it knows better.
            if kind is not StepKind.PLAIN and away > _LONG_AGO:
                known.forget()
            self._plain_ms[key[1]] = plain_ms
            awaited_ms = now_ms - last if gpu_waited else None
            known.note(times, awaited_ms, self._num_told)

    def ratios(self, num_requests: int, measured: bool) -> CostRatios:
        """Return by how much more than plain steps others exceed their cost.

        Args:
            num_requests: of a step.
            measured: whether costs were measured, so that they say milliseconds. Then
                plain steps are doubted until some were seen.

        Returns:
            The factors; 1 where too little is known.
        """
        plain = self._known(StepKind.PLAIN, num_requests)
        drafts = self._known(StepKind.DRAFTS, num_requests)
        places = self._known(StepKind.PLACES, num_requests)
        if plain is None:
            if drafts is None or not measured:
                return CostRatios()
            left = max(1.0 - drafts.doubted / _STEPS_TO_BELIEVE, 0.0)
            device, host = self._excess(drafts, 1.0)
            longer = max(device, host)
            plain_times = longer / (max(longer, 1.0) * _DOUBT) ** left
            return CostRatios(drafts=device / plain_times, host=host / plain_times)
        # The device takes what it should, or what it does for plain steps.
        should = 1.0 if measured else plain.typical
        should = should if plain.device is None else plain.device
        bare = max(self._excess(plain, should))
        by_places = 1.0
        if places is not None:
            times = max(self._excess(places, should))
            # They cannot cost less than nothing: that was another moment's host.
            by_places = max(times / _faded(bare, plain, times, places), 1.0)
        if drafts is None:
            return CostRatios(places=by_places)
        device, host = self._excess(drafts, should)
        # Both fade with one: which of them is the longer stays true.
        plain_times = _faded(bare, plain, max(device, host), drafts)
        return CostRatios(device / plain_times, by_places, host / plain_times)

    def _excess(self, known: _Known, should: float) -> tuple[float, float]:
        # Beside what plain steps of as many requests should cost.
        return known.excess(should, self._plain_ms[known.bucket])

    def _known(self, kind: StepKind, num_requests: int) -> _Known | None:
        """Return what is known of a kind of step, or else of a like number of requests.

        A batch that shrinks must not be learned of from the start.
        """
        bucket = num_requests.bit_length()
        for at in (bucket, bucket + 1, bucket - 1):
            known = self._kinds.get((kind, at))
            if known is not None and known.is_known:
                return known
        return None


def _faded(
    plain_times: float, plain: _Known, other_times: float, other: _Known
) -> float:
    """Return by how much plain steps exceed their cost, to compare others with."""
    age = max(abs(other.last - plain.last) - _STEPS_KEPT, 0)
    if plain.last < other.last:
        # They may have become cheaper since, and awake nothing would tell. Where that
        # is wrong, drafting sleeps for a moment, and they tell.
        fresh = math.exp(-age / _STEPS_TO_DOUBT)
        cheaper = min(plain_times, other_times / _DOUBT)
        return 1.0 / (fresh / plain_times + (1.0 - fresh) / cheaper)
    # The host may have been busier then, so that plain steps would have been as much
    # dearer than reckoned as the others.
    fresh = math.exp(-age / other.steps_to_fade)
    return 1.0 / (fresh / plain_times + (1.0 - fresh) / other_times)
