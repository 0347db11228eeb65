"""Books the drafts in the scheduler, and shows them where vLLM shows its own counts.

The engine's part travels to the front end as one more field of vLLM's statistics, and
what a request did as one more field of its acceptance metrics. vLLM's own counters are
told which scheduled places held a verified draft; the rest are invalid ones to it.
"""

import logging
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import numpy as np

from mrv2_spec.counters import ACCEPTED, VERIFIED, DraftCounts
from mrv2_spec.integration.counting import STEP_COUNTS
from mrv2_spec.integration.methods import is_served, served_method
from mrv2_spec.integration.patching import Patch, PatchField
from mrv2_spec.integration.signatures import UPDATE_FROM_OUTPUT
from mrv2_spec.metrics.ledger import Ledger
from mrv2_spec.metrics.log_line import log_line
from mrv2_spec.metrics.step import Int32Array, StepCounts, settle

logger = logging.getLogger("vllm.mrv2_spec")

# More than the steps that an engine can be ahead; a paused one may never be done.
_MOST_STEPS_LEFT = 8
# The field added to vLLM's statistics, and to a request's metrics.
FIELD = "mrv2_spec"
# On the scheduler.
_LEDGER = "_mrv2_spec_ledger"
_CUTS = "_mrv2_spec_cuts"
# During an update: whether the step is booked here, so that vLLM need not count it.
_BOOKED = "_mrv2_spec_booked"
# What vLLM calls the number of drafts, since the last send.
_UNSENT_DRAFTS = "_mrv2_spec_unsent_drafts"
_LAST_SENT = "_mrv2_spec_last_sent"
# A busy engine's counts go to the front end once in so many seconds.
_SECONDS_BETWEEN_SENDS = 0.1
# On vLLM's logging and Prometheus classes.
_SINCE_LAST_LINE = "_mrv2_spec_counts"
_SINCE_START = "_mrv2_spec_all_counts"
_ENGINE = "_mrv2_spec_engine"
_PROMETHEUS = "_mrv2_spec_counters"

# vLLM's logging objects that got counts, one an engine.
_logs: WeakSet[Any] = WeakSet()


def ledger_of(scheduler: Any) -> Ledger | None:
    """Return the ledger of a scheduler, or None if it has booked no drafts yet."""
    return getattr(scheduler, _LEDGER, None)


def _wrap_update(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_from_output(
        self: Any, scheduler_output: Any, model_runner_output: Any
    ) -> Any:
        step: StepCounts | None = getattr(model_runner_output, STEP_COUNTS, None)
        setattr(self, _BOOKED, step is not None)
        if step is not None:
            _prepare(self, step, scheduler_output, model_runner_output.req_ids)
        outputs = original(self, scheduler_output, model_runner_output)
        ledger = ledger_of(self)
        if step is not None:
            if ledger is None:
                ledger = Ledger(
                    self.num_spec_tokens, self.scheduler_config.max_num_seqs
                )
                setattr(self, _LEDGER, ledger)
            _book(
                self,
                ledger,
                step,
                scheduler_output,
                model_runner_output.req_ids,
                outputs,
            )
        elif ledger is not None:
            # Whatever was verified is lost, but who came and went is known.
            ledger.skip(
                _new(scheduler_output),
                scheduler_output.finished_req_ids,
                scheduler_output.preempted_req_ids or (),
            )
        if ledger is not None:
            # Without counts of its own, too: nothing may come after this step.
            _send(self, ledger, outputs)
        return outputs

    return update_from_output


def _new(scheduler_output: Any) -> set[str]:
    return {data.req_id for data in scheduler_output.scheduled_new_reqs}


def _prepare(
    scheduler: Any, step: StepCounts, scheduler_output: Any, req_ids: list[str]
) -> None:
    """Complete a step's counts, and lay out what vLLM is about to ask of it."""
    cuts = _take_cuts(scheduler, req_ids)
    if cuts:
        step.cut(req_ids, cuts)
    if scheduler_output.scheduled_spec_decode_tokens and _tells_requests(scheduler):
        _tell_vllm(
            scheduler_output, req_ids, _verified(step, scheduler.num_spec_tokens)
        )


def _verified(step: StepCounts, num_drafts: int) -> list[int]:
    if step.drafts is None:
        return [0] * step.slots.shape[0]
    lengths, _ = settle(step, step.drafts, num_drafts)
    verified: list[int] = (lengths[VERIFIED] * step.is_round).tolist()
    return verified


def _book(
    scheduler: Any,
    ledger: Ledger,
    step: StepCounts,
    scheduler_output: Any,
    req_ids: list[str],
    outputs: dict[int, Any],
) -> None:
    """Book a step that the scheduler took in."""
    dropped = _dropped(outputs, req_ids, step.num_sampled)
    ledger.book(
        step,
        req_ids,
        new=_new(scheduler_output),
        finished=scheduler_output.finished_req_ids,
        dropped=dropped,
    )
    scheduled = scheduler_output.scheduled_spec_decode_tokens
    if scheduled and scheduler.log_stats:
        found = step.num_sampled
        if dropped or len(scheduled) < len(req_ids):
            found = found * [req_id in scheduled for req_id in req_ids]
            found[dropped] = 0
        before = getattr(scheduler, _UNSENT_DRAFTS, 0)
        setattr(scheduler, _UNSENT_DRAFTS, before + int(np.count_nonzero(found)))


def _tells_requests(scheduler: Any) -> bool:
    """Tell whether replies say what their request's drafts came to."""
    return bool(scheduler.spec_decode_metrics_level != "none")


def _dropped(
    outputs: dict[int, Any], req_ids: list[str], num_sampled: Int32Array
) -> list[int]:
    """Return the batch indices whose tokens the scheduler did not take.

    Their requests had ended or were preempted, or what their context should have been
    loaded from was lost. Of all others it hands on an output with tokens.
    """
    of_clients = [client.outputs for client in outputs.values() if client.outputs]
    # Where a request fails, its output without tokens comes behind all with tokens.
    if sum(map(len, of_clients)) == np.count_nonzero(num_sampled) and all(
        of_client[-1].new_token_ids for of_client in of_clients
    ):
        return []
    taken = {
        output.request_id
        for of_client in of_clients
        for output in of_client
        if output.new_token_ids
    }
    return [
        i
        for i, (req_id, number) in enumerate(
            zip(req_ids, num_sampled.tolist(), strict=True)
        )
        if number and req_id not in taken
    ]


def _take_cuts(scheduler: Any, req_ids: list[str]) -> dict[str, int]:
    cuts: dict[str, int] = getattr(scheduler, _CUTS, {})
    if not cuts:
        return {}
    taken = {req_id: cuts.pop(req_id) for req_id in req_ids if req_id in cuts}
    # A request that was not scheduled keeps its drafts, and so its cut, while it lives.
    for req_id in cuts.keys() - scheduler.requests.keys():
        del cuts[req_id]
    return taken


def _tell_vllm(scheduler_output: Any, req_ids: list[str], verified: list[int]) -> None:
    scheduled = scheduler_output.scheduled_spec_decode_tokens
    scheduler_output.num_invalid_spec_tokens = {
        req_id: len(scheduled[req_id]) - number
        for req_id, number in zip(req_ids, verified, strict=True)
        if req_id in scheduled
    }


def _wrap_make_stats(original: Callable[..., Any]) -> Callable[..., Any]:
    # Asked once a request: to gather arguments would take three times as long.
    def make_spec_decoding_stats(
        self: Any,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: Any,
        request_id: str,
    ) -> Any:
        if getattr(self, _BOOKED, False):
            return None
        return original(
            self,
            spec_decoding_stats,
            num_draft_tokens,
            num_accepted_tokens,
            num_invalid_spec_tokens,
            request_id,
        )

    return make_spec_decoding_stats


def _send(scheduler: Any, ledger: Ledger, outputs: dict[int, Any]) -> None:
    for_requests = _tells_requests(scheduler)
    for output in outputs.values():
        stats = output.scheduler_stats
        if stats is not None and _is_due(scheduler):
            _add_unsent(scheduler, ledger, stats)
        if for_requests:
            for one in output.outputs:
                if one.spec_decode_metrics is not None:
                    counts = ledger.of_request(one.request_id)
                    if counts is not None:
                        setattr(one.spec_decode_metrics, FIELD, counts.to_list())


def _add_unsent(scheduler: Any, ledger: Ledger, stats: Any) -> None:
    """Add to vLLM's statistics what was booked since the last send.

    vLLM's own counts as well: these are sums over steps, and to sum them up request by
    request and step by step would take much longer. A filler that happened to be right
    is no draft to them.
    """
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    num_drafts: int = getattr(scheduler, _UNSENT_DRAFTS, 0)
    unsent = ledger.take_unsent()
    if unsent is None and not num_drafts:
        return
    setattr(scheduler, _UNSENT_DRAFTS, 0)
    spec = stats.spec_decoding_stats
    if spec is None:
        spec = SpecDecodingStats.new(scheduler.num_spec_tokens)
        stats.spec_decoding_stats = spec
    spec.num_drafts += num_drafts
    if unsent is not None:
        verified, accepted = (unsent.at(n).sum(axis=0) for n in (VERIFIED, ACCEPTED))
        spec.num_draft_tokens += int(verified.sum())
        spec.num_accepted_tokens += int(accepted.sum())
        verified += spec.num_draft_tokens_per_pos
        accepted += spec.num_accepted_tokens_per_pos
        spec.num_draft_tokens_per_pos = verified.tolist()
        spec.num_accepted_tokens_per_pos = accepted.tolist()
        setattr(spec, FIELD, unsent.to_list())


def _is_due(scheduler: Any) -> bool:
    """Tell whether to send counts; always with the last step before a pause."""
    if getattr(scheduler, "_mrv2_spec_draining", False):
        return False
    now = time.monotonic()
    waited = now - getattr(scheduler, _LAST_SENT, 0.0)
    if waited < _SECONDS_BETWEEN_SENDS and scheduler.has_unfinished_requests():
        return False
    setattr(scheduler, _LAST_SENT, now)
    return True


def _wrap_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    # Without async scheduling a grammar shortens drafts before they are scheduled.
    def update_draft_token_ids(self: Any, draft_token_ids: Any) -> None:
        offered = [
            sum(token >= 0 for token in tokens)
            for tokens in draft_token_ids.draft_token_ids
        ]
        original(self, draft_token_ids)
        cuts: dict[str, int] = getattr(self, _CUTS, {})
        for req_id, number in zip(draft_token_ids.req_ids, offered, strict=True):
            request = self.requests.get(req_id)
            cuts.pop(req_id, None)
            if (
                request is not None
                and request.use_structured_output
                and not request.is_prefill_chunk
                and len(request.spec_token_ids) < number
            ):
                cuts[req_id] = len(request.spec_token_ids)
        setattr(self, _CUTS, cuts)

    return update_draft_token_ids


def _drain(engine_core: Any) -> None:
    """Take in what is left when no request is: the engine stops a step too early.

    What an engine in the caller's process books here goes to its front end with the
    next step's statistics.
    """
    scheduler = engine_core.scheduler
    own_process = hasattr(engine_core, "_process_engine_step")
    step = engine_core._process_engine_step if own_process else engine_core.step_fn
    scheduler._mrv2_spec_draining = not own_process
    try:
        for _ in range(_MOST_STEPS_LEFT):
            if scheduler.has_unfinished_requests() or not (
                scheduler.has_finished_requests() or engine_core.batch_queue
            ):
                break
            step()
    finally:
        scheduler._mrv2_spec_draining = False


def _counters(_: None) -> Callable[[Any], list[int] | None]:
    def mrv2_spec_counters(self: Any) -> list[int] | None:
        _drain(self)
        ledger = ledger_of(self.scheduler)
        if ledger is not None:
            return ledger.total.to_list()
        if served_method(self.vllm_config) in (None, "custom_class"):
            return None
        return DraftCounts(self.scheduler.num_spec_tokens).to_list()

    return mrv2_spec_counters


def _request_counters(_: None) -> Callable[[Any], list[tuple[str, list[int]]]]:
    def mrv2_spec_request_counters(self: Any) -> list[tuple[str, list[int]]]:
        _drain(self)
        ledger = ledger_of(self.scheduler)
        found = [] if ledger is None else ledger.requests()
        return [(req_id, counts.to_list()) for req_id, counts in found]

    return mrv2_spec_request_counters


def _wrap_observe_draft(original: Callable[..., Any]) -> Callable[..., Any]:
    def observe_draft(
        self: Any, num_draft_tokens: int, num_accepted_tokens: int
    ) -> None:
        # A filler that happened to be right was no draft.
        original(self, num_draft_tokens, min(num_accepted_tokens, num_draft_tokens))

    return observe_draft


def _wrap_observe_request(original: Callable[..., Any]) -> Callable[..., Any]:
    def observe(
        self: Any, num_draft_tokens: int, num_accepted: int, detailed: bool = False
    ) -> None:
        original(self, num_draft_tokens, min(num_accepted, num_draft_tokens), detailed)

    return observe


def _wrap_to_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_dict(self: Any) -> dict[str, Any]:
        result: dict[str, Any] = original(self)
        values = getattr(self, FIELD, None)
        if values is not None:
            result[FIELD] = DraftCounts.from_list(values).as_dict()
        return result

    return to_dict


def _wrap_logger_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, vllm_config: Any, engine_index: int = 0) -> None:
        original(self, vllm_config, engine_index)
        # Such as "Engine 000: ", as vLLM's own lines begin; a subclass may make it of
        # what it sets up later.
        prefix = getattr(self, "log_prefix", "")
        setattr(self.spec_decoding_logging, _ENGINE, prefix)

    return __init__


def _wrap_log_observe(original: Callable[..., Any]) -> Callable[..., Any]:
    def observe(self: Any, spec_decoding_stats: Any) -> None:
        values = getattr(spec_decoding_stats, FIELD, None)
        if values is not None:
            counts = DraftCounts.from_list(values)
            for name in (_SINCE_LAST_LINE, _SINCE_START):
                before = getattr(self, name, None)
                setattr(self, name, counts if before is None else before + counts)
            _logs.add(self)
            # Made to carry ours: vLLM would divide by its number of drafts.
            if spec_decoding_stats.num_drafts == 0:
                return
        original(self, spec_decoding_stats)

    return observe


def _wrap_log(original: Callable[..., Any]) -> Callable[..., Any]:
    def log(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        counts = getattr(self, _SINCE_LAST_LINE, None)
        if counts is not None:
            setattr(self, _SINCE_LAST_LINE, None)
            log_fn = args[0] if args else kwargs.get("log_fn", logger.info)
            log_fn("mrv2-spec: %s", log_line(counts))

    return log


def _wrap_shutdown(original: Callable[..., Any]) -> Callable[..., Any]:
    # In the front end: it may end the engine's process without asking.
    def shutdown(self: Any, timeout: float | None = None) -> None:
        for log in list(_logs):
            counts = getattr(log, _SINCE_START)
            engine = getattr(log, _ENGINE, "")
            logger.info("%smrv2-spec, all in all: %s", engine, log_line(counts))
        # It is called again when the object goes.
        _logs.clear()
        original(self, timeout)

    return shutdown


def _wrap_prometheus_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(
        self: Any,
        speculative_config: Any,
        labelnames: Any,
        per_engine_labelvalues: Any,
        is_diffusion: bool = False,
    ) -> None:
        original(
            self, speculative_config, labelnames, per_engine_labelvalues, is_diffusion
        )
        if is_served(speculative_config):
            from mrv2_spec.metrics.prometheus import DraftCounters

            counters = DraftCounters(
                self._counter_cls,
                labelnames,
                per_engine_labelvalues,
                speculative_config.method,
                speculative_config.num_speculative_tokens,
            )
            setattr(self, _PROMETHEUS, counters)

    return __init__


def _wrap_prometheus_observe(original: Callable[..., Any]) -> Callable[..., Any]:
    def observe(self: Any, spec_decoding_stats: Any, engine_idx: int = 0) -> None:
        original(self, spec_decoding_stats, engine_idx)
        values = getattr(spec_decoding_stats, FIELD, None)
        counters = getattr(self, _PROMETHEUS, None)
        if values is not None and counters is not None:
            counters.observe(DraftCounts.from_list(values), engine_idx)

    return observe


SCHEDULER_PATCHES = (
    Patch("Scheduler.update_from_output", UPDATE_FROM_OUTPUT, _wrap_update),
    Patch(
        "Scheduler.make_spec_decoding_stats",
        (
            (
                "self",
                "spec_decoding_stats",
                "num_draft_tokens",
                "num_accepted_tokens",
                "num_invalid_spec_tokens",
                "request_id",
            ),
        ),
        _wrap_make_stats,
    ),
    Patch(
        "Scheduler.update_draft_token_ids",
        (("self", "draft_token_ids"),),
        _wrap_drafts,
    ),
)

FRONT_END_PATCHES = (
    Patch("AsyncLLM.shutdown", (("self", "timeout"),), _wrap_shutdown),
)

LOGGER_PATCHES = (
    Patch(
        "LoggingStatLogger.__init__",
        (("self", "vllm_config", "engine_index"),),
        _wrap_logger_init,
    ),
)

ENGINE_PATCHES = (
    Patch("EngineCore.mrv2_spec_counters", (), _counters),
    Patch("EngineCore.mrv2_spec_request_counters", (), _request_counters),
)

# The fields first: an engine's messages are laid out when its client is made.
STATS_PATCHES = (
    PatchField("SpecDecodingStats", FIELD, list[int] | None),
    Patch(
        "SpecDecodingStats.observe_draft",
        (("self", "num_draft_tokens", "num_accepted_tokens"),),
        _wrap_observe_draft,
    ),
    Patch(
        "SpecDecodingLogging.observe",
        (("self", "spec_decoding_stats"),),
        _wrap_log_observe,
    ),
    Patch("SpecDecodingLogging.log", (("self", "log_fn"),), _wrap_log),
    Patch(
        "SpecDecodingProm.__init__",
        (
            (
                "self",
                "speculative_config",
                "labelnames",
                "per_engine_labelvalues",
                "is_diffusion",
            ),
        ),
        _wrap_prometheus_init,
    ),
    Patch(
        "SpecDecodingProm.observe",
        (("self", "spec_decoding_stats", "engine_idx"),),
        _wrap_prometheus_observe,
    ),
)

REQUEST_PATCHES = (
    PatchField("RequestSpecDecodeMetrics", FIELD, list[int] | None),
    Patch(
        "RequestSpecDecodeMetrics.observe",
        (("self", "num_draft_tokens", "num_accepted", "detailed"),),
        _wrap_observe_request,
    ),
    Patch("RequestSpecDecodeMetrics.to_dict", (("self",),), _wrap_to_dict),
)
