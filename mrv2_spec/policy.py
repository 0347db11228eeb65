"""How many drafts a step verifies, and whether any are worth scheduling at all.

A pure function of host numbers that all ranks share: the tallies of earlier steps, a
fixed number of steps old, and the costs measured at start.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mrv2_spec.kernels.value_drafts import BIN_STEPS_PER_OCTAVE, NUM_BINS, ROUNDS
from mrv2_spec.step_clock import CostRatios
from mrv2_spec.step_costs import Floats, StepCosts

# What a draft of each bin is worth: the middle of the bin, in octaves.
_BIN_VALUES = 2.0 ** (-(np.arange(NUM_BINS) + 0.5) / BIN_STEPS_PER_OCTAVE)
# A draft of each bin as a place, and what it is worth.
_BIN_WEIGHTS = np.stack((np.ones(NUM_BINS), _BIN_VALUES))
# Places a request at which the value of a step's best drafts is followed.
_PLACES = np.unique(
    np.concatenate(([0.0], 2.0 ** np.arange(-6.0, 7.25, 0.25), np.arange(1.0, 17.0)))
)
# Steps of so many tokens are reckoned with at most, by their costs one by one.
_MAX_TOKENS = 16384
# Budgets to choose from beyond the largest graph, or without any.
_COARSE = np.unique(np.round(2.0 ** np.arange(0.0, 14.25, 0.25))).astype(np.int64)
# What is known about values is the mean of about so many rounds of requests, in so many
# steps at least and at most. A budget chosen from the last step alone is wrong as often
# as that was unusual; one from too many is late where the text changes its nature.
_ROUNDS_AVERAGED = 512
_MIN_STEPS_AVERAGED, _MAX_STEPS_AVERAGED = 4, 16
# A budget must be better than none by this to be chosen: costs are not exact.
_MARGIN = 1.01
# Drafting stops when its mean gain in the last steps was less than scheduling drafts
# costs, but not before so many rounds of requests, within limits of steps; it begins
# again when the mean in so many of the steps that tell is clearly more than that. The
# mean: of a text that pays, too, some steps gain nothing.
_ROUNDS_TO_SLEEP = 512
_MIN_STEPS_TO_SLEEP, _MAX_STEPS_TO_SLEEP = 8, 32
_LEAST_STEPS_OF_MEAN = 16
_MIN_STEPS_TO_WAKE, _MAX_STEPS_TO_WAKE = 3, 12
_SLEEP_MARGIN, _WAKE_MARGIN = 1.02, 1.04
# What a step counts at most, so that a few do not decide.
_MOST_GAIN = 1.1
# The mean begins anew with a batch that is so many times as large, or as small, and by
# more than a few requests: while a batch fills up its first requests' drafts look good,
# as rows are cheap beside few.
_OTHER_BATCH, _FEW_REQUESTS = 1.5, 4
# Contexts are reckoned with up to so many times the one measured: not all attention
# goes on growing with them.
_MOST_CONTEXT = 16.0
# In the first steps nothing is known: a step of up to so many tokens is verified whole.
_FREE_TOKENS = 16


class ValueCurve:
    """What a step's best drafts are worth by their number, both a request.

    A mean of the steps' curves, not the curve of their mean: budgets are for single
    steps, and with few requests most of the drafts come in few of the steps.
    """

    def __init__(self) -> None:
        self._values = np.zeros_like(_PLACES)
        self._steps = 0
        # Of the newest step: places of at least a value, and what they are worth.
        self._newest = np.zeros((2, NUM_BINS + 1))

    @property
    def is_known(self) -> bool:
        """Tell whether any step was seen."""
        return self._steps > 0

    def observe(self, tally: npt.NDArray[np.int32]) -> None:
        """Take in a step; [TALLY_WIDTH] draft places by value, and rounds."""
        rounds = int(tally[ROUNDS])
        if rounds == 0:
            return
        np.cumsum(tally[:NUM_BINS] * _BIN_WEIGHTS, axis=1, out=self._newest[:, 1:])
        most = max(_ROUNDS_AVERAGED // rounds, _MIN_STEPS_AVERAGED)
        self._steps = min(self._steps + 1, most, _MAX_STEPS_AVERAGED)
        new = np.interp(_PLACES * rounds, *self._newest)
        new *= 1.0 / (rounds * self._steps)
        self._values *= 1.0 - 1.0 / self._steps
        self._values += new

    def __call__(self, budgets: npt.NDArray[np.int64], num_requests: int) -> Floats:
        """Return what the best drafts of so many requests are worth, by budget."""
        worth: Floats = np.interp(budgets / num_requests, _PLACES, self._values)
        return worth * num_requests


class DraftPolicy:
    """Chooses budgets, and falls asleep where drafting does not pay.

    Args:
        costs: what steps cost.
        may_sleep: whether drafts are also made and judged while none is scheduled.

    Attributes:
        asleep: whether no draft places need be scheduled.
        gain: tokens per ms of the best budget last looked at, over those of a plain
            step.
        expected_accepted: the value of the places last chosen.
        cost_ratios: by how much steps with drafts, or with places for some, were found
            to exceed their costs, beside plain ones, and what the host takes for one.
        context_ratio: the mean context of the requests, in measured ones.
    """

    def __init__(self, costs: StepCosts, may_sleep: bool) -> None:
        self.asleep = False
        self.gain = 1.0
        self.expected_accepted = 0.0
        self.cost_ratios = CostRatios()
        self.context_ratio = 1.0
        self._may_sleep = may_sleep
        self._curve = ValueCurve()
        # Since it fell asleep or woke.
        self._steps_in_state = 0
        # The mean gain of the last steps: how many, with how many requests about.
        self._last_gain = self._mean_gain = 0.0
        self._mean_steps = 0
        self._mean_requests = 0
        self._steps_to_wake = _MIN_STEPS_TO_WAKE
        self.use_costs(costs, ())

    def use_costs(self, costs: StepCosts, graph_sizes: Sequence[int]) -> None:
        """Go by costs measured for graphs of these ascending sizes."""
        tokens = np.arange(_MAX_TOKENS + 1, dtype=np.float64)
        self._bare_ms = costs.bare(tokens)
        self._drafting_ms = costs.drafting(tokens)
        self._context_ms = costs.context(tokens)
        self._graph_sizes = np.asarray(graph_sizes, np.int64)
        # The same to search in.
        self._sorted_sizes = list(graph_sizes)

    def cost_of(self, num_requests: int, budget: int) -> float:
        """Return the ms that a step of decodes should take; 0: without drafts."""
        rows_ms = self._drafting_ms if budget else self._bare_ms
        rows = min(num_requests + budget, _MAX_TOKENS)
        return float(rows_ms[rows]) + self._contexts_ms(num_requests)

    def _contexts_ms(self, num_requests: int) -> float:
        context_ms = self._context_ms[min(num_requests, _MAX_TOKENS)]
        return float(context_ms) * min(self.context_ratio, _MOST_CONTEXT)

    def observe(self, tally: npt.NDArray[np.int32]) -> None:
        """Take in the tally of an earlier step; [TALLY_WIDTH]."""
        self._curve.observe(tally)

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
        if not self._curve.is_known:
            return max(0, min(_FREE_TOKENS - num_non_draft_tokens, limit))
        budget = self._best(num_non_draft_tokens, num_drafting, limit)
        if self.asleep:
            self._maybe_wake(num_drafting)
            return 0
        steps = max(_MIN_STEPS_TO_SLEEP, _ROUNDS_TO_SLEEP // num_drafting)
        steps = min(steps, _MAX_STEPS_TO_SLEEP)
        self._note_gain(num_drafting, max(steps, _LEAST_STEPS_OF_MEAN))
        long_enough = self._mean_steps >= steps
        if self._may_sleep and long_enough and self._mean_gain < _SLEEP_MARGIN:
            self._fall_asleep()
        return budget

    def pass_by(self, num_tokens: int, num_requests: int, max_drafts: int) -> None:
        """Take note of a step without drafts; asleep, that is what wakes it."""
        if self.asleep and num_requests and max_drafts > 0:
            self._best(num_tokens, num_requests, max_drafts)
            self._maybe_wake(num_requests)

    @property
    def stirring(self) -> bool:
        """Tell whether more steps like the last one that told would wake it."""
        return self.asleep and self._last_gain >= _WAKE_MARGIN

    def _fall_asleep(self) -> None:
        # Where it woke for nothing, the next time it takes more to wake it: in the
        # middle of a copy every draft looks good until one of them was taken.
        woke_for_nothing = self._steps_in_state <= 2 * _MAX_STEPS_TO_SLEEP
        self._steps_to_wake = (
            min(2 * self._steps_to_wake, _MAX_STEPS_TO_WAKE)
            if woke_for_nothing
            else _MIN_STEPS_TO_WAKE
        )
        self.asleep = True
        self._last_gain = 0.0
        self._steps_in_state = self._mean_steps = 0

    def _maybe_wake(self, num_requests: int) -> None:
        self._note_gain(num_requests, self._steps_to_wake)
        long_enough = self._mean_steps >= self._steps_to_wake
        if long_enough and self._mean_gain >= _WAKE_MARGIN:
            self.asleep = False
            self._steps_in_state = self._mean_steps = 0

    def _note_gain(self, num_requests: int, most_steps: int) -> None:
        """Take the step's gain into the mean of so many steps, or of all there are."""
        self._steps_in_state += 1
        fewer, more = sorted((num_requests, self._mean_requests))
        if self._mean_steps == 0 or more > _OTHER_BATCH * fewer + _FEW_REQUESTS:
            self._mean_requests, self._mean_steps = num_requests, 0
        self._mean_steps = min(self._mean_steps + 1, most_steps)
        # Without a budget a step gains nothing, and loses what its places cost.
        gain = min(max(self.gain, 1.0 / self.cost_ratios.places), _MOST_GAIN)
        self._last_gain = gain
        before = self._mean_gain if self._mean_steps > 1 else 0.0
        self._mean_gain = before + (gain - before) / self._mean_steps

    def _best(self, num_tokens: int, num_requests: int, limit: int) -> int:
        """Return the best budget, 0 if none is clearly better than none."""
        limit = min(limit, _MAX_TOKENS - num_tokens)
        if limit <= 0:
            self.gain, self.expected_accepted = 0.0, 0.0
            return 0
        totals = self._sizes_to_choose(num_tokens, num_tokens + limit)
        accepted = self._curve(totals - num_tokens, num_requests)
        ratios, plain_ms = self.cost_ratios, self.cost_of(num_requests, 0)
        host_ms = ratios.host * plain_ms
        decodes_ms = float(self._drafting_ms[num_requests])
        decodes_ms += self._contexts_ms(num_requests)
        if num_tokens > num_requests:
            # The device is busy with them, whatever the host does.
            decodes_ms = max(decodes_ms, host_ms / ratios.drafts)
        # Prefills are charged what they cost without drafts: in a long step a draft
        # that costs more than a later step would looks cheap.
        ms = self._drafting_ms[totals] - float(self._drafting_ms[num_tokens])
        if num_tokens > num_requests:
            # Where these alone would take longer than with drafts beside them, drafts
            # are held to cost nothing: what they save is not the decodes' own.
            np.maximum(ms, 0.0, out=ms)
        ms += decodes_ms
        ms *= ratios.drafts
        # While the device waits for the host, more drafts cost nothing.
        np.maximum(ms, host_ms, out=ms)
        rates = (num_requests + accepted) / ms
        best = int(rates.argmax())
        self.gain = float(rates[best]) * plain_ms / num_requests
        self.expected_accepted = float(accepted[best])
        # The step has its places already.
        pays = self.gain * ratios.places >= _MARGIN
        return int(totals[best]) - num_tokens if pays else 0

    def _sizes_to_choose(self, num_tokens: int, most: int) -> npt.NDArray[np.int64]:
        # A step is padded to a graph's size: use it up. Beyond the graphs, and without
        # any, a coarse choice is as good.
        sizes = self._graph_sizes
        first = bisect_left(self._sorted_sizes, num_tokens + 1)
        end = bisect_left(self._sorted_sizes, most)
        if end < sizes.shape[0]:
            totals = sizes[first : end + 1].copy()
            totals[-1] = most
            return totals
        beyond = num_tokens + _COARSE
        largest = sizes[-1] if end else 0
        beyond = beyond[(beyond > largest) & (beyond < most)]
        return np.concatenate((sizes[first:end], beyond, [most]))
