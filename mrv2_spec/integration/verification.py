"""Puts the trimmer where vLLM's V2 runner asks which drafts a step verifies.

The runner was built to talk to its ``AdaptiveVerificationManager``; ours answers the
same calls. Within a step: ``choose`` (called by the hook in ``widths.py``) chooses the
budget, ``compact_batch`` lays out the host's copy of the batch, ``reallocate_drafts``
the device's, and after drafting ``record_confidences`` publishes what a later step
decides by.
"""

import inspect
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mrv2_spec.config import parse_settings
from mrv2_spec.draft_values import DraftValues
from mrv2_spec.integration.graphs import drafting_query_len
from mrv2_spec.integration.patching import Patch
from mrv2_spec.integration.speculator import (
    draft_values_of,
    drafts_unasked,
    speculator_of,
)
from mrv2_spec.integration.step_profile import StepProfile
from mrv2_spec.integration.trimmable import why_not_trimmed
from mrv2_spec.kernels.value_drafts import IMPOSSIBLE
from mrv2_spec.lagged_counts import LaggedCounts
from mrv2_spec.policy import DraftPolicy
from mrv2_spec.step_clock import CostRatios, StepKind
from mrv2_spec.step_costs import CONTEXT_LEN, CostCurve, StepCosts
from mrv2_spec.trim_log import TrimLog
from mrv2_spec.trimmer import VariableDraftTrimmer

logger = logging.getLogger("vllm.mrv2_spec")

# Of a step that is full, as prompts wait for tokens, drafts get one row in so many: all
# that waits, waits for them.
SHARE_OF_FULL_STEP = 50
# On a scheduled step: how much dearer steps with drafts are than they should be.
COST_RATIOS = "_mrv2_spec_cost_ratios"
# On a scheduled step: whether prompts took places from the drafts that are made in it.
FEW_PLACES = "_mrv2_spec_few_places"
# Where the start-up line finds, on the request states, what was decided here.
_WHY_NOT_TRIMMED = "_mrv2_spec_why_not_trimmed"

Int32Array = npt.NDArray[np.int32]


class TrimManager:
    """Answers the runner's calls with a :class:`VariableDraftTrimmer`.

    Args:
        vllm_config: the engine's configuration.
        speculator: publishes ``num_valid_drafts_for_trim``.
        draft_values: what the drafts are worth.
        req_states: the runner's request states.
        query_start_loc: [max_num_reqs + 1] int32, the runner's device buffer.
        num_bonus_tokens: logits rows of a request beside those of its drafts.
        max_total_logits: the most logits rows that one step may have.
        returns_admitted_counts: whether ``reallocate_drafts`` has a fourth result
            (vLLM 0.33).
        may_sleep: whether drafts are also made while none is scheduled.
    """

    def __init__(
        self,
        vllm_config: Any,
        speculator: Any,
        draft_values: DraftValues,
        req_states: Any,
        query_start_loc: torch.Tensor,
        num_bonus_tokens: int,
        max_total_logits: int,
        returns_admitted_counts: bool,
        may_sleep: bool,
    ) -> None:
        settings = self.settings = parse_settings(vllm_config.additional_config)
        scheduling = vllm_config.scheduler_config
        # A step of so many tokens may have cut a prompt short.
        self._most_tokens: int = (
            scheduling.max_num_scheduled_tokens or scheduling.max_num_batched_tokens
        )
        self._req_states = req_states
        self._returns_admitted_counts = returns_admitted_counts
        self._drafter = type(speculator).__name__
        # Rounds of requests whose drafter published what cannot be.
        self.num_impossible = 0
        self.max_total_logits = max_total_logits
        max_num_reqs = req_states.max_num_reqs
        self._num_valid_drafts = speculator.num_valid_drafts_for_trim
        self._trimmer = VariableDraftTrimmer(
            self._num_valid_drafts,
            query_start_loc,
            num_bonus_tokens,
            max_num_reqs=max_num_reqs,
            max_total_logits=max_total_logits,
            device=req_states.device,
        )
        self._draft_values = draft_values
        lag = vllm_config.max_concurrent_batches + 1
        self._lagged = LaggedCounts(draft_values.tally, lag)
        self._new_slots: list[int] = []
        # Of the step in progress, and of those whose counts are on their way.
        self._few_places = False
        self._had_few_places: deque[bool] = deque([False] * lag, maxlen=lag)
        guess = CostCurve.guess(req_states.device.type)
        self.policy = DraftPolicy(StepCosts.without_contexts(guess, guess), may_sleep)
        # Without async scheduling places are scheduled while drafting sleeps, too.
        self._has_bare_steps = may_sleep and scheduling.async_scheduling
        # vLLM's dummy steps keep to the model's length.
        self._context_len = min(CONTEXT_LEN, req_states.max_model_len - 1)
        self.profile: StepProfile | None = None
        # Whether this rank writes to the log.
        self.speaks = _speaks(vllm_config.parallel_config)
        explains = settings.trim_explain and self.speaks
        self._log = TrimLog(self.policy) if explains else None
        # Of the step in progress: the runner asks for it and uses it in separate calls.
        self.draft_budget = 0
        # Scheduled tokens that are no drafts.
        self._num_plain = 0
        self.num_requests = 0
        self.expected_ms = self.plain_ms = 0.0
        self.kind = StepKind.PLAIN
        self.costs_are_measured = False
        # Draft places that a request should be scheduled: awake, and now.
        self._num_wanted = drafting_query_len(vllm_config) - 1
        self.num_places = self._num_wanted
        self._num_drafts: Int32Array = np.zeros(0, dtype=np.int32)
        self._num_scheduled: Int32Array = np.zeros(0, dtype=np.int32)
        # Compile now, with batches of nothing: no serving step waits for a compiler.
        for num_reqs in {1, max_num_reqs}:
            nothing = np.zeros(num_reqs, dtype=np.int32)
            slots = torch.zeros(num_reqs, dtype=torch.int64, device=req_states.device)
            self._trimmer.fill(slots, nothing, nothing, draft_values.confidences, 0)

    def add_request(self, req_idx: int) -> None:
        """Note that a slot has a new request, until :meth:`forget_former_requests`."""
        self._new_slots.append(req_idx)

    def forget_former_requests(self) -> None:
        """Forget what the former requests of the step's new ones left in their slots.

        All at once: hundreds of prompts may come in one step.
        """
        if not self._new_slots:
            return
        device = self._req_states.device
        slots = torch.tensor(
            self._new_slots, dtype=torch.int64, pin_memory=device.type == "cuda"
        ).to(device, non_blocking=True)
        self._new_slots.clear()
        self._num_valid_drafts.index_fill_(0, slots, 0)
        self._draft_values.forget(slots)

    def choose(self, scheduler_output: Any) -> int:
        """Choose the step's draft budget, before the runner sees the step.

        Returns:
            The number of draft places to verify. With 0 the drafts may be taken out of
            the step.
        """
        policy = self.policy
        tally = self._lagged.read()
        if tally is not None:
            # What drafts for a few places are worth says nothing of the others.
            if not self._had_few_places[0]:
                policy.observe(tally)
            self._note_impossible(int(tally[IMPOSSIBLE]))
        self._few_places = getattr(scheduler_output, FEW_PLACES, False)
        policy.cost_ratios = getattr(scheduler_output, COST_RATIOS, CostRatios())
        # Of the requests that were there before: new ones have none yet.
        contexts = scheduler_output.scheduled_cached_reqs.num_computed_tokens
        if contexts:
            policy.context_ratio = sum(contexts) / len(contexts) / self._context_len
        drafts = scheduler_output.scheduled_spec_decode_tokens
        num_tokens = scheduler_output.total_num_scheduled_tokens
        num_reqs = self.num_requests = len(scheduler_output.num_scheduled_tokens)
        num_drafts = sum(map(len, drafts.values()))
        num_plain = self._num_plain = num_tokens - num_drafts
        self.draft_budget = 0
        if drafts:
            most = self._trimmer.max_draft_budget(num_reqs)
            if num_plain > num_reqs and num_tokens >= self._most_tokens:
                most = min(most, max(num_plain // SHARE_OF_FULL_STEP, 1))
            self.draft_budget = policy.choose(num_plain, len(drafts), num_drafts, most)
        elif tally is not None and policy.asleep:
            num_decoding = sum(
                n == 1 for n in scheduler_output.num_scheduled_tokens.values()
            )
            num_places = min(
                num_decoding * self._num_wanted,
                self._trimmer.max_draft_budget(num_reqs),
            )
            policy.pass_by(num_tokens, num_decoding, num_places)
        # Until the scheduler has heard that it woke, drafts go on being judged alone.
        self._draft_values.asleep |= policy.asleep
        self._draft_values.stirring = policy.stirring
        self.num_places = 0 if policy.asleep else self._num_wanted
        self.kind = self._kind(bool(drafts))
        self.expected_ms = self.plain_ms = 0.0
        if num_plain == num_reqs:
            self.expected_ms = policy.cost_of(num_reqs, self.draft_budget)
            self.plain_ms = policy.cost_of(num_reqs, 0)
        if self._log is not None:
            self._log.note(self.draft_budget, len(drafts), num_drafts, tally)
        return self.draft_budget

    def _kind(self, has_places: bool) -> StepKind:
        if self.draft_budget:
            return StepKind.DRAFTS
        # Where all plain steps have places, those are what plain steps cost.
        return (
            StepKind.PLACES if has_places and self._has_bare_steps else StepKind.PLAIN
        )

    def _note_impossible(self, num_requests: int) -> None:
        if num_requests and not self.num_impossible and self.speaks:
            logger.warning(
                "mrv2-spec: %s publishes draft counts outside 0..%d, or confidences "
                "outside 0..1; they are clamped",
                self._drafter,
                self._req_states.num_speculative_steps,
            )
        self.num_impossible += num_requests

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        """Return the step's number of tokens under the budget that was chosen."""
        return self._num_plain + self.draft_budget

    def compact_batch(
        self,
        num_draft_tokens_per_req: Int32Array,
        num_scheduled_tokens: Int32Array,
        cu_num_logits_np: Int32Array,
    ) -> tuple[Int32Array, Int32Array]:
        """Lay the budget out on the host, evenly: the device decides who gets it.

        Returns:
            Token counts [num_reqs] that sum to the step's tokens, and
            ``cu_num_logits`` [num_reqs + 1], exact only if nothing is verified.
        """
        self._num_drafts = num_draft_tokens_per_req
        self._num_scheduled = num_scheduled_tokens
        non_draft = num_scheduled_tokens - num_draft_tokens_per_req
        if self.draft_budget == 0:
            num_logits = np.arange(cu_num_logits_np.shape[0], dtype=np.int32)
            return non_draft, num_logits * self._trimmer.num_bonus_tokens
        return (
            non_draft + _spread(self.draft_budget, num_draft_tokens_per_req),
            cu_num_logits_np,
        )

    def reallocate_drafts(
        self, req_ids: list[str], idx_mapping: torch.Tensor
    ) -> tuple[Any, ...]:
        """Lay the budget out on the device.

        Returns:
            ``cu_num_logits`` [num_reqs + 1] and ``query_start_loc``
            [max_num_reqs + 1] on the device, the budget and, for vLLM 0.33, None.
        """
        cu_num_logits, query_start_loc = self._trimmer.fill(
            idx_mapping,
            self._num_drafts,
            self._num_scheduled,
            self._draft_values.confidences,
            self.draft_budget,
        )
        result = (cu_num_logits, query_start_loc, self.draft_budget)
        return (*result, None) if self._returns_admitted_counts else result

    def record_confidences(
        self, confidence_probs: torch.Tensor | None, input_batch: Any
    ) -> None:
        """Send what was just drafted on its way to the host."""
        tally = self._draft_values.take_tally()
        self._lagged.publish(tally)
        # Asleep, drafts are made for all places, scheduled or not.
        asleep = self._draft_values.asleep
        if asleep and tally is not None:
            # A step that looks takes the host longer than a plain one.
            self.expected_ms = 0.0
        self._had_few_places.append(self._few_places and not asleep)

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """Yield the dummy steps whose timings make the cost curves."""
        assert self.profile is not None
        yield from self.profile.batches(capture_sizes)

    def set_initial_cost_curves(self, samples: list[Any]) -> None:
        """Make the cost curves of the dummy steps' timings, the same on all ranks."""
        assert self.profile is not None
        costs, graph_sizes = self.profile.costs(samples)
        self.policy.use_costs(costs, graph_sizes)
        self.costs_are_measured = True
        if self.speaks:
            logger.info("mrv2-spec: %s", costs.describe())


def _spread(budget: int, capacities: Int32Array) -> Int32Array:
    """Spread a budget over places of given capacity, about evenly."""
    num_places = capacities.shape[0]
    if num_places and budget < num_places * capacities.min():
        # As in most steps there is room for an equal share everywhere.
        share, extra = divmod(budget, num_places)
        widths = np.full_like(capacities, share)
        widths[:extra] += 1
        return widths
    widths = np.zeros_like(capacities)
    left = budget
    while left > 0:
        open_places = np.flatnonzero(widths < capacities)
        share, extra = divmod(left, open_places.shape[0])
        grant = np.full(open_places.shape[0], share, dtype=widths.dtype)
        grant[:extra] += 1
        grant = np.minimum(grant, (capacities - widths)[open_places])
        widths[open_places] += grant
        left -= int(grant.sum())
    return widths


def _speaks(parallel: Any) -> bool:
    """Tell whether this rank is the first of those that draft: the last stage's."""
    num_ranks = parallel.world_size // parallel.pipeline_parallel_size
    return bool(parallel.rank == (parallel.pipeline_parallel_size - 1) * num_ranks)


def _announce(vllm_config: Any, speculator: Any, why_not: str | None) -> None:
    spec_config = vllm_config.speculative_config
    describe = getattr(speculator, "describe", None)
    if not _speaks(vllm_config.parallel_config):
        return
    logger.info(
        "mrv2-spec: method %s (%s%s), k=%d, trimmer %s, V2 runner, async scheduling %s",
        spec_config.method,
        type(speculator).__name__,
        f", {describe()}" if describe is not None else "",
        vllm_config.num_speculative_tokens,
        "on" if why_not is None else f"off: {why_not}",
        "on" if vllm_config.scheduler_config.async_scheduling else "off",
    )


def _warn_of_unused_costs(manager: TrimManager, graph_manager: Any) -> None:
    if (
        manager.speaks
        and manager.settings.cost_file is not None
        and not graph_manager.needs_capture()
    ):
        logger.warning(
            "mrv2-spec: cost_file=%r is not used: costs are measured where CUDA graphs "
            "are captured, and guessed where none are",
            manager.settings.cost_file,
        )


def _wrap_create(original: Callable[..., Any]) -> Callable[..., Any]:
    def maybe_create_adaptive_verification_manager(**kwargs: Any) -> Any:
        req_states = kwargs["req_states"]
        speculator = speculator_of(req_states)
        if speculator is None:
            return original(**kwargs)
        vllm_config = kwargs["vllm_config"]
        settings = parse_settings(vllm_config.additional_config)
        why_not = why_not_trimmed(
            vllm_config, speculator, kwargs["attn_groups"], settings
        )
        setattr(req_states, _WHY_NOT_TRIMMED, why_not)
        if why_not is not None:
            return None
        return TrimManager(
            vllm_config,
            speculator,
            draft_values_of(req_states),
            req_states,
            kwargs["query_start_loc"],
            kwargs["num_bonus_tokens"],
            kwargs["max_total_logits"],
            "copy_admitted_drafts_to_host" in kwargs,
            drafts_unasked(speculator),
        )

    return maybe_create_adaptive_verification_manager


def _wrap_graph_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    def resolve_adaptive_cudagraph_mode(
        mode: Any, *, piecewise_capture_available: bool
    ) -> Any:
        # vLLM's own manager insists on full graphs; ours also runs without.
        if not mode.has_full_cudagraphs():
            return mode
        return original(mode, piecewise_capture_available=piecewise_capture_available)

    return resolve_adaptive_cudagraph_mode


def _wrap_initialize(original: Callable[..., Any]) -> Callable[..., Any]:
    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        speculator = speculator_of(self.req_states)
        if speculator is None:
            return result
        # A trimmed batch's row boundaries are exact on the device only.
        manager = self.adaptive_verification
        self.rejection_sampler.enable_adaptive_verification = isinstance(
            manager, TrimManager
        )
        if isinstance(manager, TrimManager):
            manager.profile = StepProfile(
                self, manager.max_total_logits, manager.settings.cost_file
            )
        bound = inspect.signature(original).bind(self, *args, **kwargs)
        if not bound.arguments.get("is_profiling", False):
            why_not = getattr(self.req_states, _WHY_NOT_TRIMMED)
            _announce(self.vllm_config, speculator, why_not)
            if isinstance(manager, TrimManager):
                _warn_of_unused_costs(manager, self.cudagraph_manager)
        return result

    return initialize_kv_cache


_CREATE_0_32 = (
    "enable_adaptive_verification",
    "attn_groups",
    "req_states",
    "query_start_loc",
    "num_bonus_tokens",
    "max_total_logits",
    "vllm_config",
    "target_layer_names",
    "additional_attn_cg_support",
)

PATCHES = (
    Patch(
        "maybe_create_adaptive_verification_manager",
        (_CREATE_0_32, (*_CREATE_0_32, "copy_admitted_drafts_to_host")),
        _wrap_create,
    ),
    Patch(
        "resolve_adaptive_cudagraph_mode",
        (("mode", "piecewise_capture_available"),),
        _wrap_graph_mode,
    ),
    Patch(
        "GPUModelRunner.initialize_kv_cache",
        (
            (
                "self",
                "kv_cache_config",
                "is_profiling",
                "kv_cache_allocation_context",
            ),
        ),
        _wrap_initialize,
    ),
)
