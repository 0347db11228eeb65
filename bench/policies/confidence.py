"""The chance of every draft token, learned from what became of earlier ones."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from .base import Outcome, Step


def fill(values: np.ndarray, budget: int) -> np.ndarray:
    """Return the widths that spend a budget on the most valuable drafts.

    Args:
        values: [requests, k] chance that all tokens up to this one are right, 0 where
            there is no draft; falls along a request.
        budget: places.
    """
    real = values > 0
    num = real.sum(1)
    total = int(num.sum())
    if budget >= total:
        return num
    if budget <= 0:
        return np.zeros(len(values), np.int64)
    # Ties go to the earlier position, then to the earlier request, as on the device.
    flat = values.T.ravel()
    order = np.argsort(-flat, kind="stable")[:budget]
    return np.bincount(order % len(values), minlength=len(values))


class Confidence(Protocol):
    """Values drafts."""

    def values(self, step: Step) -> np.ndarray:
        """Return [requests, k] chances that all tokens up to each are right."""
        ...

    def learn(self, step: Step, outcome: Outcome) -> None:
        """Take in what became of the drafts."""
        ...


Key = Callable[[Step], np.ndarray]


def match_key(step: Step) -> np.ndarray:
    """Return the match length, capped as the drafter caps it."""
    return step.drafts.match[step.at]


class Counted:
    """Acceptance counted by a key of the draft and the position in it.

    Args:
        key: the class of each request's draft.
        keys: how many classes there are.
        k: drafts a request.
        prior: [keys, k] chance to begin with.
        weight: observations that the prior stands for.
        limit: counts are halved above this.
        see: what is learned from: "verified" drafts, these and the "next" one (which
            the token sampled behind them tells), or "all".
    """

    def __init__(
        self,
        key: Key,
        keys: int,
        k: int,
        prior: np.ndarray | None = None,
        weight: float = 4.0,
        limit: float = 1e9,
        see: str = "next",
    ) -> None:
        if prior is None:
            prior = np.full((keys, k), 0.5)
        self.key, self.keys, self.k, self.limit, self.see = key, keys, k, limit, see
        self.hits = prior * weight
        self.seen = np.full((keys, k), weight)

    def values(self, step: Step) -> np.ndarray:
        chance = (self.hits / self.seen)[self.key(step)]
        values = np.cumprod(chance, axis=1)
        return np.where(np.arange(self.k) < step.num[:, None], values, 0.0)

    def learn(self, step: Step, outcome: Outcome) -> None:
        key = self.key(step)
        seen = outcome.widths
        if self.see != "verified":
            seen = np.minimum(step.num, outcome.emitted)
        if self.see == "all":
            seen = step.num
        # A token is judged if all before it were right: up to the first wrong one.
        judged = np.minimum(seen, outcome.right + 1)
        positions = np.arange(self.k)
        observed = positions < judged[:, None]
        hit = observed & (positions < outcome.right[:, None])
        rows = key[:, None] * self.k + positions
        size = self.keys * self.k
        self.seen += np.bincount(rows[observed], minlength=size).reshape(
            self.seen.shape
        )
        self.hits += np.bincount(rows[hit], minlength=size).reshape(self.seen.shape)
        full = self.seen > self.limit
        if full.any():
            self.seen[full] /= 2
            self.hits[full] /= 2
