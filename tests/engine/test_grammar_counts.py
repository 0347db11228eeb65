"""Counters of real engines with grammars, against a count of what every step did."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.harness import END, add, ids, ngram, suffix
from tests.engine.recount import Begins, check

pytestmark = pytest.mark.vllm

Run = Callable[..., dict[str, Any]]

K = 4
NUM_TOKENS = 24
CHOICES = ["refused", "renewed", "reduced"]


def begins_choice(text: list[int]) -> bool:
    return any([*ids(choice), END][: len(text)] == text for choice in CHOICES)


def begins_digits(text: list[int]) -> bool:
    if text[-1:] == [END]:
        return len(text) == 7 and begins_digits(text[:-1])
    return len(text) <= 6 and set(text) <= set(ids("0123"))


def begins_letters(text: list[int]) -> bool:
    if text[-1:] == [END]:
        return len(text) > 1 and begins_letters(text[:-1])
    return set(text) <= set(ids("abcdefgh"))


# What is copied from the prompt is legal at first, or in part, or not at all.
KINDS: dict[str, tuple[dict[str, Any], str, Begins]] = {
    "choice": ({"choice": CHOICES}, "refuses reduces renews " * 2, begins_choice),
    "digits": ({"regex": "[0-3]{6}"}, "0109 0119 0029 0139 " * 2, begins_digits),
    "letters": ({"regex": "[a-h]+"}, "abcdefghij" * 3, begins_letters),
}


@pytest.mark.parametrize(
    ("method", "async_scheduling", "trim"),
    [("ngram", True, True), ("ngram", True, False), ("suffix", False, True)],
)
def test_equal_to_a_count_of_every_step(
    method: str, async_scheduling: bool, trim: bool, run: Run
) -> None:
    actions, names, grammars = [], [], {}
    for i in range(2):
        for kind, (grammar, look_alikes, begins) in KINDS.items():
            names.append(f"{kind} {i}")
            grammars[names[-1]] = begins
            actions.append(
                add(
                    names[-1],
                    ids(look_alikes),
                    NUM_TOKENS,
                    structured_outputs=grammar,
                    ignore_eos=False,
                )
            )
        names.append(f"free {i}")
        actions.append(add(names[-1], ids("abcabcabdabc" * 2), NUM_TOKENS))
    result = run(
        actions,
        model="text",
        # Eight requests in four slots; prompts are computed in chunks beside others.
        engine={
            **(ngram if method == "ngram" else suffix)(K, trim),
            "skip_tokenizer_init": False,
            "max_model_len": 128,
            "max_num_batched_tokens": 40,
            "structured_outputs_config": {"backend": "xgrammar"},
        },
        async_scheduling=async_scheduling,
        record=True,
    )
    total = check(result, K, names, grammars)
    assert total["invalid"] > 0
    assert total["never_issued"] > 0
    if not trim:
        assert total["accepted"] > 0
