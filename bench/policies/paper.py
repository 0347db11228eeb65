"""The policies of the paper table: fixed, valid, learned, lag."""

from collections import deque

import numpy as np

from .base import Outcome, Step
from .confidence import Confidence, fill


class Fixed:
    """k places for every request in every step."""

    def choose(self, step: Step) -> tuple[np.ndarray, int]:
        return step.num, int((step.k - step.num).sum())

    def learn(self, step: Step, outcome: Outcome) -> None:
        """Learn nothing."""


class Valid:
    """Every drafted token, and nothing else."""

    def choose(self, step: Step) -> tuple[np.ndarray, int]:
        return step.num, 0

    def learn(self, step: Step, outcome: Outcome) -> None:
        """Learn nothing."""


def best_budget(values: np.ndarray, step: Step) -> int:
    """Return the places with the most expected tokens a millisecond."""
    ordered = np.sort(values[values > 0])[::-1]
    requests = len(step.at)
    tokens = requests + np.concatenate([[0.0], np.cumsum(ordered)])
    return int(np.argmax(tokens / step.cost.curve(requests, len(ordered))))


class Learned:
    """Learned values, and the best budget of this very step."""

    def __init__(self, confidence: Confidence) -> None:
        self.confidence = confidence

    def choose(self, step: Step) -> tuple[np.ndarray, int]:
        values = self.confidence.values(step)
        return fill(values, self.budget(values, step)), 0

    def budget(self, values: np.ndarray, step: Step) -> int:
        return best_budget(values, step)

    def learn(self, step: Step, outcome: Outcome) -> None:
        self.confidence.learn(step, outcome)


class Lag(Learned):
    """The same, but with the budget that was best some steps ago."""

    def __init__(self, confidence: Confidence, lag: int = 3) -> None:
        super().__init__(confidence)
        self.budgets: deque[int] = deque([0] * lag, maxlen=lag)

    def choose(self, step: Step) -> tuple[np.ndarray, int]:
        values = self.confidence.values(step)
        budget = self.budgets[0]
        self.budgets.append(best_budget(values, step))
        room = len(step.at) * step.k
        widths = fill(values, min(budget, room))
        return widths, min(budget, room) - int(widths.sum())
