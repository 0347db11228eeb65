"""What kinds of steps a trimmer saw, what it expected of them, and what they took."""

import time
from typing import Any

# Steps are launched ahead of the device: the time between two launches is that of a
# step where so many before, and the next one, are like it.
_IN_A_ROW = 4
# Sums of fractions are kept in so many parts.
PARTS = 1000


class Launches:
    """Tells what a step took, where steps like it came before and after."""

    def __init__(self) -> None:
        # Of the steps just before, in a row: how many, what they are like, what the
        # last one should take, and since when.
        self._row = 0
        self._alike: Any = None
        self._reckoned_ms = self._since = 0.0

    def begin(self) -> None:
        """Take what follows for other requests: they come whenever they come."""
        self._row = 0

    def note(
        self, now: float, alike: Any, reckoned_ms: float
    ) -> tuple[float, float] | None:
        """Take in a step that is launched.

        Args:
            now: when, in seconds.
            alike: equal for steps that take about as long; None for one that is like
                no other.
            reckoned_ms: what it should take.

        Returns:
            What the step before it took and should have taken, in ms; None where that
            is not known.
        """
        row, last, since = self._row, self._reckoned_ms, self._since
        self._row = (row + 1 if alike == self._alike else 1) if alike is not None else 0
        self._alike, self._reckoned_ms, self._since = alike, reckoned_ms, now
        if self._row > row >= _IN_A_ROW:
            return (now - since) * 1000, last
        return None


class StepsSeen:
    """Counts the steps of one trimmer from now on.

    Attributes:
        counts: ``steps_with``, steps that verified some drafts, ``steps_without``,
            those that verified none of the scheduled ones, and ``steps_asleep``. Of
            those with drafts: ``budget``, the places verified; in thousandths
            ``expected``, the tokens that were expected to be accepted, and
            ``clock_drafts`` and ``clock_host``, the factors that the scheduler's clock
            had for their costs.
            Of ``steps_timed``, amid others of as many requests that had drafts as well:
            ``reckoned_us``, what they should have taken, and ``took_us``.

    Args:
        manager: the trimmer, as the runner calls it.
    """

    def __init__(self, manager: Any) -> None:
        names = ("steps_with", "steps_without", "steps_asleep", "budget", "expected")
        more = ("clock_drafts", "clock_host", "steps_timed", "reckoned_us", "took_us")
        self.counts = dict.fromkeys((*names, *more), 0)
        self._manager = manager
        self._choose = manager.choose
        self._launches = Launches()
        manager.choose = self._counting_choose

    def begin_round(self) -> None:
        """Take what follows for other requests: they come whenever they come."""
        self._launches.begin()

    def _counting_choose(self, scheduler_output: Any) -> int:
        now = time.perf_counter()
        budget: int = self._choose(scheduler_output)
        manager, counts = self._manager, self.counts
        policy, reckoned_ms = manager.policy, manager.expected_ms
        # Beside prompts nothing is reckoned.
        timed = bool(budget) and reckoned_ms > 0
        alike = manager.num_requests if timed else None
        known = self._launches.note(now, alike, reckoned_ms)
        if known is not None:
            took_ms, should_ms = known
            counts["steps_timed"] += 1
            counts["reckoned_us"] += round(should_ms * 1000)
            counts["took_us"] += round(took_ms * 1000)
        if budget:
            counts["steps_with"] += 1
            counts["budget"] += budget
            counts["expected"] += round(policy.expected_accepted * PARTS)
            counts["clock_drafts"] += round(policy.cost_ratios.drafts * PARTS)
            counts["clock_host"] += round(policy.cost_ratios.host * PARTS)
        elif scheduler_output.scheduled_spec_decode_tokens:
            counts["steps_without"] += 1
        elif policy.asleep:
            counts["steps_asleep"] += 1
        return budget
