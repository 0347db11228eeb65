"""Scripts that read recorded texts name what is missing, and do the rest."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
LEARNED = "replay_suffix_learned_local_k4"


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    """Write a compressed file of JSON lines."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(
        gzip.compress("".join(json.dumps(one) + "\n" for one in lines).encode())
    )
    return path


def cut(path: Path) -> None:
    """Take the end of a file away."""
    path.write_bytes(path.read_bytes()[:-20])


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder with one whole text file, one that is cut short, and golden figures."""
    folder = tmp_path / "shared"
    texts = [
        {
            "prompt_token_ids": [1, 2, 3],
            "output_token_ids": [i, *range(100, 255), i],
            "category": "a",
        }
        # The engine grid takes 36 of them to teach a memory.
        for i in range(40)
    ]
    folder.mkdir()
    write(folder / "data" / "agentic.jsonl.gz", texts)
    cut(write(folder / "data" / "code_edit.jsonl.gz", texts))
    (folder / "golden").mkdir()
    golden = {"settings": {"arctic": {"version": "1"}}, "results": {}}
    (folder / "golden" / "replay_tokens_per_step.json").write_text(json.dumps(golden))
    return folder


def run(shared: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH / script), *options, "--out", str(shared.parent)],
        env={
            **os.environ,
            "MRV2_SPEC_SHARED": str(shared),
            # Compiling takes longer than these few tokens do.
            "NUMBA_DISABLE_JIT": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )


def left_out(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("left out ")]


def test_a_suffix_replay_leaves_files_out(shared: Path) -> None:
    options = ("--k", "4", "--local", "--files")
    done = run(
        shared,
        "replay_suffix.py",
        *options,
        "code_edit",
        "agentic",
        "smollm2_spec_bench",
    )
    assert done.returncode == 0, done.stderr
    damaged, missing = left_out(done.stdout)
    assert "code_edit.jsonl.gz is cut short or damaged" in damaged
    assert missing.startswith("left out smollm2_spec_bench: no ")
    found = json.loads((shared.parent / f"{LEARNED}.json").read_text())
    assert {r["file"] for r in found["results"]} == {"agentic"}
    assert set(found["left_out"]) == {"code_edit", "smollm2_spec_bench"}


@pytest.mark.parametrize("content", [None, "{"])
def test_a_suffix_replay_without_golden_figures_ends_in_a_line(
    shared: Path, content: str | None
) -> None:
    path = shared / "golden" / "replay_tokens_per_step.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    done = run(shared, "replay_suffix.py", "--files", "agentic")
    assert done.returncode == 1
    assert done.stderr.startswith(f"{path} cannot be read: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("there", [False, True])
def test_golden_drafts_that_cannot_be_read_are_named(shared: Path, there: bool) -> None:
    path = shared / "golden" / "suffix_arctic.jsonl.gz"
    if there:
        cut(write(path, [{"run": "a"}]))
    done = run(shared, "golden_suffix.py")
    assert done.returncode == 1
    assert done.stderr.startswith(f"{path} cannot be read: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("rounds", [False, True])
def test_a_simulation_leaves_workloads_out(shared: Path, rounds: bool) -> None:
    options = ["--rounds"] * rounds
    more = ("--linear", "--drafter", "ngram-latest", "--policy", "fixed", "--k", "4")
    done = run(
        shared, "simulate_policy.py", *options, *more, "--requests", "1",
        "--workload", "high", "low", "agentic",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    damaged, missing = left_out(done.stdout)
    assert damaged.startswith("left out high: ")
    assert "code_edit" in damaged and "cut short or damaged" in damaged
    assert missing.startswith("left out low: ")
    assert "reference_spec_bench.jsonl.gz" in missing
    found = json.loads((shared.parent / "simulate_policy.json").read_text())
    assert {p["workload"] for p in found["points"]} == {"agentic"}
    assert set(found["left_out"]) == {"high", "low"}


def test_a_simulation_of_nothing_ends_in_a_line(shared: Path) -> None:
    done = run(shared, "simulate_policy.py", "--linear", "--workload", "low")
    assert done.returncode == 1
    assert done.stderr == "no workload to simulate\n"
    assert not (shared.parent / "simulate_policy.json").exists()
