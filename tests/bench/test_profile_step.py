"""The step profile: its watches, its sums, and a real tiny run."""

import importlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"


def module(name: str) -> Any:
    """Return a module of the benchmarks."""
    return importlib.import_module(name)


class Runner:
    """Something to be watched."""

    def step(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds


def test_a_watched_call_is_timed_and_left_as_it_was() -> None:
    watch = module("grid.stopwatch").Stopwatch()
    runner = Runner()
    watch.watch("step", runner, "step")
    watch.watch("missing", runner, "no_such_method")
    watch.watch("nobody", None, "step")
    assert runner.step(0.01) == 0.01
    runner.step(0.01)
    spent = watch.take()
    assert set(spent) == {"step"}
    assert 0.02 <= spent["step"] / 1e9 < 0.5
    assert watch.take() == {}
    watch.close()
    assert vars(runner) == {}
    runner.step(0.0)
    assert watch.take() == {}


def test_a_failing_call_is_timed_and_still_fails() -> None:
    watch = module("grid.stopwatch").Stopwatch()
    failing = SimpleNamespace(step=lambda: 1 // 0)
    watch.watch("step", failing, "step")
    with pytest.raises(ZeroDivisionError):
        failing.step()
    assert set(watch.take()) == {"step"}


def hook(seconds: float) -> Any:
    """Return a wrapper as this project makes them."""

    def wrap(original: Any) -> Any:
        def step(self: Any, *args: Any) -> Any:
            time.sleep(seconds)
            return original(self, *args)

        step.__module__ = "mrv2_spec.integration.something"
        return step

    return wrap


def test_a_hook_is_timed_without_what_it_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = module("grid.stopwatch").Stopwatch()
    watch.watch_hook("step", Runner, "step")
    Runner().step(0.0)
    # Nothing of this project is there.
    assert watch.take() == {}
    # Two hooks, one around the other.
    monkeypatch.setattr(Runner, "step", hook(0.02)(hook(0.01)(Runner.step)))
    hooked = Runner.step
    watch.watch_hook("step", Runner, "step")
    Runner().step(0.3)
    spent = watch.take()
    assert set(spent) == {"hook step"}
    assert 0.03 <= spent["hook step"] / 1e9 < 0.2
    watch.close()
    assert Runner.step is hooked
    Runner().step(0.0)
    assert watch.take() == {}


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("_propose_ngram_kernel", "drafting"),
        ("suffix_draft", "drafting"),
        ("_value_drafts_kernel", "valuing"),
        ("_fill_draft_budget_kernel", "trimming"),
        ("_count_drafts_kernel", "counting"),
        ("_force_kernel", "forcing texts"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<...>>", "attention"),
        ("nvjet_tst_128x64_64x8_1x2_h_bz_coopA_TNT", "matmul"),
        ("_rejection_kernel", "rejection"),
        ("_gather_draft_sampled_kernel", "rejection"),
        ("_gumbel_sample_kernel", "sampling"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "fused layers"),
        ("Memcpy HtoD (Pinned -> Device)", "copies and fills"),
        ("_combine_sampled_and_draft_tokens_kernel", "batch layout"),
        ("something new", "other"),
    ],
)
def test_kernels_are_grouped(name: str, group: str) -> None:
    assert module("grid.kernels").group_of(name) == group


def test_busy_time_counts_overlaps_once() -> None:
    busy_us = module("grid.kernels").busy_us
    assert busy_us([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 5.0
    assert busy_us([]) == 0.0


def test_a_window_takes_in_what_runs_inside_it() -> None:
    window = module("grid.kernels").KernelWindow(on_gpu=False)
    square = torch.ones(64, 64)
    window.open()
    assert window.is_open
    for _ in range(4):
        square = square @ square / 64
    window.close(2)
    torch.exp(square)
    figures = window.figures()
    launches = {one["name"]: one["launches"] for one in figures["kernels"]}
    assert launches["aten::mm"] == 2.0
    assert "aten::exp" not in launches
    assert figures["busy_ms"] > 0


def record_of(begin_ms: float, requests: int, **more: Any) -> Any:
    """Return a step as the engine's loop notes it."""
    decoding = more.pop("decoding", True)
    return module("grid.profiled").StepRecord(
        int(begin_ms * 1e6), requests, decoding, more.get("spent", {}),
        more.get("facts", {}),
    )  # fmt: skip


def test_host_figures_are_those_of_full_decode_steps() -> None:
    host_figures = module("grid.profiled").host_figures
    graph = {"graph": ("FULL", 8, 1)}
    records = [
        record_of(0, 4, decoding=False, spent={"schedule": 9_000_000}),
        record_of(10, 4, facts={**graph, "drafting": 0, "budget": 0},
                  spent={"schedule": 1_000_000, "propose": 2_000_000,
                         "hook A": 3_000_000}),
        record_of(14, 3, facts={**graph, "drafting": 3, "budget": 0},
                  spent={"schedule": 3_000_000}),
        record_of(20, 4, facts={"graph": ("FULL", 16, 5), "drafting": 4, "budget": 6}),
        record_of(22, 2, spent={"schedule": 9_000_000}),
        record_of(99, 4),
    ]  # fmt: skip
    figures = host_figures(records, 4)
    # The prefill, the step of two and the last one, which nothing follows, are out.
    assert figures["steps"] == 3
    assert figures["wall_ms"] == pytest.approx((4 + 6 + 2) / 3)
    assert figures["ms"] == pytest.approx({"schedule": 4 / 3, "propose": 2 / 3})
    assert figures["rest_ms"] == pytest.approx(4 - 4 / 3)
    assert figures["hooks_ms"] == {"A": 1.0}
    assert figures["ours_ms"] == pytest.approx(1 + 2 / 3)
    kinds = [figures[name] for name in ("asleep", "awake_without", "awake_with")]
    assert kinds == [pytest.approx(1 / 3)] * 3
    assert figures["mean_budget"] == 6.0
    assert figures["graphs"][0] == {
        "mode": "FULL", "tokens": 8, "max_query_len": 1, "steps": 2
    }  # fmt: skip


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny run is for a CPU")
@pytest.mark.timeout(900)
def test_a_tiny_profile_on_the_cpu(
    tmp_path: Path, rng: random.Random, tiny_run: Callable[..., str]
) -> None:
    module("test_engine_grid").write_texts(tmp_path, rng)
    printed = tiny_run(
        "profile_step.py", "--arms", "ngram:3,v2-intree-ngram:3", "--points", "mid:2",
        "--length", "12", "--kernel-steps", "2", "--cprofile", shared=tmp_path,
    )  # fmt: skip
    assert "left out v2-intree-ngram:3" in printed
    record = json.loads((tmp_path / "profile_step.json").read_text())
    assert record["commit"] == "abc"
    (point,) = record["points"]
    host = point["host"]
    assert host["steps"] > 2
    assert point["tokens_per_step"] > 1.2
    for name in ("schedule", "execute_model", "choose", "sample_tokens", "propose"):
        assert host["ms"][name] > 0, name
    inner = ("schedule", "execute_model", "sample_tokens", "update_from_output")
    assert sum(host["ms"][name] for name in inner) < host["wall_ms"]
    assert host["ours_ms"] > host["ms"]["propose"]
    assert host["asleep"] + host["awake_without"] + host["awake_with"] == 1.0
    assert point["kernels"]["busy_ms"] > 0
    functions = (tmp_path / "profile_step-cprofile" / point["cprofile"]).read_text()
    assert "propose" in functions
