"""The engine grid: its arithmetic, its texts, its planning, and a real tiny run."""

import gzip
import json
import os
import random
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"


def grid(name: str) -> ModuleType:
    """Return one of the grid's modules."""
    return import_module(f"grid.{name}")


# --- figures ---------------------------------------------------------------------


def test_round_figures_are_those_of_a_round_worked_out_by_hand() -> None:
    measure = grid("measure")
    one = measure.Round(
        released=9.0,
        prompt_tokens=30,
        steps=[(10.0, {0: 1, 1: 1}), (11.0, {0: 3, 1: 1}), (14.0, {0: 1, 1: 3})],
    )
    figures = measure.round_figures(one)
    # Each request: 5 tokens, 4 of them within 4 seconds.
    assert figures.tpot_ms == [1000.0, 1000.0]
    assert figures.tokens == 10
    assert figures.seconds == 5.0
    assert (figures.prompt_tokens, figures.prefill_seconds) == (30, 1.0)
    assert figures.together
    assert (figures.decode_tokens, figures.decode_rounds) == (8, 4)


def test_a_prefill_between_is_noticed() -> None:
    measure = grid("measure")
    steps = [(1.0, {0: 1}), (2.0, {0: 1, 1: 1}), (3.0, {0: 1, 1: 1})]
    figures = measure.round_figures(measure.Round(0.0, 8, steps))
    assert not figures.together
    assert figures.prefill_seconds == 2.0


def run_of(measure: ModuleType, tpot: float, cold: bool, together: bool = True) -> Any:
    figures = measure.RoundFigures(
        tpot_ms=[tpot, tpot],
        tokens=20,
        seconds=2.0,
        prompt_tokens=60,
        prefill_seconds=0.5,
        together=together,
        decode_tokens=18,
        decode_rounds=9,
    )
    counters = {
        "verified": 5, "accepted": 4, "fillers": 1, "proposed": 7,
        "rounds": 9, "rounds_with_draft": 3,
    }  # fmt: skip
    return measure.Run(cold, [figures], counters)


def test_point_figures_leave_out_runs_with_prefills_between() -> None:
    measure = grid("measure")
    runs = [
        run_of(measure, 50.0, cold=True, together=False),
        run_of(measure, 9.0, cold=False),
        run_of(measure, 11.0, cold=False),
    ]
    figures = measure.point_figures(runs)
    assert figures["tpot_ms"] == 10.0
    assert figures["tpot_runs_ms"] == [9.0, 11.0]
    assert figures["tpot_spread"] == pytest.approx(0.2)
    assert figures["repeats"] == 2
    # Throughput with prefill, and of the prefills, is the first run's.
    assert figures["tok_s"] == 10.0
    assert figures["prefill_tok_s"] * figures["prefill_s"] == pytest.approx(60.0)
    assert figures["prefill_tok_s"] == 120.0
    assert figures["tokens_per_step"] == 2.0
    assert figures["coverage"] == pytest.approx(1 / 3)
    assert (figures["drafted"], figures["accepted"]) == (10, 8)
    with pytest.raises(ValueError, match="in no run"):
        measure.point_figures(runs[:1])


def test_a_run_survives_its_way_through_json() -> None:
    measure = grid("measure")
    run = run_of(measure, 9.0, cold=True)
    assert measure.decode_run(json.loads(json.dumps(measure.encode_run(run)))) == run


def test_stage_tpot_counts_full_steps_after_the_first_200() -> None:
    measure = grid("measure")
    slow = [(float(i), {0: 1, 1: 1}) for i in range(200)]
    # Two tokens a request, half a second a step.
    fast = [(200 + i / 2, {0: 2, 1: 2}) for i in range(1, 11)]
    alone = [(300.0, {0: 1})]
    stage = [measure.Round(0.0, 2, [*slow, *fast, *alone])]
    # The first fast step follows the last slow one by 1.5 s.
    assert measure.stage_tpot_ms(stage, 2) == pytest.approx((1.5 + 9 * 0.5) / 20 * 1000)
    assert measure.stage_tpot_ms([measure.Round(0.0, 2, slow)], 2) is None


def test_kinds_of_steps_are_shares_of_those_that_the_trimmer_saw() -> None:
    measure = grid("measure")
    runs = [run_of(measure, 9.0, cold=True), run_of(measure, 9.0, cold=False)]
    assert measure.point_figures(runs)["asleep"] is None
    for run in runs:
        run.counters.update(
            steps_with=2, steps_without=1, steps_asleep=5, budget=14, expected=9000,
            clock_drafts=2200, clock_host=1500, steps_timed=0, reckoned_us=0, took_us=0,
        )  # fmt: skip
    figures = measure.point_figures(runs)
    assert (figures["asleep"], figures["awake_without"]) == (5 / 8, 1 / 8)
    assert (figures["mean_budget"], figures["expected_accepted"]) == (7.0, 4.5)
    assert (figures["clock_drafts"], figures["clock_host"]) == (1.1, 0.75)
    assert figures["reckoned_ms"] is figures["took_ms"] is None
    runs[0].counters.update(steps_timed=2, reckoned_us=9000, took_us=11000)
    runs[1].counters.update(steps_timed=2, reckoned_us=8000, took_us=12000)
    figures = measure.point_figures(runs)
    assert (figures["reckoned_ms"], figures["took_ms"]) == (4.25, 5.75)


class Trimmer:
    """Chooses what it is told."""

    def __init__(self) -> None:
        self.policy = SimpleNamespace(
            asleep=False,
            expected_accepted=1.5,
            cost_ratios=SimpleNamespace(drafts=1.25, host=0.5),
        )
        self.num_requests, self.expected_ms = 2, 3.0
        self.budget = 0

    def choose(self, scheduler_output: Any) -> int:
        return self.budget


def test_steps_are_told_apart_and_timed_where_their_kind_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps_seen = grid("steps_seen")
    clock = [0.0]
    monkeypatch.setattr(steps_seen.time, "perf_counter", lambda: clock[0])
    trimmer = Trimmer()
    seen = steps_seen.StepsSeen(trimmer)

    def run(budget: int, places: bool = True, ms: float = 4.0) -> None:
        trimmer.budget = budget
        drafts = {"a": [-1]} if places else {}
        step = SimpleNamespace(scheduled_spec_decode_tokens=drafts)
        assert trimmer.choose(step) == budget
        clock[0] += ms / 1000

    for _ in range(5):
        run(5)  # the fourth took 4 ms, with as many steps before and one behind
    run(0)  # so nobody knows what the fifth took
    trimmer.policy.asleep = True
    run(0, places=False)
    trimmer.policy.asleep = False
    for ms in (9.0, 9.0, 9.0, 5.0, 7.0):
        run(6, ms=ms)  # the fourth took 5 ms
    trimmer.num_requests = 3
    run(6)  # with other requests it begins anew
    trimmer.expected_ms = 0.0
    run(6)  # beside a prompt
    run(0)
    trimmer.expected_ms = 3.0
    for _ in range(4):
        run(7)
    # The next round's requests come later, and need no step of their prompts.
    clock[0] += 60.0
    seen.begin_round()
    for _ in range(5):
        run(7, ms=6.0)
    want = {
        "steps_with": 21, "steps_without": 2, "steps_asleep": 1,
        "budget": 5 * 5 + 7 * 6 + 9 * 7, "expected": 21 * 1500,
        "clock_drafts": 21 * 1250, "clock_host": 21 * 500,
        "steps_timed": 3, "reckoned_us": 9000, "took_us": 4000 + 5000 + 6000,
    }  # fmt: skip
    assert seen.counts == want


# --- texts -----------------------------------------------------------------------


def write_texts(folder: Path, rng: random.Random) -> None:
    """Write recorded files of random texts."""
    data = folder / "data"
    data.mkdir(parents=True)
    for name in (
        "code_edit", "agentic", "smollm2_spec_bench", "reference_spec_bench"
    ):  # fmt: skip
        with gzip.open(data / f"{name}.jsonl.gz", "wt") as out:
            for i in range(60):
                line = {
                    "category": f"category {i % 2}",
                    "prompt_token_ids": rng.choices(range(3, 2000), k=20),
                    "output_token_ids": rng.choices(range(3, 2000), k=250),
                }
                out.write(json.dumps(line) + "\n")


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> Path:
    """Recorded files made here."""
    write_texts(tmp_path, rng)
    monkeypatch.setenv("MRV2_SPEC_SHARED", str(tmp_path))
    return tmp_path


def test_every_workload_has_one_length_and_no_text_twice(texts: Path) -> None:
    workloads = grid("workloads")
    for name in workloads.NAMES:
        plan = workloads.make_plan(name, 100, 131072)
        for stage in plan.stages:
            items = [item for one in stage for item in one]
            assert len({len(item.output) for item in items}) == 1, name
            assert all(len(one) == 100 for one in stage), name
        outputs = [tuple(item.output) for one in plan.rounds for item in one]
        outputs += [tuple(item.output) for one in plan.warm for item in one]
        assert len(set(outputs)) == len(outputs), name
        again = workloads.make_plan(name, 100, 131072)
        assert again == plan, name


def test_a_copy_repeats_itself_as_its_original_does(texts: Path) -> None:
    workloads = grid("workloads")
    item = workloads.Item([5, 6, 5], [6, 5, 6, 7])
    (copy,) = workloads.renamed([item], 1, 131072)
    a, b, again = copy.prompt
    assert a == again != b
    assert copy.output[:3] == [b, a, b]
    assert {a, b, copy.output[3]} != {5, 6, 7}
    assert workloads.renamed([item], 0, 131072) == [item]


def test_lessons_are_apart_from_what_is_measured(texts: Path) -> None:
    workloads = grid("workloads")
    warm = workloads.make_plan("agentic", 30, 131072)
    cold = workloads.make_plan("agentic-cold", 30, 131072)
    assert warm.stages == cold.stages
    assert cold.warm == []
    # 24 of the 60 texts are measured, so 30 requests are two copies.
    assert [len(lesson) for lesson in warm.warm] == [36, 36]


def test_mid_replaces_about_one_token_in_24(texts: Path) -> None:
    workloads = grid("workloads")
    items = workloads.mid(160)
    changed = sum(
        a != b for item in items for a, b in zip(item.prompt, item.output, strict=True)
    )
    assert 0.7 < changed / (len(items) * 160) * 24 < 1.3


def test_loops_are_those_of_the_recorded_replies() -> None:
    workloads = grid("workloads")
    loop = [*range(100, 200), *[7, 8, 9] * 32]
    assert workloads.ends_in_loop(loop)
    assert not workloads.ends_in_loop([*loop, 5])
    assert not workloads.ends_in_loop([7] * 95)
    try:
        replies = workloads.load("smollm2_spec_bench")
    except workloads.DataMissing as error:
        pytest.skip(str(error))
    loops = sum(workloads.ends_in_loop(line["output_token_ids"]) for line in replies)
    assert loops == 57


def cut(path: Path) -> Path:
    """Cut a file in half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


@pytest.mark.parametrize("content", [None, b"not gzip", gzip.compress(b"{")])
def test_a_damaged_file_is_named_as_a_missing_one_is(
    texts: Path, content: bytes | None
) -> None:
    workloads = grid("workloads")
    path = texts / "data" / "agentic.jsonl.gz"
    if content is None:
        cut(path)
    else:
        path.write_bytes(content)
    with pytest.raises(workloads.DataMissing, match=r"agentic\.jsonl\.gz is cut") as e:
        workloads.load("agentic")
    assert len(str(e.value).splitlines()) == 1
    for lines in (b"", b"5\n", b'{"category": "x"}\n'):
        path.write_bytes(gzip.compress(lines))
        with pytest.raises(workloads.DataMissing, match="holds no recorded texts"):
            workloads.load("agentic")


def test_workloads_without_their_texts_are_left_out_and_named(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from engine_grid import _with_data

    cut(texts / "data" / "agentic.jsonl.gz")
    (texts / "data" / "smollm2_spec_bench.jsonl.gz").unlink()
    plan = grid("plan")
    points = [plan.Point(name, 1) for name in ("low", "low-smollm2", "agentic")]
    assert _with_data(points, 0) == points[:1]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("left out low-smollm2: no ")
    assert second.startswith("left out agentic: ")
    assert "agentic.jsonl.gz is cut short" in second


def test_workloads_whose_texts_are_too_short_are_left_out_and_named(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from engine_grid import _with_data

    workloads, plan = grid("workloads"), grid("plan")
    points = [plan.Point(name, 4) for name in workloads.NAMES]
    assert _with_data(points, 0) == points
    assert _with_data(points, 100_000) == []
    told = capsys.readouterr().out.splitlines()
    assert told == [
        f"left out {name}: too few texts have 100000 output tokens"
        for name in workloads.NAMES
    ]


# --- arms, points, record --------------------------------------------------------


def test_arms_are_parsed_or_refused_by_name() -> None:
    arms = grid("arms")
    parsed = arms.parse_arms("ngram:16, v2-none,v1-suffix:5")
    assert [arm.label for arm in parsed] == ["ngram:16", "v2-none", "v1-suffix:5"]
    untouched = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_PLUGINS": ""}
    assert parsed[2].environment() == untouched
    assert "VLLM_PLUGINS" not in parsed[0].environment()
    explained = parsed[0].engine_args(trim_explain=True)["additional_config"]
    assert explained == {"mrv2_spec": {"trim": True, "trim_explain": True}}
    assert "additional_config" not in parsed[1].engine_args(trim_explain=True)
    for wrong in ("ngram", "v2-none:5", "ngram:0", "nonsense:5", "", "ngram:5,ngram:5"):
        with pytest.raises(ValueError, match="arm"):
            arms.parse_arms(wrong)


def test_an_arm_may_be_limited_to_small_points() -> None:
    arms = grid("arms")
    limited, plain, free = arms.parse_arms("v2-intree-ngram:16@16,v2-none@64,ngram:5")
    # The record and vLLM are told the same as without a limit.
    assert limited == arms.Arm("v2-intree-ngram", 16)
    assert limited.label == "v2-intree-ngram:16"
    assert [limited.takes(c) for c in (1, 16, 17)] == [True, True, False]
    assert [plain.takes(c) for c in (64, 65)] == [True, False]
    assert free.takes(10**6)
    for wrong in ("ngram:5@", "ngram:5@0", "ngram:5@-1", "ngram:5@x", "v2-none@1@2"):
        with pytest.raises(ValueError, match="after @ comes a number"):
            arms.parse_arms(wrong)
    for wrong in ("ngram@16:5", "v2-none:3@4", "ngram@5", "ngram:5@4,ngram:5@8"):
        with pytest.raises(ValueError, match=r"must be|each arm once|after @"):
            arms.parse_arms(wrong)


def test_a_limited_arm_gets_a_cache_for_its_requests() -> None:
    shapes = grid("shapes")
    # 2048 tokens each, of 32 layers with keys and values of 8 heads of 128 halves.
    assert shapes.LLAMA_8B.kv_gib(16, 20.6) == 4.0
    assert shapes.LLAMA_8B.kv_gib(256, 20.6) == 20.6
    assert shapes.LLAMA_8B.kv_gib(None, 20.6) == 20.6


def test_points_counts_what_a_limited_arm_takes() -> None:
    done = subprocess.run(
        [
            sys.executable, str(BENCH / "engine_grid.py"), "points",
            "--arms", "v2-intree-ngram:16@16,ngram:5",
            "--points", "low:1,low:16,low:64",
        ],
        capture_output=True,
        text=True,
        check=True,
    )  # fmt: skip
    counted = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()}
    assert counted == {"v2-intree-ngram:16": "2", "ngram:5": "3"}


def test_a_truncated_record_is_refused(tmp_path: Path) -> None:
    record = grid("record")
    path = tmp_path / "new" / record.NAME
    lines = [
        {
            "run_id": "r",
            "arm": "ngram",
            "k": 5,
            "c": c,
            "workload": "low",
            "commit": "x",
        }
        for c in (1, 4)
    ]
    for line in lines:
        record.append(path, line)
    assert list(record.read(path)) == lines
    assert len({record.key(line) for line in lines}) == 2
    path.write_text(path.read_text()[:-10])
    with pytest.raises(ValueError, match=":2 is no JSON object"):
        list(record.read(path))


def test_a_line_is_not_glued_to_one_without_its_end(tmp_path: Path) -> None:
    record = grid("record")
    path = tmp_path / record.NAME
    path.write_text('{"c": 1}')
    record.append(path, {"c": 4})
    assert path.read_text() == '{"c": 1}\n{"c": 4}\n'
    # A truncated one stays alone, and is refused.
    path.write_text('{"c": 1}\n{"c"')
    record.append(path, {"c": 4})
    assert path.read_text() == '{"c": 1}\n{"c"\n{"c": 4}\n'
    with pytest.raises(ValueError, match=":2 is no JSON object"):
        list(record.read(path))


class StubChild:
    """Answers like an engine would, without one; what it says is set by the test.

    Each answer takes 10 seconds of the clock.
    """

    made: list["StubChild"]
    asked: list[tuple[str, str, int, int | None]]
    clock: float
    # (workload, c), or (arm, workload, c, turn)
    mismatch_at: Any
    dies_at: Any

    @classmethod
    def reset(cls) -> None:
        cls.made, cls.asked, cls.clock = [], [], time.monotonic()
        cls.mismatch_at = cls.dies_at = None

    def __init__(self, arm: Any, *args: Any, **kwargs: Any) -> None:
        self.arm = arm
        self.described: dict[str, Any] = {}
        self.points: list[tuple[str, int]] = []
        self.stopped = False
        StubChild.made.append(self)

    def wait_until_ready(self, seconds: float) -> float:
        return 0.0

    def measure_costs(self, seconds: float) -> dict[str, Any] | None:
        assert not self.points, "costs are measured before the first point"
        if not self.arm.kind.trimmed:
            return None
        curves = {name: [[1, 4.5], [8, 5.0]] for name in ("plain", "drafting", "bare")}
        words = "steps cost this and that"
        return {"words": words, "curves": curves, "max_graph_tokens": 8}

    def measure(
        self,
        workload: str,
        c: int,
        length: int,
        seconds: float,
        turn: int | None = None,
    ) -> Any:
        self.points.append((workload, c))
        asked = (self.arm.label, workload, c, turn)
        StubChild.asked.append(asked)
        StubChild.clock += 10.0
        if asked == StubChild.dies_at:
            raise grid("child").EngineFailed("its process died")
        if StubChild.mismatch_at in (asked, (workload, c)):
            return {"mismatch": "request 0 said something else"}
        measure = grid("measure")
        runs = [run_of(measure, 9.0, True), run_of(measure, 10.0, False)]
        if turn is not None:
            runs = [run_of(measure, 9.0 + turn, cold=not turn)]
        encoded = [measure.encode_run(run) for run in runs]
        return {"runs": encoded, "stage_tpot_ms": None, "seconds": 0.1}

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def orchestrate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that runs arms and points with stubs for engines."""
    module, arms, plan = grid("orchestrate"), grid("arms"), grid("plan")
    shapes = grid("shapes")
    monkeypatch.setattr(module, "Child", StubChild)
    StubChild.reset()
    clock = SimpleNamespace(
        monotonic=lambda: StubChild.clock, strftime=time.strftime, gmtime=time.gmtime
    )
    monkeypatch.setattr(module, "time", clock)

    def run(
        names: str, workloads: list[str], time_limit: float = 1e6, turns: int = 1
    ) -> Any:
        said: list[str] = []
        settings = module.Settings(
            shape=shapes.LLAMA_8B,
            path=tmp_path / "grid.jsonl",
            logs=tmp_path,
            work=tmp_path,
            kv_gib=1.0,
            at_once=2,
            length=0,
            time_limit=time_limit,
            run_id="r",
            machine={"commit": "x"},
            say=said.append,
            progress=lambda done, total: None,
            turns=turns,
        )
        points = [plan.Point(name, c) for c in (1, 64) for name in workloads]
        outcome = module.Orchestrator(arms.parse_arms(names), points, settings).run()
        lines = list(grid("record").read(settings.path))
        return outcome, lines, said

    return run


def test_a_run_resumes_where_it_stopped(orchestrate: Any) -> None:
    outcome, lines, _ = orchestrate("v2-none,ngram:5", ["low"])
    assert len(lines) == len(outcome.measured) == 4
    assert all(child.stopped for child in StubChild.made)
    outcome, lines, _ = orchestrate("v2-none,ngram:5", ["low", "high"])
    assert (len(outcome.skipped), len(outcome.measured), len(lines)) == (4, 4, 8)
    assert StubChild.made[-1].points == [("high", 1), ("high", 64)]


def test_what_engines_measured_steps_to_cost_is_recorded(
    orchestrate: Any, tmp_path: Path
) -> None:
    _, _, said = orchestrate("v2-none,ngram:5", ["low"])
    assert "  ngram:5: steps cost this and that" in said
    path = tmp_path / "engine_costs.jsonl"
    (one,) = grid("record").read(path)
    assert (one["arm"], one["k"], one["run_id"]) == ("ngram", 5, "r")
    assert one["commit"] == "x"
    assert (one["bare"], one["max_graph_tokens"]) == ([[1, 4.5], [8, 5.0]], 8)
    # The report reads it, once it says where it was measured.
    machine = {"gpu": "G", "driver": "1", "torch": "2", "vllm": "3", "command": "c"}
    path.write_text(json.dumps({**one, **machine}) + "\n")
    (costs,) = import_module("reporting.load").read_costs(path)
    assert (costs.label, costs.plain) == ("ngram:5", ((1.0, 4.5), (8.0, 5.0)))


def test_what_does_not_fit_the_time_is_dropped_and_named(orchestrate: Any) -> None:
    outcome, lines, said = orchestrate("v2-none,v1-none", ["low"], time_limit=127.0)
    # The start takes its estimate of 120 s; of 7 s, one c=1 point takes more.
    assert len(outcome.dropped) + len(outcome.measured) == 4
    assert outcome.dropped
    assert len(lines) == len(outcome.measured)
    assert all(
        any(name.split()[-1] in text for text in said) for name in outcome.dropped
    )
    outcome, lines, _ = orchestrate("ngram:5", ["low"], time_limit=100.0)
    assert outcome.dropped == ["ngram:5 low c=1", "ngram:5 low c=64"]


def test_the_last_points_are_dropped_not_the_first_large_one(orchestrate: Any) -> None:
    # Of 31 s two arms' first points take 10 s each; `low` at 64 requests is expected
    # to take more than `high` at 64, which would fit.
    plan, arm = grid("plan"), grid("arms").Arm("ngram", 5)
    low, high = (plan.guess_seconds(arm, plan.Point(n, 64)) for n in ("low", "high"))
    assert high < low
    share = plan.guess_seconds(arm, plan.Point("low", 1))
    left = 10.0 * (1 + (low + high) / 2 / share)
    outcome, lines, said = orchestrate(
        "ngram:5", ["low", "high"], time_limit=120.0 + 20.0 + left - 10.0
    )
    assert outcome.dropped == ["ngram:5 low c=64", "ngram:5 high c=64"]
    assert [(line["workload"], line["c"]) for line in lines] == [
        ("low", 1), ("high", 1)
    ]  # fmt: skip
    assert said[-1] == "dropped ngram:5 high c=64: no time for one before"


@pytest.mark.parametrize("what", ["mismatch_at", "dies_at"])
def test_points_of_an_engine_that_was_given_up_are_named(
    orchestrate: Any, what: str
) -> None:
    setattr(StubChild, what, ("ngram:5", "high", 1, None))
    outcome, lines, said = orchestrate("v2-none,ngram:5", ["low", "high"])
    assert outcome.dropped == ["ngram:5 low c=64", "ngram:5 high c=64"]
    named = len(outcome.mismatches) + len(outcome.failures) + len(outcome.dropped)
    assert len(lines) + named == 8
    why = "dropped ngram:5 low c=64, high c=64: its engine was given up"
    assert why in said


def test_points_of_an_engine_that_did_not_start_are_named(
    orchestrate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(child: StubChild, seconds: float) -> float:
        raise grid("child").EngineFailed("no memory")

    monkeypatch.setattr(StubChild, "wait_until_ready", fail)
    outcome, lines, _ = orchestrate("ngram:5", ["low"])
    assert lines == []
    assert outcome.failures == ["ngram:5 did not start: no memory"]
    assert outcome.dropped == ["ngram:5 low c=1", "ngram:5 low c=64"]


def test_a_run_that_measured_nothing_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import typer
    from engine_grid import _report

    outcome = grid("orchestrate").Outcome
    settings: Any = SimpleNamespace(path=tmp_path)
    with pytest.raises(typer.Exit) as raised:
        _report(outcome(dropped=["ngram:5 low c=1"]), settings)
    assert raised.value.exit_code == 1
    assert "no point was measured" in capsys.readouterr().out
    _report(outcome(skipped=["ngram:5 low c=1"]), settings)
    _report(outcome(measured=["ngram:5 low c=1"], dropped=["x"]), settings)


def test_points_beyond_an_arms_limit_are_not_taken_of_it(orchestrate: Any) -> None:
    outcome, lines, _ = orchestrate("ngram:5@1,v2-none,ngram:16@0001", ["low", "high"])
    assert outcome.dropped == outcome.skipped == []
    taken = [(line["arm"], line["c"]) for line in lines]
    assert taken.count(("ngram", 1)) == 4
    assert taken.count(("v2-none", 64)) == 2
    assert ("ngram", 64) not in taken
    # A resumed run has nothing left to take; no engine starts for what is beyond.
    engines = len(StubChild.made)
    outcome, _, _ = orchestrate("ngram:5@1", ["low", "high"])
    assert len(outcome.skipped) == 2
    assert len(StubChild.made) == engines


def test_waves_leave_out_points_beyond_an_arms_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waves, plan = grid("waves"), grid("plan")
    monkeypatch.setattr(waves, "Child", StubChild)
    StubChild.reset()
    run = waves.Waves(
        shape=grid("shapes").LLAMA_8B, model=tmp_path, work=tmp_path, module="none",
        in_process=True, kv_gib=1.0, length=0, deadline=float("inf"), more={},
    )  # fmt: skip
    arms = grid("arms").parse_arms("ngram:5@16,v2-none,v2-oracle:5@2")
    points = [plan.Point("low", c) for c in (64, 4)]
    taken = [(arm.label, point.c) for arm, point, _ in run.run(arms, points, 3)]
    assert taken == [("v2-none", 64), ("ngram:5", 4), ("v2-none", 4)]
    # No engine starts of which no point is taken.
    assert [child.arm.label for child in StubChild.made] == ["ngram:5", "v2-none"]


def test_a_mismatch_is_not_recorded_and_ends_its_engine(orchestrate: Any) -> None:
    StubChild.mismatch_at = ("low", 64)
    outcome, lines, said = orchestrate("v2-none,ngram:5", ["low", "high"])
    assert [line["c"] for line in lines] == [1, 1, 1, 1]
    assert len(outcome.mismatches) == 2
    assert sum(text.startswith("MISMATCH") for text in said) == 2


def test_without_a_memory_warm_and_cold_are_one_measurement(orchestrate: Any) -> None:
    _, lines, _ = orchestrate("ngram:5,suffix:5", ["agentic", "agentic-cold"])
    assert len(lines) == 8
    copied = [line["arm"] for line in lines if "measured_as" in line]
    assert copied == ["ngram", "ngram"]
    assert all(line["workload"] == "agentic-cold" for line in lines if
               "measured_as" in line)  # fmt: skip


# --- turns ----------------------------------------------------------------------


def test_arms_take_turns_at_a_point(orchestrate: Any) -> None:
    outcome, lines, _ = orchestrate("v2-none,ngram:5", ["low"], turns=3)
    turns = [(arm, turn) for turn in range(3) for arm in ("v2-none", "ngram:5")]
    asked = [(arm, turn) for arm, _, c, turn in StubChild.asked if c == 1]
    assert asked == turns
    assert [c for _, _, c, _ in StubChild.asked] == [1] * 6 + [64] * 6
    assert len(lines) == len(outcome.measured) == 4
    for line in lines:
        assert (line["turns"], line["repeats"]) == (3, 3)
        assert line["tpot_runs_ms"] == [9.0, 10.0, 11.0]
        assert line["tpot_ms"] == 10.0
        assert line["tok_s"] == 10.0
        hosts = line["host_loop_turns_ms"]
        assert len(hosts) == 3
        assert line["host_loop_ms"] == sorted(hosts)[1]
    # What is there is not taken again.
    outcome, _, _ = orchestrate("v2-none,ngram:5", ["low"], turns=3)
    assert (len(outcome.skipped), len(outcome.measured)) == (4, 0)


def test_without_turns_all_runs_of_an_arm_are_in_a_row(orchestrate: Any) -> None:
    _, lines, _ = orchestrate("v2-none,ngram:5", ["low"])
    assert [turn for _, _, _, turn in StubChild.asked] == [None] * 4
    assert {line["turns"] for line in lines} == {1}
    assert lines[0]["tpot_runs_ms"] == [9.0, 10.0]


def test_turns_for_which_there_is_no_time_are_left_out(orchestrate: Any) -> None:
    # 45 s after the start's 120; a turn takes 10.
    run = orchestrate("v2-none,ngram:5", ["low"], time_limit=165.0, turns=3)
    outcome, lines, said = run
    assert [(line["c"], line["turns"]) for line in lines] == [(1, 2), (1, 2)]
    assert lines[0]["tpot_runs_ms"] == [9.0, 10.0]
    assert sum("low c=1: 2 turns only" in text for text in said) == 2
    assert outcome.dropped == ["v2-none low c=64", "ngram:5 low c=64"]
    assert outcome.failures == []


def test_an_engine_that_dies_leaves_its_turns_to_the_record(orchestrate: Any) -> None:
    StubChild.dies_at = ("v2-none", "low", 1, 1)
    outcome, lines, _ = orchestrate("v2-none,ngram:5", ["low"], turns=3)
    taken = [(line["arm"], line["c"], line["turns"]) for line in lines]
    assert taken == [("v2-none", 1, 1), ("ngram", 1, 3), ("ngram", 64, 3)]
    assert outcome.failures == ["v2-none low c=1: its process died"]


def test_a_mismatch_takes_the_turns_before_with_it(orchestrate: Any) -> None:
    StubChild.mismatch_at = ("ngram:5", "low", 1, 2)
    outcome, lines, _ = orchestrate("v2-none,ngram:5", ["low"], turns=3)
    assert [(line["arm"], line["c"]) for line in lines] == [
        ("v2-none", 1), ("v2-none", 64)
    ]  # fmt: skip
    assert len(outcome.mismatches) == 1
    assert outcome.failures == []


def test_shift_is_taken_once() -> None:
    taken, plan, measure = grid("taken"), grid("plan"), grid("measure")
    shift = taken.Taken(None, plan.Point("shift", 2), 5.0)
    run = measure.encode_run(run_of(measure, 50.0, cold=True, together=False))
    shift.add({"runs": [run], "stage_tpot_ms": [4.0, 2.0, 6.0]}, 3.3, 60.0)
    figures = shift.figures()
    assert (figures["tpot_ms"], figures["tpot_runs_ms"]) == (4.0, [4.0])
    assert figures["stage_tpot_ms"] == [4.0, 2.0, 6.0]
    assert (figures["turns"], figures["host_loop_ms"]) == (1, 3.3)
    shift.stages = [4.0, None, 6.0]
    with pytest.raises(ValueError, match="stage is too short"):
        shift.figures()


def test_turns_are_expected_to_take_a_run_each() -> None:
    plan, arm = grid("plan"), grid("arms").parse_arms("ngram:5")[0]
    point = plan.Point("low", 64)
    seconds = {turns: plan.guess_seconds(arm, point, turns) for turns in (2, 6)}
    assert seconds[6] - seconds[2] == pytest.approx(4 / 2.5 * seconds[2])
    shift = plan.Point("shift", 64)
    assert plan.guess_seconds(arm, shift, 6) == plan.guess_seconds(arm, shift)
    estimator = plan.Estimator(turns=6)
    assert estimator.seconds(arm, point) == seconds[6]
    estimator.note(arm, point, 3 * seconds[6])
    assert estimator.seconds(arm, point) == pytest.approx(3 * seconds[6])


def test_shorter_outputs_are_expected_to_take_less() -> None:
    plan, arm = grid("plan"), grid("arms").Arm("v2-none", 0)
    for name in ("low", "shift"):
        point = plan.Point(name, 1)
        own, same, short = (
            plan.guess_seconds(arm, point, length=length) for length in (0, 128, 16)
        )
        # The prompts take what they did.
        assert own / 4 > short > own / 16
        if name == "low":
            assert own == same
        estimator = plan.Estimator(length=16)
        assert estimator.seconds(arm, point) == short
        estimator.note(arm, point, 2 * short)
        assert estimator.seconds(arm, point) == pytest.approx(2 * short)


def test_rows_are_those_that_the_runner_forwards() -> None:
    plan, arms = grid("plan"), grid("arms")
    point = plan.Point("low", 256)
    guess = {
        name: plan.guess_seconds(arms.Arm(name, 16), point)
        for name in arms.KINDS
        if arms.KINDS[name].method != "none"
    }
    # V1 trims before its forward pass, whatever drafted.
    assert guess["v1-ngram-gpu"] == guess["v1-suffix"] == guess["ngram"]
    assert guess["v2-intree-ngram"] == guess["ngram-untrimmed"] > 2 * guess["ngram"]


class StubEngine:
    """Notes what is asked of it; prompts that it has seen are prefilled in one step."""

    max_num_seqs = 4

    def __init__(self) -> None:
        self.arm = grid("arms").Arm("v2-none", 0)
        self.notes: list[str] = []
        self._cached = False

    def forget(self) -> None:
        self.notes.append("forget")
        self._cached = False

    def forget_replies(self) -> None:
        self.notes.append("forget replies")

    def counters(self) -> dict[str, int]:
        return {}

    def round(self, items: list[str]) -> Any:
        self.notes.append(items[0])
        late = [] if self._cached else [(1.0, {0: 1})]
        self._cached = True
        steps = [*late, (2.0, {0: 1, 1: 1}), (3.0, {0: 1, 1: 1})]
        return grid("measure").Round(0.0, 8, steps)


def test_a_turn_is_one_run_that_can_be_timed() -> None:
    serve, engine = grid("serve"), StubEngine()
    plan = grid("workloads").Plan([["lesson"]], [[["text"]]])
    cold = ["forget", "lesson", "text"]
    again = ["forget replies", "lesson", "text"]

    def runs(turn: int | None) -> list[tuple[bool, bool]]:
        engine.notes.clear()
        answer = serve.measure(engine, plan, 2, False, turn)
        decoded = map(grid("measure").decode_run, answer["runs"])
        return [(run.cold, run.together) for run in decoded]

    assert runs(None) == [(True, True), (False, True), (False, True)]
    assert engine.notes == [*cold, *again, *again]
    plan.warm.clear()
    cold.remove("lesson")
    again.remove("lesson")
    # Without lessons the cold run prefills between, so a second one is timed.
    assert runs(0) == [(True, False), (False, True)]
    assert engine.notes == [*cold, *again]
    assert runs(1) == [(False, True)]
    assert engine.notes == again
    plan.warm.append(["lesson"])
    assert runs(0) == [(True, True)]
    assert runs(7) == [(False, True)]
    assert engine.notes == ["forget replies", "lesson", "text"]


# --- forcing ---------------------------------------------------------------------


def test_each_row_gets_its_recorded_token(
    rng: random.Random, device: torch.device
) -> None:
    pytest.importorskip("vllm")
    force = grid("force")
    vocab_size, num_rows = 50, 200
    outputs = [
        [rng.randrange(vocab_size) for _ in range(rng.randint(1, 9))] for _ in range(6)
    ]
    prompt_lens = [rng.randint(1, 5) for _ in outputs]
    trajectories = force.Trajectories(outputs, prompt_lens, device)
    followers = force.Followers(8, device)
    followed = {slot: rng.randrange(-1, 6) for slot in range(8)}
    for slot, number in followed.items():
        followers.stage(slot, number)
    followers.flush()
    slots = [rng.randrange(8) for _ in range(num_rows)]
    pos = [rng.randrange(16) for _ in range(num_rows)]
    # A view: rows lie further apart than they are wide.
    padded = torch.zeros(num_rows, vocab_size + 7, dtype=torch.bfloat16, device=device)
    force.force(
        padded[:, :vocab_size],
        torch.tensor(slots, device=device),
        torch.tensor(pos, device=device),
        followers.numbers,
        trajectories,
    )
    expected = torch.zeros(num_rows, vocab_size + 7, dtype=torch.bfloat16)
    for row, (slot, p) in enumerate(zip(slots, pos, strict=True)):
        number = followed[slot]
        index = p + 1 - prompt_lens[number]
        if number >= 0 and 0 <= index < len(outputs[number]):
            expected[row, outputs[number][index]] = force.HUGE
    assert torch.equal(padded.cpu(), expected)
    assert expected.any()


def test_points_are_parsed_or_refused() -> None:
    parse, names = grid("plan").parse_points, ("low", "shift")
    points = parse("low:256, shift:64", names, 256)
    assert [(one.workload, one.c) for one in points] == [("low", 256), ("shift", 64)]
    for wrong in ("low", "low:0", "low:257", "nonsense:4", ""):
        with pytest.raises(ValueError, match=r"workload|point"):
            parse(wrong, names, 256)


# --- a real run ------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny run is for a CPU")
@pytest.mark.timeout(900)
def test_a_tiny_run_on_the_cpu(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run(
        [
            sys.executable, str(BENCH / "engine_grid.py"), "run", "--tiny",
            "--arms", "ngram:3,v1-none,v2-intree-ngram:3", "--workloads", "mid",
            "--c", "1,2", "--length", "10", "--at-once", "2", "--turns", "2",
            "--out", str(out), "--work", str(tmp_path / "work"), "--commit", "abc",
        ],
        env={**os.environ, "MRV2_SPEC_SHARED": str(texts)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out v2-intree-ngram:3" in done.stdout
    lines = list(grid("record").read(out / "engine_grid.jsonl"))
    points = {(line["arm"], line["c"]): line for line in lines}
    assert set(points) == {("ngram", 1), ("ngram", 2), ("v1-none", 1), ("v1-none", 2)}
    for (arm, c), line in points.items():
        assert line["workload"] == "mid"
        assert line["turns"] == line["repeats"] == len(line["tpot_runs_ms"]) == 2
        assert line["output_tokens"] == 10 * c * grid("workloads").num_rounds(c)
        assert line["tpot_ms"] > 0
        assert line["commit"] == "abc"
        assert line["host_loop_ms"] > 0
        if arm == "ngram":
            assert line["trimmed"]
            assert line["tokens_per_step"] > 1.2
            assert 0 < line["accepted"] <= line["drafted"]
            assert line["asleep"] + line["awake_without"] < 1.0
            assert 0 < line["mean_budget"] <= 3 * c
            assert 0 < line["expected_accepted"] <= line["mean_budget"]
        else:
            assert line["tokens_per_step"] == 1.0
            assert line["drafted"] is None
            assert line["asleep"] is None
