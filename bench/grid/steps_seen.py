"""What kinds of steps a trimmer saw, what it expected of them, and what they took."""

import time
from typing import Any

# Steps are launched ahead of the device: the time between two launches is that of a
# step with drafts where so many before, and the next one, had some.
_IN_A_ROW = 4
# Sums of fractions are kept in so many parts.
PARTS = 1000


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
        # Of the steps with drafts just before, in a row: how many, of how many
        # requests, and what the last one should take, since when.
        self._row = self._num_requests = 0
        self._reckoned_us = 0
        self._since = 0.0
        manager.choose = self._counting_choose

    def begin_round(self) -> None:
        """Take what follows for other requests: they come whenever they come."""
        self._row = 0

    def _counting_choose(self, scheduler_output: Any) -> int:
        now = time.perf_counter()
        budget: int = self._choose(scheduler_output)
        counts, policy = self.counts, self._manager.policy
        row, reckoned_us, since = self._row, self._reckoned_us, self._since
        self._note(budget, now)
        if self._row > row >= _IN_A_ROW:
            counts["steps_timed"] += 1
            counts["reckoned_us"] += reckoned_us
            counts["took_us"] += round((now - since) * 1e6)
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

    def _note(self, budget: int, now: float) -> None:
        manager = self._manager
        # Beside prompts nothing is reckoned.
        in_row = budget and manager.expected_ms > 0
        alike = manager.num_requests == self._num_requests
        self._row = (self._row + 1 if alike else 1) if in_row else 0
        self._num_requests = manager.num_requests
        self._reckoned_us = round(manager.expected_ms * 1000)
        self._since = now
