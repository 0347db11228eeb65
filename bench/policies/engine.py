"""The plugin's own policy, going by what an engine measured steps to cost.

What a step takes is charged by the simulator; what the policy believes is the engine's
measurement, corrected by its clock. So a replay tells what wrong beliefs cost. Left
out: prompts, the time that looks take, and a host that is slower than the device.
"""

from collections import deque
from pathlib import Path

import numpy as np
from grid.record import read

from mrv2_spec.kernels.value_drafts import (
    MAX_COUNT,
    NUM_BINS,
    ROUNDS,
    TALLY_WIDTH,
    TOKENS,
    bin_edges,
)
from mrv2_spec.policy import DraftPolicy
from mrv2_spec.speculator import looks
from mrv2_spec.step_clock import StepClock, StepKind
from mrv2_spec.step_costs import CostCurve, StepCosts

from .base import Outcome, Step
from .confidence import Confidence, fill

# Query tokens of a decode graph that fit one tile of attention, for the 8B shape: a
# request is scheduled no more where that is at least this share of k + 1.
_TILE_TOKENS, _LEAST_SHARE = 16, 0.75
_MOST_DRAFTS = 4096
_EDGES = np.array(bin_edges())[::-1]
# Counts of what came true are halved above this, as on the device.
COUNT_LIMIT = float(MAX_COUNT)


def measured_costs(path: Path, k: int) -> tuple[StepCosts, list[int]]:
    """Return what the engine measured that started last with so many drafts.

    Args:
        path: the grid's record of costs.
        k: drafts a request at most.

    Returns:
        The costs, and the sizes of its graphs.

    Raises:
        ValueError: the record has none, or is not whole.
    """
    found = [line for line in read(path) if line["k"] == k]
    if not found:
        raise ValueError(f"{path.name} has no engine with k={k}")
    line = found[-1]
    most = line["max_graph_tokens"]

    def curve(name: str) -> CostCurve:
        tokens, ms = np.array(line[name]).T
        return CostCurve(tokens, ms, most)

    costs = StepCosts(curve("plain"), curve("drafting"), curve("bare"))
    return costs, [int(size) for size, _ in line["drafting"] if size <= most]


class Engine:
    """Asks the plugin's policy, and sleeps and looks as it says.

    Args:
        confidence: values drafts.
        k: drafts a request at most.
        costs: what the policy believes steps to cost.
        sizes: of the graphs.
        lag: steps until a step's tally can be read.

    Attributes:
        expected: tokens that were expected to be accepted so far.
    """

    def __init__(
        self,
        confidence: Confidence,
        k: int,
        costs: StepCosts,
        sizes: list[int],
        lag: int = 3,
    ) -> None:
        self.confidence, self.lag = confidence, lag
        self.expected = 0.0
        in_a_tile = _LEAST_SHARE * (k + 1) <= _TILE_TOKENS < k + 1
        self._places = _TILE_TOKENS - 1 if in_a_tile else k
        self._costs = costs
        self._policy = DraftPolicy(costs, may_sleep=True)
        self._policy.use_costs(costs, sizes)
        self._clock = StepClock()
        self._now_ms = 0.0
        self._idle_steps = 0
        self._looks = True
        self._pending: deque[np.ndarray | None] = deque()

    def choose(self, step: Step) -> tuple[np.ndarray, int]:
        """Return the widths and the number of fillers."""
        policy, requests = self._policy, len(step.at)
        tally = self._pending.popleft() if len(self._pending) == self.lag else None
        if tally is not None:
            policy.observe(tally)
        policy.context_ratio = self._context_ratio(step, requests)
        policy.cost_ratios = self._clock.ratios(requests, measured=True)
        values = self.confidence.values(step)
        values[:, self._places :] = 0.0
        budget, places = 0, requests * self._places
        asleep = policy.asleep
        if not asleep:
            self._idle_steps = 0
            budget = policy.choose(requests, requests, places, _MOST_DRAFTS)
        elif tally is not None:
            policy.pass_by(requests, requests, places)
        self._looks = not asleep or looks(self._idle_steps, policy.stirring)
        self._idle_steps += asleep
        self._pending.append(_tally(values) if self._looks else None)
        self._note(step, budget, asleep)
        if not budget:
            return np.zeros(requests, np.int64), 0
        self.expected += policy.expected_accepted
        widths = fill(values, budget)
        return widths, budget - int(widths.sum())

    def learn(self, step: Step, outcome: Outcome) -> None:
        """Take in how the step ended, where its drafts were made."""
        if self._looks:
            self.confidence.learn(step, outcome)

    def _context_ratio(self, step: Step, requests: int) -> float:
        """Return the contexts with which a plain step costs what it is charged."""
        at = np.array([float(requests)])
        context_ms = float(self._costs.context(at)[0])
        if context_ms <= 0:
            return 1.0
        bare_ms = float(self._costs.bare(at)[0])
        return max(step.cost(requests, 0) - bare_ms, 0.0) / context_ms

    def _note(self, step: Step, budget: int, asleep: bool) -> None:
        policy, requests = self._policy, len(step.at)
        self._now_ms += step.cost(requests, budget)
        awake = StepKind.DRAFTS if budget else StepKind.PLACES
        self._clock.note(
            self._now_ms,
            requests,
            StepKind.PLAIN if asleep else awake,
            policy.cost_of(requests, budget),
            policy.cost_of(requests, 0),
            gpu_waited=False,
        )


def _tally(values: np.ndarray) -> np.ndarray:
    """Return a step's tally as the device makes it; [TALLY_WIDTH]."""
    tally = np.zeros(TALLY_WIDTH, np.int32)
    bins = NUM_BINS - 1 - np.searchsorted(_EDGES, values[values > 0], side="right")
    tally[:NUM_BINS] = np.bincount(bins, minlength=NUM_BINS)
    tally[ROUNDS] = tally[TOKENS] = len(values)
    return tally
