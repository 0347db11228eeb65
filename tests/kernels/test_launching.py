"""Launches that skip Triton are the launches that Triton would have made."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mrv2_spec.kernels.launching import Launches


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("launch_without_gpu.py")],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


ONCE = [1, *[0] * 7]
# How often Triton is asked in each of eight steps.
ASKED = {
    "ngram": ONCE,
    "fill": ONCE,
    # Nothing new: `unaligned` and `watched` launch the same kernel.
    "trim": ONCE,
    "value": ONCE,
    "value_classes": ONCE,
    "count": ONCE,
    "count_sources": ONCE,
    # An aligned batch comes after one that was not.
    "unaligned": [0, *[1] * 7],
    # A stride changes in every other step.
    "stride": [0, 0, 1, 0, 1, 0, 1, 0],
    # Every other launch is watched, and the one behind it made anew.
    "watched": [1] * 8,
}


@pytest.mark.parametrize("name", ASKED)
def test_same_launches(name: str, results: dict[str, Any]) -> None:
    launches = results[name]
    for launch in launches:
        assert launch["got"] == launch["want"]
    assert [launch["asked"] for launch in launches] == ASKED[name]


def test_all_scenarios_are_checked(results: dict[str, Any]) -> None:
    assert set(results) == set(ASKED)


class Doubler:
    """Stands in for a kernel in the interpreter, whose launches return nothing."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda x, BY, num_warps: x.mul_(BY) and None


def test_what_returns_nothing_is_asked_every_time() -> None:
    launch = Launches(Doubler(), {"BY": 2}, num_warps=1)
    x = torch.ones(1)
    for _ in range(3):
        launch((1, 1, 1), (x,))
    assert x.item() == 8 and launch.num_ordinary == 3
