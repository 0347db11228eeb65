"""How many drafts a step verifies, and whether any are worth scheduling at all.

A pure function of host numbers that all ranks share: the tallies of earlier steps, a
fixed number of steps old, and the costs measured at start.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mrv2_spec.kernels.value_drafts import BIN_STEPS_PER_OCTAVE, NUM_BINS, ROUNDS
from mrv2_spec.step_costs import Floats, StepCosts

# What a draft of each bin is worth: the middle of the bin, in octaves.
_BIN_VALUES = 2.0 ** (-(np.arange(NUM_BINS) + 0.5) / BIN_STEPS_PER_OCTAVE)
# Budgets at which the value of a step's best drafts is followed.
_BUDGETS = np.concatenate(
    [np.arange(0, 32, 2), np.arange(32, 128, 8), np.arange(128, 1025, 32), [8192]]
).astype(np.float64)
# Half of what is known about values comes from so many rounds, or from so many steps,
# whichever is more; and never from more than the last number of steps.
_HALF_LIFE_ROUNDS = 128
_MIN_HALF_LIFE_STEPS, _MAX_HALF_LIFE_STEPS = 3, 64
# A budget must be better than none by this to be chosen: costs are not exact.
_MARGIN = 1.01
# Drafting stops when it has not paid for so many steps, and begins again when it would
# have paid, by more than the margin that scheduling drafts may cost, for so many.
_STEPS_TO_SLEEP, _STEPS_TO_WAKE = 32, 8
_WAKE_MARGIN = 1.04
# In the first steps nothing is known: a step of up to so many tokens is verified whole.
_FREE_TOKENS = 16


class ValueCurve:
    """The expected value of a step's best drafts by their number, a moving average."""

    def __init__(self) -> None:
        self.rounds = 0.0
        self._values = np.zeros_like(_BUDGETS)

    @property
    def is_known(self) -> bool:
        return self.rounds > 0

    def observe(self, tally: npt.NDArray[np.int32]) -> None:
        """Take in a step; [TALLY_WIDTH] draft places by value, and rounds."""
        rounds = float(tally[ROUNDS])
        if rounds == 0:
            return
        places = np.concatenate(([0.0], np.cumsum(tally[:NUM_BINS])))
        values = np.concatenate(([0.0], np.cumsum(tally[:NUM_BINS] * _BIN_VALUES)))
        half_life = min(
            max(_HALF_LIFE_ROUNDS / rounds, _MIN_HALF_LIFE_STEPS), _MAX_HALF_LIFE_STEPS
        )
        new = 1.0 if not self.is_known else 1.0 - 0.5 ** (1.0 / half_life)
        self._values += new * (np.interp(_BUDGETS, places, values) - self._values)
        self.rounds += new * (rounds - self.rounds)

    def __call__(self, budgets: Floats, num_requests: int) -> Floats:
        """Return what the best drafts of so many requests are worth, by budget."""
        scale = num_requests / self.rounds
        # More requests bring more drafts of the same kind.
        expected: Floats = scale * np.interp(budgets / scale, _BUDGETS, self._values)
        return expected


class DraftPolicy:
    """Chooses budgets, and falls asleep where drafting does not pay.

    Args:
        costs: what steps cost.
        may_sleep: whether drafts are also made and judged while none is scheduled.

    Attributes:
        asleep: whether no draft places need be scheduled.
        gain: tokens per ms of the best budget last looked at, over those without.
        expected_accepted: the value of the places last chosen.
    """

    def __init__(self, costs: StepCosts, may_sleep: bool) -> None:
        self.costs = costs
        self.asleep = False
        self.gain = 1.0
        self.expected_accepted = 0.0
        self._may_sleep = may_sleep
        self._graph_sizes: Sequence[int] = ()
        self._all = ValueCurve()
        self._fresh = ValueCurve()
        self._steps_against = 0

    def use_costs(self, costs: StepCosts, graph_sizes: Sequence[int]) -> None:
        """Go by costs measured for graphs of these ascending sizes."""
        self.costs = costs
        self._graph_sizes = graph_sizes

    def observe(self, tallies: npt.NDArray[np.int32]) -> None:
        """Take in the tallies of an earlier step; [2, TALLY_WIDTH]."""
        self._all.observe(tallies[0])
        self._fresh.observe(tallies[1])

    def choose(
        self,
        num_non_draft_tokens: int,
        num_drafting: int,
        num_scheduled_drafts: int,
        max_draft_budget: int,
    ) -> int:
        """Return the number of draft places to verify in a step that has drafts.

        Args:
            num_non_draft_tokens: scheduled tokens that are no drafts.
            num_drafting: requests with scheduled drafts.
            num_scheduled_drafts: scheduled draft places.
            max_draft_budget: no more than this many.
        """
        limit = max(0, min(num_scheduled_drafts, max_draft_budget))
        if limit == 0:
            return 0
        if not self._all.is_known:
            return max(0, min(_FREE_TOKENS - num_non_draft_tokens, limit))
        if self.asleep:
            self._maybe_wake(num_non_draft_tokens, num_drafting, limit)
            return 0
        budget = self._best(self._all, num_non_draft_tokens, num_drafting, limit)
        self._count(budget == 0, _STEPS_TO_SLEEP)
        return budget

    def pass_by(self, num_tokens: int, num_requests: int, max_drafts: int) -> None:
        """Take note of a step without drafts; asleep, that is what wakes it."""
        if self.asleep:
            self._maybe_wake(num_tokens, num_requests, max_drafts)

    def _maybe_wake(self, num_tokens: int, num_requests: int, max_drafts: int) -> None:
        if not self._fresh.is_known or num_requests == 0:
            return
        self._best(self._fresh, num_tokens, num_requests, max_drafts)
        self._count(self.gain >= _WAKE_MARGIN, _STEPS_TO_WAKE)

    def _count(self, is_against: bool, limit: int) -> None:
        self._steps_against = self._steps_against + 1 if is_against else 0
        if self._steps_against >= limit and self._may_sleep:
            self.asleep = not self.asleep
            self._steps_against = 0

    def _best(
        self, curve: ValueCurve, num_tokens: int, num_requests: int, limit: int
    ) -> int:
        """Return the best budget, 0 if none is clearly better than none."""
        budgets = self._candidates(num_tokens, limit)
        accepted = curve(budgets, num_requests)
        rates = (num_requests + accepted) / self.costs.drafting(num_tokens + budgets)
        plain_cost = self.costs.plain(np.array([float(num_tokens)]))[0]
        best = int(np.argmax(rates))
        self.gain = float(rates[best] * plain_cost / num_requests)
        self.expected_accepted = float(accepted[best])
        return int(budgets[best]) if self.gain >= _MARGIN else 0

    def _candidates(self, num_tokens: int, limit: int) -> Floats:
        # A step is padded to a graph's size: use it up. Beyond the graphs, and without
        # any, a coarse choice is as good.
        sizes = np.asarray(self._graph_sizes, np.float64) - num_tokens
        inside = sizes[(sizes > 0) & (sizes < limit)]
        most = self._graph_sizes[-1] if self._graph_sizes else 0
        outside = _BUDGETS[(_BUDGETS + num_tokens > most) & (_BUDGETS > 0)]
        return np.concatenate((inside, outside[outside < limit], [float(limit)]))
