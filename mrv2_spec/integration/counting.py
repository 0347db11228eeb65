"""Sends what became of each step's drafts along with the step's output.

One launch after sampling gathers it, the copy to the host goes with that of the
sampled tokens, and the scheduler gets it as an attribute of the output: nobody waits
for it, and it is as late as the tokens themselves. What a request had pending when it
gave up its slot follows with the next output.
"""

from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
import torch

from mrv2_spec.integration.patching import Patch
from mrv2_spec.integration.signatures import EXECUTE_MODEL
from mrv2_spec.integration.speculator import speculator_of
from mrv2_spec.kernels.count_drafts import count_drafts
from mrv2_spec.metrics.step import NO_LIMIT, Ended, Int32Array, StepCounts

# On a ModelRunnerOutput: its StepCounts.
STEP_COUNTS = "_mrv2_spec_step_counts"
# On a SamplerOutput, on its way to the copy: the step's _Gathered.
_GATHERED = "_mrv2_spec_gathered"
# On the runner: the slots given up since the last output.
_GIVEN_UP = "_mrv2_spec_given_up"


def _may_be_pending(speculator: Any, slots: Any) -> bool:
    """Tell whether any slot may have drafts; all may, if the drafter does not say."""
    has_pending = getattr(speculator, "has_pending_drafts", None)
    return has_pending is None or has_pending(slots)


class _GivenUp:
    """Slots that were given up in one step, and what was pending in them."""

    def __init__(self) -> None:
        # No slot: nothing was pending.
        self._names: list[tuple[str, int | None]] = []
        self._num_drafts: torch.Tensor | None = None
        self._sources: torch.Tensor | None = None

    def add(self, req_id: str, slot: int, speculator: Any) -> None:
        """Note a request that gives up its slot."""
        if not _may_be_pending(speculator, np.array([slot])):
            # As in most steps asleep: nothing is copied for it.
            self._names.append((req_id, None))
            return
        self._names.append((req_id, slot))
        if self._num_drafts is None:
            # All slots at once, and now: later in this step they may go to others.
            self._num_drafts = _to_host(speculator.num_valid_drafts_for_trim)
            sources = getattr(speculator, "draft_sources", None)
            self._sources = None if sources is None else _to_host(sources)

    def wait(self) -> None:
        """Wait for the copy."""
        if self._num_drafts is not None:
            # Waiting for the stream would trip vLLM's check for waits.
            landed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            landed.record()
            landed.synchronize()

    def ended(self) -> list[Ended]:
        """Return the requests; the copy must have landed."""
        return [
            Ended(req_id, _at(self._num_drafts, slot), _at(self._sources, slot))
            for req_id, slot in self._names
        ]


def _at(counts: torch.Tensor | None, slot: int | None) -> int:
    return 0 if counts is None or slot is None else int(counts[slot])


class _Gathered:
    """A step's counts on the device, then on the host; None: there are no drafts."""

    def __init__(
        self,
        slots: Any,
        is_round: Any,
        limits: Int32Array | None,
        drafts: torch.Tensor | None,
        given_up: list[_GivenUp],
    ) -> None:
        self._slots = slots
        self._is_round = is_round
        self._limits = limits
        self._given_up = given_up
        # Kept until the copy has landed: another stream reads it.
        self._on_device = drafts
        self._drafts: Int32Array | None = None

    @property
    def has_drafts(self) -> bool:
        """Tell whether there is anything to copy."""
        return self._on_device is not None

    def copy_to_host(self) -> None:
        """Enqueue the copy on the current stream."""
        assert self._on_device is not None
        self._drafts = _to_host(self._on_device).numpy()

    def step_counts(self, num_sampled: Int32Array) -> StepCounts:
        """Return the step; all copies must have landed."""
        assert (self._drafts is not None) == self.has_drafts
        return StepCounts(
            slots=self._slots,
            drafts=self._drafts,
            num_sampled=num_sampled,
            is_round=np.logical_and(self._is_round, num_sampled),
            limits=self._limits,
            ended=[ended for one in self._given_up for ended in one.ended()],
        )


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", non_blocking=True, copy=True)


def _counted(runner: Any) -> Any:
    """Return the runner's speculator if its drafts can be counted, or None."""
    speculator = speculator_of(runner.req_states)
    if getattr(speculator, "num_valid_drafts_for_trim", None) is None:
        return None
    return speculator


def forget_given_up(runner: Any) -> None:
    """Forget the slots given up so far: vLLM's warm-up requests held them."""
    setattr(runner, _GIVEN_UP, [])


def _take_given_up(runner: Any) -> list[_GivenUp]:
    given_up: list[_GivenUp] = getattr(runner, _GIVEN_UP, [])
    setattr(runner, _GIVEN_UP, [])
    return given_up


def _wrap_sample(original: Callable[..., Any]) -> Callable[..., Any]:
    def sample(
        self: Any, hidden_states: Any, input_batch: Any, grammar_output: Any
    ) -> Any:
        result = original(self, hidden_states, input_batch, grammar_output)
        speculator = _counted(self)
        if speculator is None:
            return result
        sampler_output = result[0]
        num_reqs = input_batch.num_reqs
        drafts = None
        # Asleep, most steps have none: nothing is launched and copied for them.
        if input_batch.num_draft_tokens or _may_be_pending(
            speculator, input_batch.idx_mapping_np
        ):
            drafts = count_drafts(
                input_batch.idx_mapping,
                input_batch.cu_num_logits,
                speculator.num_valid_drafts_for_trim,
                getattr(speculator, "draft_sources", None),
                num_bonus_tokens=self.model_state.num_new_sampled_tokens_per_step,
            )
        gathered = _Gathered(
            input_batch.idx_mapping_np.astype(np.int64),
            ~input_batch.is_prefilling_np[:num_reqs],
            grammar_limits(input_batch, grammar_output),
            drafts,
            _take_given_up(self),
        )
        setattr(sampler_output, _GATHERED, gathered)
        return result

    return sample


def grammar_limits(input_batch: Any, grammar_output: Any) -> Int32Array | None:
    """Return [num_reqs] int32, the drafts that each request's grammar let pass."""
    if grammar_output is None or not grammar_output.structured_output_request_ids:
        return None
    acceptable = grammar_output.num_acceptable_drafts
    scheduled = input_batch.num_draft_tokens_per_req
    limits = np.full(input_batch.num_reqs, NO_LIMIT, dtype=np.int32)
    batch_idx = {req_id: i for i, req_id in enumerate(input_batch.req_ids)}
    for i, req_id in enumerate(grammar_output.structured_output_request_ids):
        at = batch_idx.get(req_id)
        if at is None or scheduled is None:
            continue
        # No hand-off: vLLM rejects every draft of the request.
        passed = 0 if acceptable is None else acceptable[i]
        # If all that were scheduled passed, nothing is known of those behind.
        if passed < scheduled[at]:
            limits[at] = passed
    return limits


def _wrap_remove(original: Callable[..., Any]) -> Callable[..., Any]:
    def _remove_request(self: Any, req_id: str) -> Any:
        slot = self.req_states.req_id_to_index.get(req_id)
        speculator = _counted(self)
        if slot is not None and speculator is not None:
            given_up: list[_GivenUp] = getattr(self, _GIVEN_UP, [])
            if not given_up or not getattr(self, "_mrv2_spec_removing", False):
                given_up = [*given_up, _GivenUp()]
                setattr(self, _GIVEN_UP, given_up)
                self._mrv2_spec_removing = True
            given_up[-1].add(req_id, slot, speculator)
            forget = getattr(speculator, "forget_pending", None)
            if forget is not None:
                forget(slot)
        return original(self, req_id)

    return _remove_request


def _wrap_execute(original: Callable[..., Any]) -> Callable[..., Any]:
    def execute_model(
        self: Any, scheduler_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # One copy of what is pending serves all that is removed in one step.
        self._mrv2_spec_removing = False
        result = original(self, scheduler_output, *args, **kwargs)
        if result is None or not hasattr(result, "sampled_token_ids"):
            return result
        # A step without tokens samples nothing; its output is shared with others.
        given_up = _take_given_up(self)
        if given_up:
            for slots in given_up:
                slots.wait()
            result = copy(result)
            ended = [one for slots in given_up for one in slots.ended()]
            setattr(result, STEP_COUNTS, StepCounts.of_nothing(ended))
        return result

    return execute_model


def _wrap_init(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.v1.worker.gpu.async_utils import stream

    def __init__(
        self: Any,
        model_runner_output: Any,
        sampler_output: Any,
        num_sampled_tokens: Any,
        main_stream: Any,
        copy_stream: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        original(
            self,
            model_runner_output,
            sampler_output,
            num_sampled_tokens,
            main_stream,
            copy_stream,
            *args,
            **kwargs,
        )
        gathered = getattr(sampler_output, _GATHERED, None)
        if gathered is not None and gathered.has_drafts:
            with stream(copy_stream, main_stream):
                gathered.copy_to_host()
                # Recorded again: it now stands for this copy as well.
                self.copy_event.record(copy_stream)

    return __init__


def _wrap_get_output(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_output(self: Any) -> Any:
        output = original(self)
        gathered = getattr(self.sampler_output, _GATHERED, None)
        if gathered is not None:
            counts = gathered.step_counts(self.num_sampled_tokens_np)
            setattr(output, STEP_COUNTS, counts)
        return output

    return get_output


PATCHES = (
    Patch(
        "GPUModelRunner.sample",
        (("self", "hidden_states", "input_batch", "grammar_output"),),
        _wrap_sample,
    ),
    Patch("GPUModelRunner._remove_request", (("self", "req_id"),), _wrap_remove),
    Patch("GPUModelRunner.execute_model", EXECUTE_MODEL, _wrap_execute),
)

OUTPUT_PATCHES = (
    Patch(
        "AsyncOutput.__init__",
        (
            (
                "self",
                "model_runner_output",
                "sampler_output",
                "num_sampled_tokens",
                "main_stream",
                "copy_stream",
                "check_ep_fault",
                "pending_aux_output",
            ),
        ),
        _wrap_init,
    ),
    Patch("AsyncOutput.get_output", (("self",),), _wrap_get_output),
)
