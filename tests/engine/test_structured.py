"""Grammars in a real engine: drafts full of illegal look-alikes change no token."""

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.engine.harness import add, ids, ngram, outputs, suffix, text_of

pytestmark = pytest.mark.vllm

Run = Callable[..., dict[str, Any]]

MAX_TOKENS = 96
GRADES = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"grade": {"enum": ["A", "B"]}, "sum": {"enum": [10, 12]}},
        "required": ["grade", "sum"],
        "additionalProperties": False,
    },
    "minItems": 3,
    "maxItems": 3,
}
CHOICES = ["refused as before", "accepted as before", "accepted after all"]
REGEX = r"(id=[0-3]{2}; ){4}end"

# What a drafter finds in the prompt looks much like what the grammar wants, and is not.
GRAMMARS: dict[str, tuple[dict[str, Any], str]] = {
    "json": (
        {"json": GRADES},
        '[{"grade":"Z","sum":99},{"grade":"Q","sum":77},{"grade":"Z","sum":99}] ',
    ),
    "regex": ({"regex": REGEX}, "id=47; id=58; id=47; id=96; end? id=47; "),
    "choice": ({"choice": CHOICES}, "accepted as always, refused as always, accepted "),
}


def is_valid(kind: str, text: str) -> bool:
    if kind == "json":
        value = json.loads(text)
        return len(value) == 3 and all(
            one["grade"] in "AB" and one["sum"] in (10, 12) for one in value
        )
    if kind == "regex":
        return re.fullmatch(REGEX, text) is not None
    return text in CHOICES


def actions() -> list[list[Any]]:
    """Return requests of every kind, and one without a grammar among them."""
    found = [
        add(
            kind,
            ids(look_alikes * 2),
            MAX_TOKENS,
            structured_outputs=grammar,
            ignore_eos=False,
        )
        for kind, (grammar, look_alikes) in GRAMMARS.items()
    ]
    return [*found, add("free", ids(GRAMMARS["json"][1] * 2), 24)]


def run_engine(
    run: Run, backend: str, drafter: dict[str, Any], async_scheduling: bool
) -> dict[str, Any]:
    return run(
        actions(),
        model="text",
        engine={
            **drafter,
            "skip_tokenizer_init": False,
            "max_model_len": 320,
            # Any white space would be legal, and endless.
            "structured_outputs_config": {
                "backend": backend,
                "disable_any_whitespace": True,
            },
        },
        async_scheduling=async_scheduling,
    )


def once_each(
    worker: Any, run_backend: Callable[..., dict[str, Any]]
) -> Callable[[str], list[list[int]]]:
    """Return the texts without speculation by backend, each engine run once."""

    def run(actions: list[list[Any]], **job: Any) -> dict[str, Any]:
        result: dict[str, Any] = worker.run({**job, "actions": actions})
        assert "error" not in result, result["traceback"]
        return result

    return cache(lambda backend: outputs(run_backend(run, backend, {}, True)))


@pytest.fixture(scope="module")
def plain(worker: Any) -> Callable[[str], list[list[int]]]:
    """Return the grammars' texts without speculation."""
    return once_each(worker, run_engine)


@pytest.mark.parametrize(
    ("backend", "method", "num_drafts", "async_scheduling", "trim"),
    [
        ("xgrammar", "ngram", 4, True, False),
        ("xgrammar", "ngram", 8, True, True),
        ("xgrammar", "ngram", 8, False, False),
        ("xgrammar", "suffix", 4, True, True),
        ("xgrammar", "suffix", 8, True, False),
        ("guidance", "ngram", 4, True, True),
        ("guidance", "ngram", 8, True, False),
        ("guidance", "suffix", 8, True, False),
    ],
)
def test_valid_and_equal_to_no_speculation(
    backend: str,
    method: str,
    num_drafts: int,
    async_scheduling: bool,
    trim: bool,
    plain: Callable[[str], list[list[int]]],
    run: Run,
) -> None:
    pytest.importorskip("llguidance" if backend == "guidance" else "xgrammar")
    drafter = (ngram if method == "ngram" else suffix)(num_drafts, trim)
    expected = plain(backend)
    for kind, token_ids in zip(GRAMMARS, expected, strict=False):
        assert is_valid(kind, text_of(token_ids)), text_of(token_ids)
    result = run_engine(run, backend, drafter, async_scheduling)
    assert outputs(result) == expected
    totals = result["counters"]
    assert totals["invalid"] > 0
    by_request = dict(result["request_counts"])
    if not trim:
        for name, counts in by_request.items():
            assert counts["accepted"] > 0, name
    # Whatever a grammar ruled out belongs to a request that has one.
    assert by_request["free"]["invalid"] == 0
    assert sum(one["invalid"] for one in by_request.values()) == totals["invalid"]


THINK, THOUGHT = 3, 4
CHAIN = "abcdefgh"
GRADE = {
    "type": "object",
    "properties": {"grade": {"enum": ["A", "B"]}},
    "required": ["grade"],
    "additionalProperties": False,
}


def thoughts() -> list[list[Any]]:
    """Return requests whose thought ends at each place of a draft, and around it.

    The earlier thought is copied up to its end and beyond, where an answer follows
    that the grammar does not allow.
    """
    earlier = [THINK, *ids(CHAIN), THOUGHT, *ids('{"grade":"Z"} ')]
    return [
        add(
            f"{left} left",
            [*earlier, *earlier, THINK, *ids(CHAIN[: len(CHAIN) - left])],
            48,
            structured_outputs={"json": GRADE},
            ignore_eos=False,
        )
        for left in range(len(CHAIN))
    ]


def think(
    run: Run, backend: str, drafter: dict[str, Any], async_scheduling: bool
) -> dict[str, Any]:
    return run(
        thoughts(),
        model="text",
        engine={
            **drafter,
            "skip_tokenizer_init": False,
            "max_model_len": 320,
            "max_num_seqs": 8,
            "reasoning_parser": "deepseek_r1",
            "structured_outputs_config": {
                "backend": backend,
                "disable_any_whitespace": True,
            },
        },
        async_scheduling=async_scheduling,
        record=bool(drafter),
    )


@pytest.fixture(scope="module")
def unspeculated(worker: Any) -> Callable[[str], list[list[int]]]:
    """Return what follows the thoughts without speculation."""
    return once_each(worker, think)


@pytest.mark.parametrize(
    ("backend", "method", "num_drafts", "async_scheduling"),
    [
        ("xgrammar", "ngram", 4, True),
        ("xgrammar", "suffix", 4, True),
        ("guidance", "ngram", 4, True),
        ("xgrammar", "ngram", 6, False),
    ],
)
def test_a_thought_ends_inside_a_draft(
    backend: str,
    method: str,
    num_drafts: int,
    async_scheduling: bool,
    unspeculated: Callable[[str], list[list[int]]],
    run: Run,
) -> None:
    drafter = (ngram if method == "ngram" else suffix)(num_drafts, trim=False)
    expected = unspeculated(backend)
    result = think(run, backend, drafter, async_scheduling)
    speculated = outputs(result)
    for left, token_ids in enumerate(expected):
        thought, answer = token_ids[: left + 1], token_ids[left + 1 :]
        assert thought == [*ids(CHAIN[len(CHAIN) - left :]), THOUGHT]
        assert json.loads(text_of(answer))["grade"] in "AB"
    assert speculated == expected
    totals = result["counters"]
    assert totals["accepted"] > 0
    assert totals["invalid"] > 0
    # The first draft of each: the thought ends before it, at each of its places, after.
    firsts: dict[str, list[int]] = {}
    for one in (one for step in result["records"] for one in step):
        firsts.setdefault(one["id"], one["drafts"])
    ends = [
        draft.index(THOUGHT) if THOUGHT in draft else None
        for draft in (firsts[f"{left} left"] for left in range(len(CHAIN)))
    ]
    after = [None] * (len(CHAIN) - 1 - num_drafts)
    assert ends == [None, *range(num_drafts), *after]
