"""Steps under forced budgets: a tiny run on the CPU."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_numbers() -> None:
    pytest.importorskip("typer")
    numbers = importlib.import_module("step_times").numbers
    assert numbers("16,64") == [16, 64]
    for wrong, why in (("16,x", "'x'"), ("0", "0 is no number"), ("", "''")):
        with pytest.raises(ValueError, match=why):
            numbers(wrong)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny run is for a CPU")
@pytest.mark.timeout(600)
def test_a_tiny_run(tmp_path: Path, rng: Any, tiny_run: Callable[..., str]) -> None:
    importlib.import_module("test_engine_grid").write_texts(tmp_path, rng)
    said = tiny_run(
        "step_times.py", "--arms", "ngram:3", "--c", "2", "--rows", "4,6,99",
        "--block", "6", "--length", "64", shared=tmp_path,
    )  # fmt: skip
    record = json.loads((tmp_path / "step_times.json").read_text())
    assert not record["failures"] and record["commit"] == "abc"
    points = record["points"]
    # 99 rows are more than two requests have; without drafts and with two and four.
    assert {point["places"] for point in points} == {0, 2, 4}
    for point in points:
        assert point["requests"] == 2 and point["steps"] >= 1
        assert point["ms"] > 0 and point["reckoned_ms"] > 0 and point["waited"] == 0
    assert "2 requests,     4 rows:" in said
