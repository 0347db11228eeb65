"""Lets a drafter that does not pay sleep: no draft places are scheduled at all.

The worker decides, from counts that every rank shares; the wish travels with the
step's output, and the scheduler leaves the places out from its next step on. So a
sleeping drafter costs the scheduler nothing, and prefills get the tokens.
"""

from collections.abc import Callable
from typing import Any

from mrv2_spec.integration.patching import Patch
from mrv2_spec.integration.verification import TrimManager

# On a step's output and on the scheduler: whether draft places are of no use.
_ASLEEP = "_mrv2_spec_asleep"


def _wrap_sample_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output = original(self, grammar_output)
        manager = self.adaptive_verification
        if output is not None and isinstance(manager, TrimManager):
            result = getattr(output, "model_runner_output", output)
            setattr(result, _ASLEEP, manager.policy.asleep)
        return output

    return sample_tokens


def _wrap_update(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_from_output(
        self: Any, scheduler_output: Any, model_runner_output: Any
    ) -> Any:
        asleep = getattr(model_runner_output, _ASLEEP, None)
        if asleep is not None:
            setattr(self, _ASLEEP, asleep)
        return original(self, scheduler_output, model_runner_output)

    return update_from_output


def _wrap_after_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    def _update_after_schedule(self: Any, scheduler_output: Any) -> Any:
        # Says both how many drafts this step's worker hands on and how many places the
        # next step has.
        if getattr(self, _ASLEEP, False):
            scheduler_output.num_spec_tokens_to_schedule = 0
        return original(self, scheduler_output)

    return _update_after_schedule


RUNNER_PATCHES = (
    Patch(
        "GPUModelRunner.sample_tokens",
        (("self", "grammar_output"),),
        _wrap_sample_tokens,
    ),
)

SCHEDULER_PATCHES = (
    Patch(
        "Scheduler.update_from_output",
        (("self", "scheduler_output", "model_runner_output"),),
        _wrap_update,
    ),
)

ASYNC_SCHEDULER_PATCHES = (
    Patch(
        "AsyncScheduler._update_after_schedule",
        (("self", "scheduler_output"),),
        _wrap_after_schedule,
    ),
)
