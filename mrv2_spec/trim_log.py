"""Says in the log what the trimmer chose and why."""

import logging

import numpy as np
import numpy.typing as npt

from mrv2_spec.kernels.value_drafts import ROUNDS, TOKENS
from mrv2_spec.policy import DraftPolicy

logger = logging.getLogger("vllm.mrv2_spec")

STEPS_BETWEEN_LINES = 500


class TrimLog:
    """A line now and then, and one whenever drafting sleeps or wakes."""

    def __init__(self, policy: DraftPolicy) -> None:
        self._policy = policy
        self._was_asleep = policy.asleep
        self._clear()

    def _clear(self) -> None:
        self._steps = self._budget = self._places = self._rounds = self._tokens = 0
        self._expected = 0.0
        self._drafting = 0

    def note(
        self,
        budget: int,
        num_drafting: int,
        num_places: int,
        tally: npt.NDArray[np.int32] | None,
    ) -> None:
        """Take in a step.

        Args:
            budget: places that it verifies.
            num_drafting: requests with scheduled drafts.
            num_places: places that were scheduled.
            tally: [TALLY_WIDTH] of an earlier step, if it had one.
        """
        policy = self._policy
        self._steps += 1
        self._budget += budget
        self._places += num_places
        self._drafting += num_drafting
        self._expected += num_drafting + (policy.expected_accepted if budget else 0.0)
        if tally is not None:
            self._rounds += int(tally[ROUNDS])
            self._tokens += int(tally[TOKENS])
        if policy.asleep != self._was_asleep:
            self._was_asleep = policy.asleep
            logger.info(
                "mrv2-spec: drafting %s: the best budget is good for %.2f times the "
                "tokens per ms of none; by the clock drafts take %.2f times what they "
                "should, places alone %.2f times%s",
                "sleeps" if policy.asleep else "wakes",
                policy.gain,
                policy.cost_ratios.drafts,
                policy.cost_ratios.places,
                _host(policy.cost_ratios.host),
            )
        if self._steps >= STEPS_BETWEEN_LINES:
            self._say()
            self._clear()

    def _say(self) -> None:
        if self._policy.asleep and not self._drafting:
            logger.info(
                "mrv2-spec: asleep for %d steps; drafting would be good for %.2f times "
                "the tokens per ms",
                self._steps,
                self._policy.gain,
            )
            return
        logger.info(
            "mrv2-spec: a step verifies %.1f of %.1f places; tokens a request and "
            "step: %.2f expected, %.2f obtained",
            self._budget / self._steps,
            self._places / self._steps,
            self._expected / max(self._drafting, 1),
            self._tokens / max(self._rounds, 1),
        )


def _host(times: float) -> str:
    return f", the host {times:.2f} times a plain step" if times else ""
