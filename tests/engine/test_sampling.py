"""Every sampling feature acts on verified rows as it does without speculation."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.harness import add, ids, ngram, outputs, suffix, walk

pytestmark = pytest.mark.vllm

Run = Callable[..., dict[str, Any]]

NUM_TOKENS = 20
# Fixed: with any of these features a text may pass a close decision.
SEED = 5
FEATURES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "presence_penalty": {"presence_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "allowed_token_ids": {"allowed_token_ids": [4, 5, 6, 9, 10, 11, 14, 15]},
    "logit_bias": {"logit_bias": {"7": 4.0, "12": -100.0, "13": 3.0}},
    "min_p": {"min_p": 0.2},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": list(range(3, 14))},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
}
DRAFTERS = {
    "ngram": ngram(4, trim=False),
    "ngram, trimmed": ngram(4),
    "suffix": suffix(4, trim=False),
}


def requests() -> list[list[Any]]:
    rng = random.Random(SEED)
    prompt = walk(rng, 16) * 3
    return [
        add(name, prompt, NUM_TOKENS, **options) for name, options in FEATURES.items()
    ]


@pytest.fixture(scope="module")
def plain(worker: Any) -> dict[str, Any]:
    result: dict[str, Any] = worker.run(
        {"engine": {}, "actions": requests(), "async_scheduling": True}
    )
    assert "error" not in result, result["traceback"]
    return result


def test_each_feature_does_something(plain: dict[str, Any]) -> None:
    texts = dict(zip(FEATURES, outputs(plain), strict=True))
    for name in ("frequency_penalty", "presence_penalty", "repetition_penalty",
                 "allowed_token_ids", "logit_bias"):  # fmt: skip
        assert texts[name] != texts["nothing"], name
    assert set(texts["allowed_token_ids"]) <= set(
        FEATURES["allowed_token_ids"]["allowed_token_ids"]
    )
    assert 12 not in texts["logit_bias"]
    *text, last = texts["min_tokens"]
    stops = FEATURES["min_tokens"]["stop_token_ids"]
    assert len(text) >= 11
    assert not set(text) & set(stops)
    assert last in stops or len(text) == NUM_TOKENS - 1


def assert_equal(
    result: dict[str, Any], plain: dict[str, Any], names: list[str]
) -> None:
    for name, found, want in zip(
        names, result["requests"], plain["requests"], strict=True
    ):
        assert found["token_ids"] == want["token_ids"], name
        assert found["finish_reason"] == want["finish_reason"], name
        for kind in ("logprobs", "prompt_logprobs"):
            assert len(found[kind]) == len(want[kind]), (name, kind)
            for a, b in zip(found[kind], want[kind], strict=True):
                assert a == (b and pytest.approx(b, abs=1e-3)), (name, kind)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_equal_to_no_speculation(drafter: str, plain: dict[str, Any], run: Run) -> None:
    result = run(requests(), engine=DRAFTERS[drafter], async_scheduling=True)
    assert_equal(result, plain, list(FEATURES))
    if "trimmed" not in drafter:
        for name, counts in result["request_counts"]:
            assert counts["accepted"] > 0, name


def test_prompt_logprobs_in_chunks_beside_drafts(run: Run) -> None:
    rng = random.Random(SEED)
    draft = walk(rng, 16) * 3
    prompts = [walk(rng, length) for length in (60, 131)]
    actions = [
        *(add(f"drafts {i}", draft[i:], 24) for i in range(2)),
        ["step", 4],
        *(
            add(f"prompt {i}", prompt, 4, prompt_logprobs=1, logprobs=2)
            for i, prompt in enumerate(prompts)
        ),
    ]
    # The longer prompt takes four steps or more.
    engine = {"max_num_batched_tokens": 40, "max_num_seqs": 6}
    engine["enable_prefix_caching"] = False
    plain, result = (
        run(actions, engine={**drafter, **engine}, async_scheduling=True)
        for drafter in ({}, DRAFTERS["ngram"])
    )
    names = [action[1] for action in actions if action[0] == "add"]
    assert_equal(result, plain, names)
    for request, prompt in zip(plain["requests"][2:], prompts, strict=True):
        assert len(request["prompt_logprobs"]) == len(prompt)
    for name, counts in result["request_counts"]:
        assert counts["accepted"] > 0, name


CHAIN = "abcdefgh"
THINK, THOUGHT = 3, 4
BUDGETS = (0, 1, 3, 4, 5)


def test_bad_words_and_thinking_budgets(run: Run) -> None:
    # The history repeats a chain that the model would go on copying.
    prompt = ids(CHAIN * 4 + CHAIN[:2])
    thoughts = [THINK, *ids(CHAIN), THOUGHT, *ids("so. ")] * 2
    actions = [
        add("free", prompt, 12),
        # Of two tokens, so that it lies across places of a draft.
        add("bad word", prompt, 12, bad_words=["ef"]),
        add("two bad words", prompt, 12, bad_words=["d", "ab"]),
        *(
            add(f"budget {n}", [*thoughts, THINK], 12, thinking_token_budget=n)
            for n in BUDGETS
        ),
        add("a thought", [*thoughts, THINK, *ids("a")], 12),
    ]
    found = []
    for engine, trimmed in (
        ({}, False),
        (ngram(4, trim=False), False),
        (ngram(4), True),
        (suffix(6, trim=False), False),
    ):
        result = run(
            actions,
            model="text",
            engine={
                **engine,
                "skip_tokenizer_init": False,
                "reasoning_config": {"reasoning_parser": "deepseek_r1"},
            },
            async_scheduling=True,
        )
        found.append(outputs(result))
        if engine and not trimmed:
            for name, counts in result["request_counts"]:
                assert counts["accepted"] > 0, name
    free, bad, two, *budgets, thought = found[0]
    assert free[:6] == ids(CHAIN[2:])
    assert bad[:3] == ids("cde")
    assert bad[3] != ids("f")[0]
    assert ids("d")[0] not in two
    # A thought of as many tokens, and then its end.
    assert [text.index(THOUGHT) for text in budgets] == list(BUDGETS)
    assert thought[: len(CHAIN)] == [*ids(CHAIN[1:]), THOUGHT]
    assert found[1:] == found[:1] * 3
