"""Lets a grammar's answer count only for the very drafts that it was asked about.

A step's drafts go to the scheduler, which asks the grammars about them, and masks come
back for the step that verifies them. vLLM's slot for the drafts does not say which
step made them; here they carry its number. Drafts of another step than the one whose
tokens the scheduler took in last are no hand-over: then none of a grammar's drafts
passes in that step. What a step cannot have an answer for is left out of it.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from mrv2_spec.integration.methods import served_method
from mrv2_spec.integration.patching import Patch
from mrv2_spec.integration.signatures import EXECUTE_MODEL, UPDATE_FROM_OUTPUT

logger = logging.getLogger("vllm.mrv2_spec")

# On a scheduled step: its number. On drafts: the number of the step that made them.
STEP = "_mrv2_spec_step"
# On the scheduler: the number of the newest step, and of the one taken in last.
_NEWEST = "_mrv2_spec_newest_step"
_TAKEN_IN = "_mrv2_spec_step_taken_in"
# On the runner: the step it has begun, and the one whose drafts it holds.
_BEGUN = "_mrv2_spec_step_begun"
_DRAFTED = "_mrv2_spec_step_drafted"
# A row of a mask that allows every token.
_ALL = np.int32(-1)


# ---- in the scheduler


def _wrap_after_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    def _update_after_schedule(self: Any, scheduler_output: Any) -> Any:
        newest: int | None = getattr(self, _NEWEST, None)
        if newest is None:
            served = served_method(self.vllm_config) is not None
            newest = 0 if served else -1
        if newest >= 0:
            newest += 1
            setattr(scheduler_output, STEP, newest)
        setattr(self, _NEWEST, newest)
        return original(self, scheduler_output)

    return _update_after_schedule


def _wrap_update(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_from_output(
        self: Any, scheduler_output: Any, model_runner_output: Any
    ) -> Any:
        step: int | None = getattr(scheduler_output, STEP, None)
        # A step without tokens drafts nothing: the drafts before it stay the newest.
        if step is not None and scheduler_output.total_num_scheduled_tokens > 0:
            setattr(self, _TAKEN_IN, step)
        outputs = original(self, scheduler_output, model_runner_output)
        if step is not None and scheduler_output.has_structured_output_requests:
            _leave_out_unjudged(self.requests, scheduler_output.num_scheduled_tokens)
        return outputs

    return update_from_output


def _leave_out_unjudged(requests: Any, req_ids: Iterable[str]) -> None:
    """Schedule no places for drafts that no grammar will be asked about.

    Under async scheduling the drafts are handed over while the step that verifies them
    waits for the tokens of the step before. A request that is in no other step waits
    for nothing, so nothing is handed over: its places would all be rejected.
    """
    for req_id in req_ids:
        request = requests.get(req_id)
        if (
            request is not None
            and request.use_structured_output
            and request.spec_token_ids
            and request.num_output_placeholders == 0
        ):
            request.spec_token_ids = []


def _is_due(scheduler: Any, draft_token_ids: Any) -> bool:
    taken_in = getattr(scheduler, _TAKEN_IN, None)
    # Of an engine whose drafts are not ours, neither has a number.
    made = getattr(draft_token_ids, STEP, None)
    if made == taken_in:
        return True
    # With pipeline stages the slot often holds the drafts of another micro-batch.
    if scheduler.vllm_config.parallel_config.pipeline_parallel_size == 1:
        logger.warning(
            "mrv2-spec: drafts of step %s came where those of step %s were due; "
            "none of a request with a grammar is accepted in this step",
            made,
            taken_in,
        )
    return False


def _wrap_hand_over(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_draft_token_ids(self: Any, draft_token_ids: Any) -> None:
        if _is_due(self, draft_token_ids):
            original(self, draft_token_ids)

    return update_draft_token_ids


def _wrap_hand_over_late(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_draft_token_ids_in_output(
        self: Any, draft_token_ids: Any, scheduler_output: Any
    ) -> None:
        if _is_due(self, draft_token_ids):
            original(self, draft_token_ids, scheduler_output)

    return update_draft_token_ids_in_output


# ---- in the worker


def _wrap_execute(original: Callable[..., Any]) -> Callable[..., Any]:
    def execute_model(
        self: Any, scheduler_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        setattr(self, _BEGUN, getattr(scheduler_output, STEP, None))
        return original(self, scheduler_output, *args, **kwargs)

    return execute_model


def _wrap_sample_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output = original(self, grammar_output)
        setattr(self, _DRAFTED, getattr(self, _BEGUN, None))
        return output

    return sample_tokens


def _wrap_take(original: Callable[..., Any]) -> Callable[..., Any]:
    def take_draft_token_ids(self: Any) -> Any:
        draft_token_ids = original(self)
        if draft_token_ids is not None:
            setattr(draft_token_ids, STEP, getattr(self, _DRAFTED, None))
        return draft_token_ids

    return take_draft_token_ids


def _wrap_sample(original: Callable[..., Any]) -> Callable[..., Any]:
    def sample(
        self: Any, hidden_states: Any, input_batch: Any, grammar_output: Any
    ) -> Any:
        masks = self.structured_outputs_worker
        if grammar_output is not None and masks is not None:
            grammar_output = completed(
                grammar_output, _mask_rows(masks, input_batch, grammar_output)
            )
        return original(self, hidden_states, input_batch, grammar_output)

    return sample


def _mask_rows(masks: Any, input_batch: Any, grammar_output: Any) -> list[int]:
    """Return how many rows of the masks each request with a grammar should have."""
    req_ids = grammar_output.structured_output_request_ids
    # Only vLLM 0.32 lays masks out by what was scheduled.
    num_bonus_tokens = getattr(masks, "num_bonus_tokens", None)
    if num_bonus_tokens is None:
        return [masks.mask_stride] * len(req_ids)
    scheduled = input_batch.num_draft_tokens_per_req
    if scheduled is None:
        scheduled = np.zeros(len(input_batch.req_ids), dtype=np.int32)
    batch_idx = {req_id: i for i, req_id in enumerate(input_batch.req_ids)}
    return [int(scheduled[batch_idx[r]]) + num_bonus_tokens for r in req_ids]


def completed(grammar_output: Any, num_rows: list[int]) -> Any:
    """Return masks that have all their rows; where some lack, no draft passes.

    A request that lacks even its first row samples without a mask. The scheduler asks
    its grammar about every token: an illegal one ends that request with an error.

    Args:
        grammar_output: the scheduler's masks, and how many drafts of each request
            passed; left as it is.
        num_rows: by request, the rows it should have.
    """
    passed = grammar_output.num_acceptable_drafts
    bitmask = grammar_output.grammar_bitmask
    found, wanted = bitmask.shape[0], sum(num_rows)
    if found == wanted and (passed is None or len(passed) == len(num_rows)):
        return grammar_output
    logger.error(
        "mrv2-spec: %d rows of grammar masks came where %d were due; drafts without "
        "theirs are not accepted",
        found,
        wanted,
    )
    passed = [*(passed or ()), *[0] * len(num_rows)][: len(num_rows)]
    if found > wanted:
        # Nobody can say which rows are whose.
        passed = [0] * len(num_rows)
    ends = np.cumsum(num_rows)
    passed = [n if end <= found else 0 for n, end in zip(passed, ends, strict=True)]
    rows = np.full((wanted, bitmask.shape[1]), _ALL, dtype=bitmask.dtype)
    rows[:found] = bitmask[:wanted]
    return replace(grammar_output, grammar_bitmask=rows, num_acceptable_drafts=passed)


SCHEDULER_PATCHES = (
    Patch(
        "Scheduler._update_after_schedule",
        (("self", "scheduler_output"),),
        _wrap_after_schedule,
    ),
    Patch("Scheduler.update_from_output", UPDATE_FROM_OUTPUT, _wrap_update),
    Patch(
        "Scheduler.update_draft_token_ids",
        (("self", "draft_token_ids"),),
        _wrap_hand_over,
    ),
    Patch(
        "Scheduler.update_draft_token_ids_in_output",
        (("self", "draft_token_ids", "scheduler_output"),),
        _wrap_hand_over_late,
    ),
)

RUNNER_PATCHES = (
    Patch("GPUModelRunner.execute_model", EXECUTE_MODEL, _wrap_execute),
    Patch(
        "GPUModelRunner.sample_tokens",
        (("self", "grammar_output"),),
        _wrap_sample_tokens,
    ),
    Patch("GPUModelRunner.take_draft_token_ids", (("self",),), _wrap_take),
    # Around what counts the drafts that passed.
    Patch(
        "GPUModelRunner.sample",
        (("self", "hidden_states", "input_batch", "grammar_output"),),
        _wrap_sample,
    ),
)
