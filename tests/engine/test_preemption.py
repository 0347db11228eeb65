"""Requests that lose their cache while drafts are in flight, and come back."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.harness import Texts, add, ngram, outputs, walk

pytestmark = pytest.mark.vllm

NUM_TOKENS = 36
# One block is vLLM's own; five growing requests share the others, 32 tokens each.
POOL = {
    "num_gpu_blocks_override": 4,
    "max_model_len": 96,
    "max_num_seqs": 5,
    "enable_prefix_caching": False,
}


@pytest.fixture(scope="module")
def growing(worker: Any) -> tuple[list[list[int]], list[list[int]]]:
    rng = random.Random()
    return Texts(worker).draw(lambda: walk(rng, rng.randrange(26, 32)), 5, NUM_TOKENS)


@pytest.mark.parametrize(
    ("num_drafts", "async_scheduling", "trim"),
    [(1, True, True), (3, False, False), (5, True, True)],
)
def test_identical_through_preemptions(
    num_drafts: int,
    async_scheduling: bool,
    trim: bool,
    growing: tuple[Any, Any],
    run: Callable[..., dict[str, Any]],
) -> None:
    prompts, expected = growing
    result = run(
        [add(f"r{i}", prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)],
        engine={**POOL, **ngram(num_drafts, trim)},
        async_scheduling=async_scheduling,
    )
    assert outputs(result) == expected, f"prompts: {prompts}"
    assert result["preemptions"] >= 5, result["preemptions"]
    assert result["counters"]["accepted"] > 0
