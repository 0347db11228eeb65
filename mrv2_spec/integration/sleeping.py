"""Lets the worker say how many draft places the scheduler should schedule.

None while drafting does not pay: then it costs the scheduler nothing, and prefills get
the tokens. Else as many as fit the decode graphs. The wish travels with each step's
output, and the scheduler follows it from its next step on, as far as a step's tokens
reach: places are scheduled before the trimmer gives most of them up, and what they
take, no prompt gets. Without async scheduling the drafts themselves are on the host,
and one that sleeps is looked at in every step: only the limit is followed.

The other way goes what the scheduler alone can tell without the ranks disagreeing: how
long steps took by its clock, with drafts and without, beside what they should cost.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mrv2_spec.integration.patching import Patch
from mrv2_spec.integration.signatures import EXECUTE_MODEL, UPDATE_FROM_OUTPUT
from mrv2_spec.integration.verification import (
    COST_RATIOS,
    FEW_PLACES,
    SHARE_OF_FULL_STEP,
    TrimManager,
)
from mrv2_spec.step_clock import StepClock, StepKind

# Beside prompts that had tokens enough, places may take one in so many of a step's.
_SHARE_BESIDE_PROMPTS = 8

# On a step's output: a _Report. On the scheduler: the newest one.
_REPORT = "_mrv2_spec_report"
# On the scheduler: its StepClock.
_CLOCK = "_mrv2_spec_clock"
# On the runner: the event after the newest step's output, and whether the device had
# passed it when the next one was launched.
_LAST_OUTPUT = "_mrv2_spec_last_output"
_GPU_WAITED = "_mrv2_spec_gpu_waited"


@dataclass(frozen=True, slots=True)
class _Report:
    """What the worker tells of a step.

    Attributes:
        num_places: draft places that a request should have.
        num_requests: of the step.
        kind: of the step.
        expected_ms: what it should have cost; 0 where that cannot be said.
        plain_ms: what it should have cost without drafts.
        gpu_waited: whether the device was done with the step before when this one was
            launched.
        costs_are_measured: whether that is in milliseconds.
    """

    num_places: int
    num_requests: int
    kind: StepKind
    expected_ms: float
    plain_ms: float
    gpu_waited: bool
    costs_are_measured: bool


def _gpu_waits(runner: Any) -> bool:
    """Tell, without waiting, whether the device is done with the step before.

    Without async scheduling it always is, and the host's time comes on top of its own.
    """
    last_output = getattr(runner, _LAST_OUTPUT, None)
    return (
        last_output is not None
        and runner.device.type == "cuda"
        and runner.vllm_config.scheduler_config.async_scheduling
        and bool(last_output.query())
    )


def _wrap_execute(original: Callable[..., Any]) -> Callable[..., Any]:
    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(self.adaptive_verification, TrimManager):
            # The forward pass was just launched. Sampling may wait for a grammar, and
            # with it for the step before.
            setattr(self, _GPU_WAITED, _gpu_waits(self))
        return result

    return execute_model


def _wrap_sample_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output = original(self, grammar_output)
        manager = self.adaptive_verification
        if output is not None and isinstance(manager, TrimManager):
            setattr(self, _LAST_OUTPUT, getattr(output, "copy_event", None))
            result = getattr(output, "model_runner_output", output)
            report = _Report(
                manager.num_places,
                manager.num_requests,
                manager.kind,
                manager.expected_ms,
                manager.plain_ms,
                getattr(self, _GPU_WAITED, False),
                manager.costs_are_measured,
            )
            setattr(result, _REPORT, report)
        return output

    return sample_tokens


def _wrap_update(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_from_output(
        self: Any, scheduler_output: Any, model_runner_output: Any
    ) -> Any:
        report: _Report | None = getattr(model_runner_output, _REPORT, None)
        if report is not None:
            setattr(self, _REPORT, report)
            clock: StepClock | None = getattr(self, _CLOCK, None)
            if clock is None:
                clock = StepClock()
                setattr(self, _CLOCK, clock)
            clock.note(
                time.perf_counter() * 1000,
                report.num_requests,
                report.kind,
                report.expected_ms,
                report.plain_ms,
                report.gpu_waited,
            )
        return original(self, scheduler_output, model_runner_output)

    return update_from_output


def _places_that_fit(scheduler: Any, scheduler_output: Any) -> tuple[int, bool]:
    """Return how many draft places a request may have for all to be scheduled.

    And whether prompts are why it is no more.
    """
    num_running = max(len(scheduler.running), 1)
    most: int = scheduler.max_num_scheduled_tokens // num_running
    num_drafts = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
    num_tokens = scheduler_output.total_num_scheduled_tokens
    has_prompts = num_tokens - num_drafts > len(scheduler_output.num_scheduled_tokens)
    is_full = num_tokens >= scheduler.max_num_scheduled_tokens
    if not has_prompts and not _keeps_out_a_prompt(scheduler, is_full):
        return max(most - 1, 0), False
    # Of full steps drafts get no more than this, however many places they have.
    return most // (SHARE_OF_FULL_STEP if is_full else _SHARE_BESIDE_PROMPTS), True


def _keeps_out_a_prompt(scheduler: Any, is_full: bool) -> bool:
    """Tell whether a prompt waits that may have lacked nothing but tokens."""
    if not scheduler.waiting or len(scheduler.running) >= scheduler.max_num_active_reqs:
        return False
    # Without chunks a prompt needs a step's tokens for all of it.
    return is_full or not scheduler.scheduler_config.enable_chunked_prefill


def _wrap_after_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    def _update_after_schedule(self: Any, scheduler_output: Any) -> Any:
        report: _Report | None = getattr(self, _REPORT, None)
        if report is not None:
            # Says both how many drafts this step's worker hands on and how many places
            # the next step has.
            wanted = scheduler_output.num_spec_tokens_to_schedule
            fitting, beside_prompts = _places_that_fit(self, scheduler_output)
            if beside_prompts and fitting < wanted:
                setattr(scheduler_output, FEW_PLACES, True)
            places = min(wanted, fitting)
            if self.scheduler_config.async_scheduling:
                places = min(places, report.num_places)
            scheduler_output.num_spec_tokens_to_schedule = places
            clock: StepClock = getattr(self, _CLOCK)
            ratios = clock.ratios(
                len(scheduler_output.num_scheduled_tokens), report.costs_are_measured
            )
            setattr(scheduler_output, COST_RATIOS, ratios)
        return original(self, scheduler_output)

    return _update_after_schedule


RUNNER_PATCHES = (
    Patch("GPUModelRunner.execute_model", EXECUTE_MODEL, _wrap_execute),
    Patch(
        "GPUModelRunner.sample_tokens",
        (("self", "grammar_output"),),
        _wrap_sample_tokens,
    ),
)

SCHEDULER_PATCHES = (
    Patch("Scheduler.update_from_output", UPDATE_FROM_OUTPUT, _wrap_update),
    # The async scheduler's calls it before it reads the number of places.
    Patch(
        "Scheduler._update_after_schedule",
        (("self", "scheduler_output"),),
        _wrap_after_schedule,
    ),
)
