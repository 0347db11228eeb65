"""`make test` runs its tests in two processes: a failure in either one is a failure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("side_by_side.py")
# Each start of pytest is faster without them.
NO_PLUGINS = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@pytest.mark.parametrize("failing", [None, "chosen", "others"])
def test_every_test_runs_once_and_may_fail(failing: str | None, tmp_path: Path) -> None:
    for name in ("chosen", "others"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text(
            f"def test_{name}():\n    assert {name != failing}, 'seen'\n"
        )
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "chosen"],
        cwd=tmp_path,
        env=NO_PLUGINS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (failing is not None), done.stdout + done.stderr
    assert done.stdout.count("collected 1 item") == 2
    assert done.stdout.count("1 passed") == (2 if failing is None else 1)
    assert ("AssertionError: seen" in done.stdout) == (failing is not None)


def test_a_path_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "nowhere"],
        cwd=tmp_path,
        env=NO_PLUGINS,
        check=False,
    )
    assert done.returncode == 1
