"""Two pipeline stages: the same text, from one way of scheduling only."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.harness import Texts, Worker, add, ids, ngram, outputs, walk

pytestmark = pytest.mark.vllm

STAGES = {"pipeline_parallel_size": 2}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stages_change_no_token(
    rng: random.Random, texts: Texts, run: Callable[..., dict[str, Any]]
) -> None:
    prompts, expected = texts.draw(lambda: walk(rng, 40), 3, 24)
    result = run(
        [add(f"r{i}", prompt, 24) for i, prompt in enumerate(prompts)],
        engine=ngram(4) | STAGES,
        async_scheduling=True,
    )
    assert outputs(result) == expected
    assert result["counters"]["accepted"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_grammars_hold_where_stages_take_turns(
    run: Callable[..., dict[str, Any]],
) -> None:
    # Mostly the drafts handed over are those of the other requests.
    grammars = (("[0-3]{6}", "0109 0119 0029 " * 2), ("[a-z]+", "abcdefgh" * 3))
    actions = [
        add(regex, ids(text), 16, structured_outputs={"regex": regex}, ignore_eos=False)
        for regex, text in grammars
    ]
    actions.append(add("free", ids("abcabcabdabc" * 2), 16))
    plain, drafted = (
        run(
            actions,
            model="text",
            engine={
                **more,
                "skip_tokenizer_init": False,
                "max_model_len": 128,
                "structured_outputs_config": {"backend": "xgrammar"},
            },
            async_scheduling=True,
        )
        for more in ({}, ngram(4) | STAGES)
    )
    assert outputs(drafted) == outputs(plain)
    assert dict(drafted["request_counts"])["free"]["accepted"] > 0


def test_refused_without_async_scheduling(worker: Worker) -> None:
    job = {"engine": ngram(4) | STAGES, "async_scheduling": False, "actions": []}
    assert worker.run(job)["error"][0].startswith(
        "SettingsError: pipeline_parallel_size=2 needs async scheduling"
    )
