"""What counting costs: the arithmetic, and a tiny run on the CPU."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_a_difference_is_that_of_pairs() -> None:
    pytest.importorskip("typer")
    difference = importlib.import_module("counting_cost").difference
    # Steps got slower meanwhile; counting added 1 %, then 3 %.
    answer = {"counted_ms": [9.1, 11.3], "uncounted_ms": [9.0, 11.0]}
    found = difference(answer)
    assert found["uncounted_tpot_ms"] == pytest.approx(10.0)
    assert found["added_percent"] == pytest.approx(2.0)
    assert found["standard_error"] == pytest.approx(1.0)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny run is for a CPU")
@pytest.mark.timeout(600)
def test_a_tiny_run(tmp_path: Path, rng: Any, tiny_run: Callable[..., str]) -> None:
    importlib.import_module("test_engine_grid").write_texts(tmp_path, rng)
    tiny_run(
        "counting_cost.py", "--arms", "ngram:3", "--c", "2", "--pairs", "2",
        "--length", "8", shared=tmp_path,
    )  # fmt: skip
    record = json.loads((tmp_path / "counting_cost.json").read_text())
    found = record["arms"]["ngram:3"]
    assert record["commit"] == "abc" and not record["failures"]
    times = [*found["counted_ms"], *found["uncounted_ms"]]
    assert len(times) == 4 and min(times) > 0
