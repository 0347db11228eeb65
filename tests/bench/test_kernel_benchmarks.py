"""Every kernel benchmark runs: tiny, on the CPU, its checks included."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tiny runs are for a CPU"),
]


def run(name: str, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark's script."""
    return subprocess.run(
        [sys.executable, str(BENCH / f"bench_{name}.py"), *options, "--out", str(out)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def tiny(name: str, out: Path) -> dict[str, Any]:
    """Run it tiny and return what it saved."""
    done = run(name, out, "--tiny", "--commit", "abc")
    assert done.returncode == 0, done.stdout + done.stderr
    record: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    assert record["commit"] == "abc"
    assert {"gpu", "driver", "torch", "vllm", "command", "seed"} <= set(record)
    assert record["command"].endswith("--tiny --commit abc")
    assert record["copy_bandwidth_gb_s"] > 0
    assert record["cases"]
    return record


def test_propose_ngram(tmp_path: Path) -> None:
    for case in tiny("propose_ngram", tmp_path)["cases"]:
        assert case["bytes_moved"] > 4 * case["num_reqs"] * case["row_len"]
        for name in ("ours_us", "latest_us"):
            assert 0 < case[name]["p20"] <= case[name]["p50"] <= case[name]["p80"]
        assert case["read_floor_us"] > 0
        assert case["copy_us"] > 0


def test_trim(tmp_path: Path) -> None:
    for case in tiny("trim", tmp_path)["cases"]:
        names = {"trim", "fill", "count", "value"}
        assert names <= set(case["p50_us"])
        assert all(case["p50_us"][name] > 0 for name in names)
        assert all(case["floor_us"][name] > 0 for name in names)


def test_suffix(tmp_path: Path) -> None:
    cases = tiny("suffix", tmp_path)["cases"]
    assert {case["text"] for case in cases} == {"prose", "template", "loop"}
    # In a loop every place matches.
    assert max(case["drafted_per_row"] for case in cases) > 1
    assert all(case["propose_us"]["p50"] > 0 for case in cases)


def test_suffix_rivals(tmp_path: Path) -> None:
    record = tiny("suffix_rivals", tmp_path)
    (case,) = record["cases"]
    everybody = {*case["arms"], *record["left_out"]}
    assert everybody == {
        "mrv2-spec", "suffix-gpu, 128 occurrences", "suffix-gpu, 32 occurrences",
        "arctic-inference",
    }  # fmt: skip
    assert case["arms"]["mrv2-spec"]["propose_us"]["p50"] > 0


@pytest.mark.parametrize("name", ["propose_ngram", "trim", "suffix", "suffix_rivals"])
def test_without_a_gpu_it_says_so_in_one_line(name: str, tmp_path: Path) -> None:
    done = run(name, tmp_path)
    assert done.returncode == 1
    assert done.stderr == "no GPU here: --tiny runs on the CPU\n"
    assert not list(tmp_path.iterdir())
