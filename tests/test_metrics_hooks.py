"""The hooks that book drafts and show them: vLLM's own classes, made-up steps."""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler")

import msgspec
import prometheus_client
from vllm.config import VllmConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.loggers import AggregatedLoggingStatLogger, LoggingStatLogger
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.request import RequestStatus
from vllm.v1.spec_decode.metrics import (
    SpecDecodingLogging,
    SpecDecodingProm,
    SpecDecodingStats,
)

from mrv2_spec import integration
from mrv2_spec.counters import DraftCounts, Totals
from mrv2_spec.integration import metrics
from mrv2_spec.integration.counting import STEP_COUNTS
from mrv2_spec.integration.methods import mark_served
from mrv2_spec.metrics import names
from mrv2_spec.metrics.prometheus import forget_registered
from mrv2_spec.metrics.step import Ended, StepCounts
from mrv2_spec.scorecard.scrape import parse

K = 4


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    integration.install()
    yield
    integration.uninstall()
    forget_registered()


@dataclass
class Request:
    status: Any = RequestStatus.RUNNING
    drop_stale_output: bool = False
    num_stale_output_tokens: int = 0
    use_structured_output: bool = False
    is_prefill_chunk: bool = False
    spec_token_ids: list[int] = field(default_factory=list)


class FakeScheduler:
    """What the hook reads of a scheduler, and vLLM's own way to count."""

    num_spec_tokens = K
    scheduler_config = SimpleNamespace(max_num_seqs=12)
    log_stats = True
    spec_decode_metrics_level = "detailed"
    is_busy = False
    _mrv2_spec_draining = False

    def __init__(self, requests: dict[str, Request]) -> None:
        self.requests = requests
        # Whose context could not be loaded, as the step found; and whether they fail.
        self.not_loaded: set[str] = set()
        self.fails_not_loaded = False
        self.per_request = {r: RequestSpecDecodeMetrics.new(K) for r in requests}

    def has_unfinished_requests(self) -> bool:
        """Tell what the test says."""
        return self.is_busy

    def update_from_output(self, scheduler_output: Any, output: Any) -> dict[int, Any]:
        """Take tokens and count as vLLM does."""
        stats = None
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        outputs = []
        for i, req_id in enumerate(output.req_ids):
            request = self.requests.get(req_id)
            if req_id in self.not_loaded or request is None:
                continue
            if RequestStatus.is_finished(request.status):
                continue
            if request.num_stale_output_tokens > 0 and request.drop_stale_output:
                continue
            tokens = output.sampled_token_ids[i]
            if not tokens:
                continue
            if req_id in scheduled:
                num_accepted = len(tokens) - 1
                stats = Scheduler.make_spec_decoding_stats(
                    self,
                    stats,
                    num_draft_tokens=len(scheduled[req_id]),
                    num_accepted_tokens=num_accepted,
                    num_invalid_spec_tokens=scheduler_output.num_invalid_spec_tokens,
                    request_id=req_id,
                )
                invalid = (scheduler_output.num_invalid_spec_tokens or {}).get(
                    req_id, 0
                )
                self.per_request[req_id].observe(
                    len(scheduled[req_id]) - invalid, num_accepted, detailed=True
                )
            outputs.append(
                EngineCoreOutput(
                    req_id, tokens, spec_decode_metrics=self.per_request.get(req_id)
                )
            )
        if self.fails_not_loaded:
            outputs += [EngineCoreOutput(r, []) for r in self.not_loaded]
        return {
            0: EngineCoreOutputs(
                outputs=outputs,
                scheduler_stats=SchedulerStats(spec_decoding_stats=stats),
            )
        }


def update(
    scheduler: FakeScheduler,
    req_ids: list[str],
    proposed: list[int],
    widths: list[int],
    sampled: list[int],
    *,
    scheduled: int = K,
    new: tuple[str, ...] = (),
    finished: frozenset[str] = frozenset(),
    ended: tuple[Ended, ...] = (),
    without: frozenset[str] = frozenset(),
) -> dict[int, Any]:
    """Run the hook around a step; all but new requests are past their prefill.

    Those in ``without`` have no places scheduled.
    """
    step = StepCounts(
        slots=np.arange(len(req_ids)),
        drafts=np.array([widths, proposed, [0] * len(req_ids)], dtype=np.int32),
        num_sampled=np.array(sampled, dtype=np.int32),
        is_round=np.array(
            [r not in new and n > 0 for r, n in zip(req_ids, sampled, strict=True)],
            dtype=np.bool_,
        ),
        ended=list(ended),
    )
    output = SimpleNamespace(
        req_ids=req_ids, sampled_token_ids=[[7] * n for n in sampled]
    )
    setattr(output, STEP_COUNTS, step)
    scheduler_output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=r) for r in new],
        finished_req_ids=set(finished),
        scheduled_spec_decode_tokens={
            r: [-1] * scheduled
            for r in req_ids
            if r not in new and r not in without and scheduled
        },
        num_invalid_spec_tokens=None,
    )
    patched = metrics._wrap_update(FakeScheduler.update_from_output)
    found: dict[int, Any] = patched(scheduler, scheduler_output, output)
    return found


def stats_of(outputs: dict[int, Any]) -> Any:
    return outputs[0].scheduler_stats.spec_decoding_stats


def test_vllm_is_told_which_places_held_a_verified_draft() -> None:
    scheduler = FakeScheduler({"a": Request(), "b": Request()})
    update(scheduler, ["a", "b"], [0, 0], [0, 0], [1, 1], new=("a", "b"))
    # Two places hold drafts, one filler is right beside them; one holds none at all
    # and its filler is right.
    stats = stats_of(update(scheduler, ["a", "b"], [2, 0], [4, 1], [4, 2]))
    assert (stats.num_drafts, stats.num_draft_tokens) == (2, 2)
    assert stats.num_accepted_tokens == 2
    assert stats.num_accepted_tokens_per_pos == [1, 1, 0, 0]
    # A real draft that was trimmed is no draft to vLLM.
    stats = stats_of(update(scheduler, ["a", "b"], [4, 4], [1, 0], [2, 1]))
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (1, 1)
    a = scheduler.per_request["a"]
    assert a.num_draft_tokens == 3
    assert (a.per_step_accepted, a.per_step_drafted) == ([2, 1], [2, 1])
    assert scheduler.per_request["b"].histogram == [2, 0, 0, 0, 0]


def vllms_numbers(stats: SpecDecodingStats | None) -> list[int]:
    if stats is None:
        return [0] * (3 + 2 * K)
    return [
        stats.num_drafts,
        stats.num_draft_tokens,
        stats.num_accepted_tokens,
        *stats.num_draft_tokens_per_pos,
        *stats.num_accepted_tokens_per_pos,
    ]


@pytest.mark.parametrize("is_busy", [False, True])
def test_vllms_counts_are_those_that_it_would_sum_up_itself(
    rng: random.Random, is_busy: bool
) -> None:
    names_ = [f"r{i}" for i in range(12)]
    scheduler = FakeScheduler({r: Request() for r in names_})
    update(scheduler, names_, [0] * 12, [0] * 12, [1] * 12, new=tuple(names_))
    scheduler.is_busy = is_busy
    all_expected, all_found = np.zeros((2, 3 + 2 * K), dtype=int)
    num_sent = 0
    for step in range(50):
        for name in names_:
            gone = rng.random() < 0.1
            scheduler.requests[name].status = (
                RequestStatus.FINISHED_STOPPED if gone else RequestStatus.RUNNING
            )
        req_ids = rng.sample(names_, rng.randint(1, 12))
        without = frozenset(r for r in req_ids if rng.random() < 0.2)
        widths = [0 if r in without else rng.randint(0, K) for r in req_ids]
        proposed = [rng.randint(0, K) for _ in req_ids]
        sampled = [rng.randint(0, w + 1) for w in widths]
        expected = SpecDecodingStats.new(K)
        for r, width, real, num in zip(req_ids, widths, proposed, sampled, strict=True):
            is_running = scheduler.requests[r].status is RequestStatus.RUNNING
            if is_running and num and r not in without:
                verified = min(width, real)
                expected.observe_draft(verified, min(num - 1, verified))
        scheduler.is_busy = is_busy and step < 49
        outputs = update(scheduler, req_ids, widths, proposed, sampled, without=without)
        found = stats_of(outputs)
        if not is_busy:
            assert vllms_numbers(found) == vllms_numbers(expected)
        all_expected += vllms_numbers(expected)
        all_found += vllms_numbers(found)
        num_sent += found is not None
    assert all_found.tolist() == all_expected.tolist()
    assert num_sent < 10 or not is_busy


def test_a_busy_engine_sends_its_counts_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = FakeScheduler({"a": Request()})
    scheduler.is_busy = True
    now = 1000.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    update(scheduler, ["a"], [0], [0], [1], new=("a",))
    sent = []
    for _ in range(30):
        now += 0.02
        stats = stats_of(update(scheduler, ["a"], [2], [2], [2]))
        if stats is not None:
            sent.append(DraftCounts.from_list(stats.mrv2_spec).totals().proposed)
            assert stats.num_drafts == sent[-1] / 2
    assert len(sent) in (5, 6) and sum(sent) <= 60
    # What is taken in while it drains goes with the next step.
    scheduler.is_busy = False
    scheduler._mrv2_spec_draining = True
    assert stats_of(update(scheduler, ["a"], [2], [2], [2])) is None
    scheduler._mrv2_spec_draining = False
    # Nothing is kept back when there is nothing more to do, nor by a step that has no
    # counts of its own.
    outputs = update_without_counts(scheduler, finished=("a",))
    rest = DraftCounts.from_list(stats_of(outputs).mrv2_spec).totals().proposed
    assert sum(sent) + rest == 62


def test_a_step_that_vllm_counts_itself_is_added() -> None:
    scheduler = FakeScheduler({"a": Request()})
    update(scheduler, ["a"], [0], [0], [1], new=("a",))
    scheduler.is_busy = True
    setattr(scheduler, metrics._LAST_SENT, time.monotonic())
    assert stats_of(update(scheduler, ["a"], [3], [2], [2])) is None
    scheduler.is_busy = False
    outputs = update_without_counts(scheduler, places={"a": 4}, sampled=[3])
    assert vllms_numbers(stats_of(outputs)) == [2, 6, 3, 2, 2, 1, 1, 2, 1, 0, 0]


def test_a_round_without_scheduled_places_is_sent_all_the_same() -> None:
    scheduler = FakeScheduler({"a": Request()})
    update(scheduler, ["a"], [0], [0], [1], new=("a",))
    stats = stats_of(update(scheduler, ["a"], [3], [0], [1], scheduled=0))
    assert stats.num_drafts == 0
    counts = DraftCounts.from_list(stats.mrv2_spec)
    assert counts.totals() == Totals(
        proposed=3, never_issued=3, rounds=1, rounds_with_draft=1
    )


def test_output_of_requests_that_are_gone_counts_as_never_issued() -> None:
    requests = {
        "done": Request(status=RequestStatus.FINISHED_STOPPED),
        "stale": Request(drop_stale_output=True, num_stale_output_tokens=3),
        "once stale": Request(drop_stale_output=True),
    }
    scheduler = FakeScheduler(requests)
    names_ = ["done", "stale", "once stale", "aborted"]
    update(scheduler, names_, [0] * 4, [0] * 4, [1] * 4, new=tuple(names_))
    update(scheduler, names_, [2] * 4, [2] * 4, [3] * 4)
    ledger = metrics.ledger_of(scheduler)
    assert ledger is not None
    assert ledger.total.totals() == Totals(
        proposed=8, verified=2, accepted=2, never_issued=6, rounds=1,
        rounds_with_draft=1,
    )  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
def test_output_of_a_request_whose_context_was_not_loaded(fails: bool) -> None:
    # It is computed anew, or fails with an output of its own that has no tokens.
    names_ = ["a", "not loaded", "b"]
    scheduler = FakeScheduler({name: Request() for name in names_})
    update(scheduler, names_, [0] * 3, [0] * 3, [1] * 3, new=tuple(names_))
    scheduler.not_loaded = {"not loaded"}
    scheduler.fails_not_loaded = fails
    outputs = update(scheduler, names_, [2, 3, 1], [2] * 3, [3, 4, 1])
    ledger = metrics.ledger_of(scheduler)
    assert ledger is not None
    assert ledger.total.totals() == Totals(
        proposed=6, verified=3, accepted=2, never_issued=3, fillers=1, rounds=2,
        rounds_with_draft=2,
    )  # fmt: skip
    assert stats_of(outputs).num_drafts == 2
    lost = ledger.of_request("not loaded")
    assert lost is not None
    assert lost.totals() == Totals(proposed=3, never_issued=3)


def test_what_a_request_did_is_on_its_output() -> None:
    scheduler = FakeScheduler({"a": Request()})
    update(scheduler, ["a"], [0], [0], [1], new=("a",))
    (output,) = update(scheduler, ["a"], [3], [2], [2])[0].outputs
    payload = output.spec_decode_metrics.to_dict()
    assert payload["num_draft_tokens"] == 2
    assert payload["mrv2_spec"]["proposed"] == 3
    assert payload["mrv2_spec"]["never_issued"] == 1
    assert payload["mrv2_spec"]["accepted_lengths"] == [0, 1, 0, 0, 0]


def test_it_all_survives_the_way_to_another_process() -> None:
    scheduler = FakeScheduler({"a": Request()})
    update(scheduler, ["a"], [0], [0], [1], new=("a",))
    outputs = update(scheduler, ["a"], [3], [2], [2])[0]
    wire = msgspec.msgpack.encode(outputs)
    there = msgspec.msgpack.decode(wire, type=EngineCoreOutputs)
    sent = DraftCounts.from_list(there.scheduler_stats.spec_decoding_stats.mrv2_spec)
    assert sent.totals().proposed == 3
    assert there.outputs[0].spec_decode_metrics.mrv2_spec == sent.to_list()


def test_a_step_of_somebody_elses_runner_is_left_alone() -> None:
    scheduler = FakeScheduler({"a": Request()})
    scheduler_output = SimpleNamespace(
        scheduled_spec_decode_tokens={"a": [1, 2]}, num_invalid_spec_tokens=None
    )
    output = SimpleNamespace(req_ids=["a"], sampled_token_ids=[[1]])
    patched = metrics._wrap_update(FakeScheduler.update_from_output)
    stats = stats_of(patched(scheduler, scheduler_output, output))
    assert stats.num_draft_tokens == 2
    assert metrics.ledger_of(scheduler) is None


def update_without_counts(
    scheduler: FakeScheduler,
    *,
    new: tuple[str, ...] = (),
    finished: tuple[str, ...] = (),
    preempted: tuple[str, ...] = (),
    places: dict[str, int] | None = None,
    sampled: Sequence[int] = (),
) -> dict[int, Any]:
    """Run the hook around a step whose counts did not come."""
    places = places or {}
    scheduler_output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=r) for r in new],
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted) or None,
        scheduled_spec_decode_tokens={r: [-1] * n for r, n in places.items()},
        num_invalid_spec_tokens=None,
    )
    output = SimpleNamespace(
        req_ids=list(places), sampled_token_ids=[[7] * n for n in sampled]
    )
    patched = metrics._wrap_update(FakeScheduler.update_from_output)
    found: dict[int, Any] = patched(scheduler, scheduler_output, output)
    return found


def test_an_aborted_request_leaves_its_name_though_no_counts_come() -> None:
    # Preempted, its slot and pending drafts are known to be gone; the runner has
    # nothing to tell when it ends.
    scheduler = FakeScheduler({"a": Request()})
    update(scheduler, ["a"], [0], [0], [1], new=("a",))
    update(scheduler, ["a"], [4], [4], [3])
    update(scheduler, [], [], [], [], ended=(Ended("a", 3, 0),))
    update_without_counts(scheduler, finished=("a",))
    update(scheduler, ["a"], [0], [0], [1], new=("a",))
    ledger = metrics.ledger_of(scheduler)
    assert ledger is not None
    (_, first), (_, namesake) = ledger.requests()
    assert first == ledger.total
    assert first.totals().proposed == 7
    assert namesake == DraftCounts(K)


def test_requests_come_and_go_in_a_step_without_counts() -> None:
    names_ = ("ends", "stays", "preempted", "comes")
    scheduler = FakeScheduler({name: Request() for name in names_})
    update(scheduler, list(names_[:3]), [0] * 3, [0] * 3, [1] * 3, new=names_[:3])
    update(scheduler, list(names_[:3]), [4] * 3, [4] * 3, [3] * 3)
    update_without_counts(
        scheduler, new=("comes",), finished=("ends",), preempted=("preempted",)
    )
    # The new one has the slot of the one that ended.
    update(scheduler, ["comes", "stays"], [1, 2], [1, 2], [2, 1])
    ledger = metrics.ledger_of(scheduler)
    assert ledger is not None
    found = {name: counts.totals().proposed for name, counts in ledger.requests()}
    assert found == {"ends": 4, "preempted": 4, "stays": 6, "comes": 1}
    assert sum(found.values()) == ledger.total.totals().proposed


def hand_over(scheduler: FakeScheduler, drafts: dict[str, list[int]]) -> None:
    """Hand drafts to a scheduler whose grammars let the first one of each pass."""

    def cut(self: Any, draft_token_ids: Any) -> None:
        for req_id, tokens in drafts.items():
            scheduler.requests[req_id].spec_token_ids = tokens[:1]

    offer = SimpleNamespace(
        req_ids=list(drafts), draft_token_ids=[list(row) for row in drafts.values()]
    )
    metrics._wrap_drafts(cut)(scheduler, offer)


def test_a_cut_goes_with_its_request() -> None:
    requests = {name: Request(use_structured_output=True) for name in ("gone", "here")}
    scheduler = FakeScheduler(requests)
    update(scheduler, list(requests), [0] * 2, [0] * 2, [1] * 2, new=tuple(requests))
    hand_over(scheduler, {name: [5, 6, 7] for name in requests})
    cuts = getattr(scheduler, metrics._CUTS)
    assert cuts == {"gone": 1, "here": 1}
    del requests["gone"]
    scheduler.requests["other"] = Request()
    update(scheduler, ["other"], [0], [0], [1], new=("other",))
    assert cuts == {"here": 1}
    update(scheduler, ["here"], [3], [1], [2], scheduled=1)
    assert cuts == {}
    ledger = metrics.ledger_of(scheduler)
    assert ledger is not None
    assert ledger.total.totals().invalid == 2


def test_a_grammar_that_cuts_before_scheduling() -> None:
    requests = {
        "json": Request(use_structured_output=True),
        "free": Request(),
        "chunk": Request(use_structured_output=True, is_prefill_chunk=True),
    }
    scheduler = FakeScheduler(requests)
    update(scheduler, list(requests), [0] * 3, [0] * 3, [1] * 3, new=tuple(requests))

    # The last place of a row may be padding, which no grammar cut.
    drafts = {"json": [5, 6, 7, -1], "free": [5, 6, 7, 8], "chunk": [5, 6, 7, 8]}
    hand_over(scheduler, drafts)
    update(scheduler, ["free"], [1], [1], [1], scheduled=1)
    update(scheduler, ["json"], [3], [1], [2], scheduled=1)
    update(scheduler, ["json"], [3], [3], [2], scheduled=3)
    ledger = metrics.ledger_of(scheduler)
    assert ledger is not None
    json = ledger.of_request("json")
    assert json is not None
    assert json.totals().invalid == 2
    assert ledger.total.totals().invalid == 2


# ---- where users look


def logged(log: SpecDecodingLogging) -> list[str]:
    found: list[str] = []
    log.log(log_fn=lambda text, *args: found.append(text % args))
    return found


def stats_with(counts: DraftCounts, num_drafts: int = 0) -> SpecDecodingStats:
    stats = SpecDecodingStats.new(K)
    for _ in range(num_drafts):
        stats.observe_draft(2, 1)
    stats.mrv2_spec = counts.to_list()
    return stats


def one_round() -> DraftCounts:
    counts = DraftCounts(K)
    for kind, length in enumerate((3, 3, 2, 1)):
        counts.lengths[kind, 0, length] += 1
    return counts


def test_the_log_line_sums_up_the_interval() -> None:
    log = SpecDecodingLogging()
    log.observe(stats_with(one_round(), num_drafts=1))
    log.observe(stats_with(one_round(), num_drafts=1))
    theirs, ours = logged(log)
    assert theirs.startswith("SpecDecoding metrics: ")
    assert ours.startswith("mrv2-spec: 2 decode rounds, 100.0% with a draft")
    assert "drafts: 6 proposed" in ours
    assert logged(log) == []


def test_no_line_of_vllm_where_it_has_nothing_to_divide_by() -> None:
    log = SpecDecodingLogging()
    log.observe(stats_with(one_round()))
    (ours,) = logged(log)
    assert ours.startswith("mrv2-spec: 1 decode rounds")


def test_vllms_own_line_without_us() -> None:
    log = SpecDecodingLogging()
    stats = SpecDecodingStats.new(K)
    stats.observe_draft(2, 1)
    log.observe(stats)
    (theirs,) = logged(log)
    assert theirs.startswith("SpecDecoding metrics: ")


def test_the_end_says_it_all_once(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics._logs.clear()
    log = SpecDecodingLogging()
    for _ in range(3):
        log.observe(stats_with(one_round()))
        logged(log)
    ended = []
    shutdown = metrics._wrap_shutdown(lambda self, timeout: ended.append(timeout))
    lines: list[str] = []
    monkeypatch.setattr(
        metrics.logger, "info", lambda text, *args: lines.append(text % args)
    )
    shutdown(None, timeout=3)
    shutdown(None)
    (line,) = lines
    assert line.startswith("mrv2-spec, all in all: 3 decode rounds")
    assert ended == [3, None]


def test_the_end_tells_engines_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics._logs.clear()
    config = VllmConfig()
    loggers = [
        LoggingStatLogger(config),
        LoggingStatLogger(config, 1),
        AggregatedLoggingStatLogger(config, [2, 3]),
    ]
    for one in loggers:
        one.spec_decoding_logging.observe(stats_with(one_round()))
    lines: list[str] = []
    monkeypatch.setattr(
        metrics.logger, "info", lambda text, *args: lines.append(text % args)
    )
    metrics._wrap_shutdown(lambda self, timeout: None)(None)
    assert sorted(line.partition("mrv2-spec")[0] for line in lines) == [
        "2 Engines Aggregated: ",
        "Engine 000: ",
        "Engine 001: ",
    ]


def prometheus(served: bool) -> SpecDecodingProm:
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    unregister_vllm_metrics()
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(method="ngram", num_speculative_tokens=K)
    )
    if served:
        mark_served(config)
    return SpecDecodingProm(
        config.speculative_config,
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )


def scraped(name: str, engine: str) -> list[float]:
    text = prometheus_client.generate_latest().decode()
    return [
        s.value
        for s in parse(text)
        if s.name == name and s.labels.get("engine") == engine
    ]


def test_prometheus_shows_ours_beside_vllms() -> None:
    prom = prometheus(served=True)
    prom.observe(stats_with(one_round(), num_drafts=1), 1)
    assert scraped(names.ROUNDS.sample_name, "0") == [0.0]
    assert scraped(names.ROUNDS.sample_name, "1") == [1.0]
    assert sum(scraped(names.PROPOSED.sample_name, "1")) == 3
    assert scraped("vllm:spec_decode_num_draft_tokens_total", "1") == [2.0]


def test_prometheus_of_other_drafters_shows_none_of_ours() -> None:
    prom = prometheus(served=False)
    prom.observe(stats_with(one_round(), num_drafts=1))
    assert scraped(names.ROUNDS.sample_name, "0") == []
    assert scraped("vllm:spec_decode_num_draft_tokens_total", "0") == [2.0]
