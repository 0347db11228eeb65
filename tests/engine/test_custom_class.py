"""Any speculator runs; one that publishes counts is trimmed; others are refused."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.harness import Texts, Worker, add, outputs, rounds, walk

pytestmark = pytest.mark.vllm


def custom(name: str) -> dict[str, Any]:
    return {
        "speculative_config": {
            "method": "custom_class",
            "model": f"drafters.{name}",
            "num_speculative_tokens": 4,
        },
        "max_num_seqs": 2,
    }


@pytest.mark.parametrize(
    ("name", "async_scheduling", "trimmer"),
    [
        ("SilentSpeculator", True, "off: the drafter publishes no num_valid_drafts"),
        ("PublishingSpeculator", True, "on, "),
    ],
)
def test_identical(
    name: str,
    async_scheduling: bool,
    trimmer: str,
    rng: random.Random,
    texts: Texts,
    run: Callable[..., dict[str, Any]],
) -> None:
    prompts, expected = texts.draw(
        lambda: walk(rng, 40),
        3,
        16,
        lambda prompt, text: len(rounds(prompt, text, 4)) < 11,
    )
    result = run(
        [add(f"r{i}", prompt, 16) for i, prompt in enumerate(prompts)],
        engine=custom(name),
        async_scheduling=async_scheduling,
    )
    assert outputs(result) == expected
    assert result["longest_run"] > 1
    (line,) = result["log"]
    assert line.startswith(f"mrv2-spec: method custom_class ({name}), k=4, trimmer ")
    assert f"trimmer {trimmer}" in line
    # Only of a drafter that says which drafts are real is there anything to count.
    publishes = name == "PublishingSpeculator"
    assert (result["counters"] is not None) == publishes
    if publishes:
        assert 0 < result["counters"]["accepted"] <= result["counters"]["verified"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_that_say_different_things_verify_the_same(
    rng: random.Random, texts: Texts, run: Callable[..., dict[str, Any]]
) -> None:
    prompts, expected = texts.draw(lambda: walk(rng, 40), 2, 24)
    result = run(
        [add(f"r{i}", prompt, 24) for i, prompt in enumerate(prompts)],
        engine=custom("MoodySpeculator") | {"tensor_parallel_size": 2},
        async_scheduling=True,
    )
    assert outputs(result) == expected
    counters = result["counters"]
    assert counters["accepted"] > 0
    # Widths were chosen by what was said.
    assert counters["never_issued"] > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoSpeculator", "is no subclass of vllm.v1.worker.gpu.spec_decode.speculator"),
        ("Missing", "it must be the dotted path of a class"),
    ],
)
def test_refused(name: str, message: str, worker: Worker) -> None:
    result = worker.run({"engine": custom(name), "actions": []})
    assert result["error"][0].startswith("SettingsError: model='drafters.")
    assert message in result["error"][0]
