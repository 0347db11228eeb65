"""What one step tells about its drafts, on its way from the runner to the scheduler."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mrv2_spec.counters import ACCEPTED, KINDS, LEGAL, PROPOSED, VERIFIED

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]

NO_LIMIT = np.iinfo(np.int32).max


class Ended(NamedTuple):
    """A request that gave up its slot, with the drafts it had pending."""

    req_id: str
    num_drafts: int
    source: int


@dataclass(slots=True)
class StepCounts:
    """One step, by batch index.

    Args:
        slots: [num_reqs] int64, request slots.
        drafts: [3, num_reqs] int32, as `count_drafts` returns it; None where no
            request had any, nor a place for one.
        num_sampled: [num_reqs] int32, tokens the step emitted.
        is_round: [num_reqs], whether the request was past its prefill.
        limits: [num_reqs] int32, drafts that a grammar let pass (`NO_LIMIT`: all), or
            None where no request has a grammar.
        ended: requests that gave up their slots before the step.
    """

    slots: npt.NDArray[np.int64]
    drafts: Int32Array | None
    num_sampled: Int32Array
    is_round: BoolArray
    limits: Int32Array | None = None
    ended: list[Ended] = field(default_factory=list)

    @classmethod
    def of_nothing(cls, ended: list[Ended]) -> "StepCounts":
        """Return a step without requests."""
        nothing = np.zeros(0, dtype=np.int32)
        return cls(
            slots=nothing.astype(np.int64),
            drafts=None,
            num_sampled=nothing,
            is_round=nothing.astype(np.bool_),
            ended=ended,
        )


def settle(
    step: StepCounts, drafts: Int32Array, num_drafts: int
) -> tuple[Int32Array, Int32Array]:
    """Return what each draft was cut to, and how many places held none.

    Args:
        step: what the runner found.
        drafts: its drafts; a drafter that is not ours may claim anything.
        num_drafts: K, the most drafts a round.

    Returns:
        [4, num_reqs] in the order of `KINDS`, and [num_reqs] fillers. Entries that
        are no round are zero.
    """
    most = step.is_round * np.int32(num_drafts)
    # Plain minima and maxima: np.clip takes several times as long on short arrays.
    width, proposed = np.maximum(np.minimum(drafts[:2], most), 0)
    lengths = np.empty((len(KINDS), width.shape[0]), dtype=np.int32)
    lengths[PROPOSED] = proposed
    lengths[LEGAL] = proposed
    if step.limits is not None:
        np.minimum(proposed, step.limits, out=lengths[LEGAL])
    np.minimum(width, lengths[LEGAL], out=lengths[VERIFIED])
    sampled = np.maximum(step.num_sampled, 1)
    np.minimum(sampled - 1, lengths[VERIFIED], out=lengths[ACCEPTED])
    return lengths, np.maximum(width - proposed, 0)
