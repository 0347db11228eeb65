"""What every test of a benchmark's tiny run shares."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(autouse=True)
def _bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let benchmarks, and tests that share something, be imported by name."""
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.syspath_prepend(Path(__file__).parent)


@pytest.fixture
def tiny_run(tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs a benchmark on the CPU, and returns what it prints.

    Its record goes to ``tmp_path``, as of the commit ``abc``.
    """

    def run(script: str, *options: str, shared: Path | None = None) -> str:
        texts = {} if shared is None else {"MRV2_SPEC_SHARED": str(shared)}
        done = subprocess.run(
            [
                sys.executable, str(BENCH / script), "--tiny", *options,
                "--out", str(tmp_path), "--work", str(tmp_path / "work"),
                "--commit", "abc",
            ],
            env={**os.environ, **texts},
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
