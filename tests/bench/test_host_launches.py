"""The host's launch times: a tiny run on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "bench_host_launches.py"

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tiny runs are for a CPU"
)


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_every_launch_is_timed_both_ways(tmp_path: Path) -> None:
    done = run("--tiny", "--commit", "abc", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "host_launches.json").read_text())
    assert record["commit"] == "abc"
    (case,) = record["cases"]
    assert set(case["kept_us"]) == {"ngram", "value", "fill", "count", "suffix"}
    assert set(case["ordinary_us"]) == {"ngram", "value", "fill", "count"}
    assert all(time > 0 for time in case["kept_us"].values())
    assert all(time > 0 for time in case["ordinary_us"].values())


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == "no GPU here: --tiny runs on the CPU\n"
