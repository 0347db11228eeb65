"""What the simulator shows a policy, and what it wants back."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .cost import StepCost
from .drafts import Drafts


@dataclass
class Step:
    """One step's drafts, before it runs."""

    drafts: Drafts
    at: np.ndarray  # [requests] their positions in the records
    num: np.ndarray  # [requests] drafted tokens
    fresh: np.ndarray  # [requests] bool, a new request has this slot
    k: int
    cost: StepCost


@dataclass
class Outcome:
    """What the step verified and emitted."""

    widths: np.ndarray  # [requests] verified draft tokens
    right: np.ndarray  # [requests] leading right tokens of the whole draft
    emitted: np.ndarray  # [requests] tokens emitted


class Policy(Protocol):
    """Chooses how many drafts of each request a step verifies."""

    def choose(self, step: Step) -> tuple[np.ndarray, int]:
        """Return the widths and the number of fillers."""
        ...

    def learn(self, step: Step, outcome: Outcome) -> None:
        """Take in how the step ended."""
        ...
