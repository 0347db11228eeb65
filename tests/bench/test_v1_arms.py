"""The arms on V1: what they verify, what is in force in them, and what is timed."""

import importlib
import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


def grid(name: str) -> ModuleType:
    """Return one of the grid's modules."""
    return importlib.import_module(f"grid.{name}")


# --- what is verified ------------------------------------------------------------


def batch(computed: list[int], prompts: list[int]) -> Any:
    """Return what V1 knows of a batch; rows beyond it hold what was there before."""
    return SimpleNamespace(
        num_reqs=len(computed),
        num_computed_tokens_cpu=np.array([*computed, 99], dtype=np.int32),
        num_prompt_tokens=np.array([*prompts, 1], dtype=np.int32),
    )


def test_v1_counts_what_a_step_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    force_v1 = grid("force_v1")
    monkeypatch.setattr(force_v1, "VERIFIED", force_v1.Verified())

    def count(one: Any, drafts: list[int] | None) -> tuple[int, int, int]:
        metadata = SimpleNamespace(num_draft_tokens=drafts) if drafts else None
        force_v1._count(one, metadata)
        found = force_v1.VERIFIED
        return found.verified, found.rounds, found.rounds_with_draft

    # Prompts, one of them in its second part: nothing is decoded.
    assert count(batch([0, 4], [8, 8]), None) == (0, 0, 0)
    # The second one's prompt is all there.
    assert count(batch([4, 8], [8, 8]), None) == (0, 1, 0)
    assert count(batch([9, 8, 12], [8, 8, 8]), [3, 0, 5]) == (8, 4, 2)


def test_the_wrapped_sample_counts_and_still_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("vllm")
    force_v1 = grid("force_v1")
    runner_module = importlib.import_module("vllm.v1.worker.gpu_model_runner")
    runner_class = runner_module.GPUModelRunner
    monkeypatch.setattr(force_v1, "VERIFIED", force_v1.Verified())
    monkeypatch.setattr(runner_class, "_sample", lambda self, logits, _: logits)
    force_v1.install()
    runner = SimpleNamespace(speculative_config=None, input_batch=batch([9], [8]))
    metadata = SimpleNamespace(num_draft_tokens=[2])
    # No text is forced, and none was loaded.
    assert runner_class._sample(runner, None, metadata) is None
    assert force_v1.VERIFIED.rounds == 0
    runner.speculative_config = "some"
    assert runner_class._sample(runner, "logits", metadata) == "logits"
    assert force_v1.Verified(2, 1, 1) == force_v1.VERIFIED


class StubEngine:
    """Says its counters."""

    def __init__(self, label: str, counters: dict[str, int]) -> None:
        (self.arm,) = grid("arms").parse_arms(label)
        self._counters = counters

    def counters(self) -> dict[str, int]:
        return self._counters


@pytest.mark.parametrize(
    ("label", "after", "drafted", "accepted", "coverage"),
    [
        ("v1-none", {}, None, None, None),
        # vLLM's metrics have all places that were scheduled.
        (
            "v1-ngram-gpu:5",
            {"verified": 27, "rounds": 30, "rounds_with_draft": 15},
            20, 12, 0.5,
        ),
        ("v2-intree-ngram:5", {}, 100, 12, None),
        (
            "ngram:5",
            {"verified": 27, "rounds": 30, "rounds_with_draft": 15, "accepted": 11},
            20, 11, 0.5,
        ),
    ],
)  # fmt: skip
def test_what_a_point_says_of_its_drafts(
    label: str,
    after: dict[str, int],
    drafted: int | None,
    accepted: int | None,
    coverage: float | None,
) -> None:
    measure, serve = grid("measure"), grid("serve")
    before = dict.fromkeys(after, 0)
    if after:
        before |= {"verified": 7, "rounds": 10, "rounds_with_draft": 5}
    steps = [(1.0, {0: 1}), (2.0, {0: 3})]
    rounds = [
        measure.Round(0.0, 8, steps, draft_tokens=60, accepted_tokens=5),
        measure.Round(0.0, 8, steps, draft_tokens=40, accepted_tokens=7),
    ]
    counters = serve.count_since(StubEngine(label, after), rounds, before)
    figures = [measure.round_figures(one) for one in rounds]
    found = measure.point_figures([measure.Run(True, figures, counters)])
    said = (found["drafted"], found["accepted"], found["coverage"])
    assert said == (drafted, accepted, coverage)


# --- what is in force ------------------------------------------------------------


def described(device: str, ahead: bool) -> dict[str, Any]:
    return {"device": device, "async_scheduling": ahead, "cudagraph_mode": "FULL"}


def test_an_arm_that_waits_for_each_step_is_refused() -> None:
    arms = grid("arms")
    waiting = described("cuda", ahead=False)
    for name, kind in arms.KINDS.items():
        arm = arms.Arm(name, 0 if kind.method == "none" else 5)
        assert arm.why_not_as_meant(described("cuda", ahead=True)) is None
        assert arm.why_not_as_meant(described("cpu", ahead=False)) is None
        why_not = arm.why_not_as_meant(waiting)
        if name == "v1-suffix":
            assert why_not is None
        else:
            assert why_not is not None
            assert f"{arm.label} does not schedule asynchronously" in why_not
            assert "\n" not in why_not


def test_an_engine_that_is_not_what_it_stands_for_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine_module, serving = grid("engine"), grid("serving")
    (arm,) = grid("arms").parse_arms("v1-ngram-gpu:5")
    engine = object.__new__(engine_module.GridEngine)
    engine.arm, engine.max_num_seqs = arm, 4
    told = described("cuda", ahead=False)
    engine.engine = SimpleNamespace(collective_rpc=lambda name: [told])
    order = {"arm": arm.name, "k": arm.k, "shape": "tiny"}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(order)))
    reader, writer = os.pipe()
    monkeypatch.setattr(sys, "argv", ["serve", str(writer)])
    serving.serve_points(lambda *_: engine, lambda *_: None)
    with os.fdopen(reader) as answers:
        (answer,) = map(json.loads, answers)
    assert answer["error"].startswith("RuntimeError: v1-ngram-gpu:5 does not schedule")
    assert capsys.readouterr().err.count("Traceback") == 1
    told["async_scheduling"] = True
    assert engine.describe() == told
    assert engine.in_force == {"async_scheduling": True, "cudagraph_mode": "FULL"}


def test_what_is_in_force_is_recorded_with_a_point() -> None:
    taken, measure = grid("taken"), grid("measure")
    (arm,) = grid("arms").parse_arms("v1-none")
    one = taken.Taken(arm, grid("plan").Point("low", 1), 5.0)
    steps = [(1.0, {0: 1}), (2.0, {0: 3})]
    figures = [measure.round_figures(measure.Round(0.0, 8, steps))]
    run = measure.encode_run(measure.Run(True, figures, {}))
    in_force = {"async_scheduling": True, "cudagraph_mode": "FULL_AND_PIECEWISE"}
    answer = {"runs": [run], "stage_tpot_ms": None}
    one.add({**answer, "in_force": in_force}, 3.0, 1.0)
    assert in_force.items() <= one.figures().items()
    silent = taken.Taken(arm, grid("plan").Point("low", 1), 5.0)
    silent.add(answer, 3.0, 1.0)
    assert silent.figures()["async_scheduling"] is None


# --- what is timed ---------------------------------------------------------------


class RunnerV1:
    """Calls what V1's runner calls."""

    def __init__(self) -> None:
        self.cudagraph_dispatcher = SimpleNamespace(
            dispatch=lambda num_tokens: (
                SimpleNamespace(name="PIECEWISE"),
                SimpleNamespace(num_tokens=num_tokens),
            )
        )

    def execute_model(self, scheduler_output: Any) -> None:
        self._update_states()
        self._prepare_inputs()
        self.cudagraph_dispatcher.dispatch(num_tokens=24)
        self._build_attention_metadata()
        self._model_forward()

    def sample_tokens(self, grammar_output: Any) -> None:
        self._sample()
        self._bookkeeping_sync()
        self.propose_draft_token_ids()

    def _nothing(self) -> None:
        return None

    _update_states = _prepare_inputs = _build_attention_metadata = _nothing
    _model_forward = _sample = _bookkeeping_sync = _nothing
    propose_draft_token_ids = _nothing


def test_steps_of_v1_are_timed_by_its_own_names() -> None:
    watches = grid("watches")
    runner = RunnerV1()
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    core = SimpleNamespace(
        scheduler=SimpleNamespace(), model_executor=SimpleNamespace()
    )
    core.model_executor.driver_worker = worker
    engine = SimpleNamespace(
        engine_core=SimpleNamespace(engine_core=core), output_processor=None
    )
    watch = watches.Watches(engine)
    runner.execute_model(SimpleNamespace(scheduled_spec_decode_tokens={"0": [1]}))
    runner.sample_tokens(None)
    spent, facts = watch.take()
    assert set(spent) == {
        "execute_model", "update_requests", "prepare_inputs", "attn_metadata",
        "model_forward", "sample_tokens", "sample", "bookkeeping", "propose",
    }  # fmt: skip
    assert set(spent) <= {name for name, _ in watches.ROWS}
    assert facts == {"drafting": 1, "graph": ("PIECEWISE", 24, None)}
    watch.close()
    assert set(vars(runner)) == {"cudagraph_dispatcher"}


def test_v1_has_what_is_watched() -> None:
    pytest.importorskip("vllm")
    runner = importlib.import_module("vllm.v1.worker.gpu_model_runner")
    for _, attribute in grid("watches").V1:
        assert callable(getattr(runner.GPUModelRunner, attribute)), attribute
    output = runner.AsyncGPUModelRunnerOutput
    assert callable(output.get_output)


# --- real runs -------------------------------------------------------------------

needs_engine = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny run is for a CPU"),
    pytest.mark.timeout(900),
]


def tiny(*marks: Any) -> Callable[[Any], Any]:
    """Mark a test that runs tiny engines."""

    def mark(test: Any) -> Any:
        for one in (*needs_engine, *marks):
            test = one(test)
        return test

    return mark


@tiny(
    pytest.mark.skipif(
        find_spec("arctic_inference") is None, reason="arctic-inference is missing"
    )
)
def test_suffix_decoding_of_v1_says_what_it_verified(
    tmp_path: Path, rng: random.Random
) -> None:
    importlib.import_module("test_engine_grid").write_texts(tmp_path, rng)
    done = subprocess.run(
        [
            sys.executable, str(BENCH / "engine_grid.py"), "run", "--tiny",
            "--arms", "v1-suffix:5", "--points", "mid:3", "--length", "24",
            "--out", str(tmp_path), "--work", str(tmp_path / "work"),
            "--commit", "abc",
        ],
        env={**os.environ, "MRV2_SPEC_SHARED": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = grid("record").read(tmp_path / "engine_grid.jsonl")
    assert 0 < line["accepted"] <= line["drafted"]
    assert 0 < line["coverage"] < 1
    assert (line["async_scheduling"], line["cudagraph_mode"]) == (False, "NONE")


@tiny()
def test_a_tiny_profile_of_v1(
    tmp_path: Path, rng: random.Random, tiny_run: Callable[..., str]
) -> None:
    importlib.import_module("test_engine_grid").write_texts(tmp_path, rng)
    tiny_run(
        "profile_step.py", "--arms", "v1-none", "--points", "mid:2", "--length", "12",
        "--kernel-steps", "2", shared=tmp_path,
    )  # fmt: skip
    record = json.loads((tmp_path / "profile_step.json").read_text())
    host = record["points"][0]["host"]
    for name in (
        "schedule", "execute_model", "update_requests", "prepare_inputs",
        "attn_metadata", "model_forward", "sample_tokens", "sample", "bookkeeping",
        "update_from_output",
    ):  # fmt: skip
        assert host["ms"][name] > 0, name
    parts = ("update_requests", "prepare_inputs", "attn_metadata", "model_forward")
    assert sum(host["ms"][name] for name in parts) < host["ms"]["execute_model"]
