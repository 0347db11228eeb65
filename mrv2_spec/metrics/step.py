"""What one step tells about its drafts, on its way from the runner to the scheduler."""

from collections.abc import Mapping, Sequence
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
        drafts: [3, num_reqs] int32, as `count_drafts` returns it, places at most K;
            None where no request had any drafts, nor a place for one.
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

    def cut(self, req_ids: Sequence[str], cuts: Mapping[str, int]) -> None:
        """Take in what grammars let pass before the step was scheduled.

        Args:
            req_ids: requests, in the order of the step.
            cuts: drafts that passed, of some requests.
        """
        if self.limits is None:
            self.limits = np.full(len(req_ids), NO_LIMIT, dtype=np.int32)
        for i, req_id in enumerate(req_ids):
            if req_id in cuts:
                self.limits[i] = min(self.limits[i], cuts[req_id])


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
        are no round mean nothing.
    """
    width, proposed, _ = drafts
    lengths = np.empty((len(KINDS), width.shape[0]), dtype=np.int32)
    # Few calls, and those that write in place: on short arrays the call is the cost.
    np.minimum(proposed, num_drafts, out=lengths[PROPOSED])
    if step.limits is None:
        lengths[LEGAL] = lengths[PROPOSED]
    else:
        np.minimum(lengths[PROPOSED], step.limits, out=lengths[LEGAL])
    np.minimum(width, lengths[LEGAL], out=lengths[VERIFIED])
    np.subtract(step.num_sampled, 1, out=lengths[ACCEPTED])
    np.minimum(lengths[ACCEPTED], lengths[VERIFIED], out=lengths[ACCEPTED])
    np.maximum(lengths, 0, out=lengths)
    if step.limits is None:
        return lengths, width - lengths[VERIFIED]
    return lengths, np.maximum(width - lengths[PROPOSED], 0)
