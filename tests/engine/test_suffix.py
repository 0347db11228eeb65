"""Suffix decoding in a real engine: same tokens, and no tenant meets another."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.harness import Texts, add, outputs, walk

pytestmark = pytest.mark.vllm

NUM_TOKENS = 14
Run = Callable[..., dict[str, Any]]


def suffix(num_drafts: int, cached: int = 1000, **settings: Any) -> dict[str, Any]:
    """Return engine arguments for suffix decoding with a small memory."""
    return {
        "speculative_config": {
            "method": "suffix",
            "num_speculative_tokens": num_drafts,
            "suffix_decoding_max_cached_requests": cached,
        },
        "additional_config": {"mrv2_spec": {"corpus_tokens": 4096, **settings}},
    }


@pytest.mark.parametrize(
    ("async_scheduling", "settings"),
    [
        (False, {}),
        (True, {}),
        (True, {"trim": False}),
        (True, {"scoring": "reference"}),
    ],
)
def test_speculation_changes_no_token(
    async_scheduling: bool,
    settings: dict[str, Any],
    rng: random.Random,
    texts: Texts,
    run: Run,
) -> None:
    prompts, expected = texts.draw(
        lambda: walk(rng, rng.randrange(20, 60)), 4, NUM_TOKENS
    )
    # Again after the first have ended: now the memory knows their replies.
    actions = [add(f"r{i}", p, NUM_TOKENS) for i, p in enumerate(prompts)]
    actions.append(["step", 40])
    actions += [add(f"again{i}", p, NUM_TOKENS) for i, p in enumerate(prompts)]
    result = run(
        actions,
        engine={
            **suffix(5, **settings),
            "max_num_seqs": 3,
            "max_num_batched_tokens": 40,
        },
        async_scheduling=async_scheduling,
    )
    assert outputs(result) == [*expected, *expected], f"prompts: {prompts}"
    assert result["counters"]["accepted"] > 0
    (line,) = result["log"]
    assert line.startswith("mrv2-spec: method suffix (SuffixSpeculator, ")
    assert f"async scheduling {'on' if async_scheduling else 'off'}" in line


def test_preemption_abort_and_the_same_id_again(
    rng: random.Random, texts: Texts, run: Run
) -> None:
    prompts, expected = texts.draw(lambda: walk(rng, 60), 4, 40)
    actions: list[list[Any]] = [["add", "x", prompts[0], {"max_tokens": 40}]]
    actions = [add("x", prompts[1], 40), ["step", 4], ["abort", "x"]]
    actions += [add("x" if i == 0 else f"r{i}", p, 40) for i, p in enumerate(prompts)]
    result = run(
        actions,
        # Four requests that grow to 100 tokens in blocks of 32 do not fit.
        engine={
            **suffix(5),
            "num_gpu_blocks_override": 11,
            "enable_prefix_caching": False,
        },
        async_scheduling=True,
    )
    assert outputs(result)[1:] == expected, f"prompts: {prompts}"
    assert result["preemptions"] > 0


def with_salt(prompt: list[int], salt: str) -> dict[str, Any]:
    """Return vLLM's prompt object of a tenant."""
    return {"prompt_token_ids": prompt, "cache_salt": salt}


def first_drafts(result: dict[str, Any], req_id: str) -> list[list[int]]:
    """Return what was drafted for a request, step by step."""
    return [
        e["drafts"] for step in result["records"] for e in step if e["id"] == req_id
    ]


@pytest.mark.parametrize("kind", ["other salt", "same salt", "no reading"])
def test_tenants(kind: str, rng: random.Random, texts: Texts, run: Run) -> None:
    # No token comes twice in prompt and reply, so the own row can draft nothing and
    # each draft is another request's.
    def fits(prompt: list[int], text: list[int]) -> bool:
        return len({prompt[-1], *text[:6]}) == 7

    prompts, expected = texts.draw(lambda: walk(rng, 1), 1, NUM_TOKENS, fits)
    sampling: dict[str, Any] = {}
    if kind == "no reading":
        sampling["extra_args"] = {"mrv2_spec_read": False}
    salt = "b" if kind == "other salt" else "a"

    def job(owner_first: bool) -> dict[str, Any]:
        owner = [
            add("owner", with_salt(prompts[0], "a"), NUM_TOKENS),
            ["step", 40],
        ]
        asker = [add("asker", with_salt(prompts[0], salt), 6, **sampling)]
        return run(
            [*(owner if owner_first else []), *asker],
            engine={**suffix(4), "max_num_seqs": 2, "enable_prefix_caching": False},
            record=True,
        )

    warm, cold = job(True), job(False)
    assert outputs(warm)[-1] == outputs(cold)[-1] == expected[0][:6]
    drafts = first_drafts(warm, "asker")
    if kind == "same salt":
        assert any(drafts), "the memory of the same tenant must help"
    else:
        # As on an engine that never saw the owner.
        assert drafts == first_drafts(cold, "asker")
        assert not any(drafts)


@pytest.mark.parametrize(
    ("kind", "scoring"),
    [("other salt", "learned"), ("other salt", "reference"), ("same salt", "learned")],
)
def test_a_tenant_with_a_memory_of_its_own(
    kind: str, scoring: str, rng: random.Random, texts: Texts, run: Run
) -> None:
    """What the asker drafts from its own requests does not depend on the owner's."""
    length = 24
    prompts, expected = texts.draw(lambda: walk(rng, rng.randrange(4, 12)), 4, length)
    salt = "b" if kind == "other salt" else "a"

    def job(owner_first: bool) -> dict[str, Any]:
        actions: list[list[Any]] = []
        if owner_first:
            for i, prompt in enumerate(prompts[::-1] * 2):
                actions.append(add(f"owner{i}", with_salt(prompt, "a"), length))
            actions.append(["step", 100])
        for time in range(2):
            for i, prompt in enumerate(prompts):
                name = f"asker{time}{i}"
                actions.append(add(name, with_salt(prompt, salt), length))
            actions.append(["step", 60])
        return run(
            actions,
            engine={
                # How many drafts are verified follows what all requests' steps showed.
                **suffix(4, scoring=scoring, trim=False),
                "max_num_seqs": 4,
                "enable_prefix_caching": False,
            },
            record=True,
        )

    def per_request(result: dict[str, Any]) -> dict[str, list[tuple[Any, ...]]]:
        """Return what was known, sampled and drafted, step by step."""
        found: dict[str, list[tuple[Any, ...]]] = {}
        for step in result["records"]:
            for entry in step:
                name = entry["id"]
                if name.startswith("asker"):
                    what = tuple(entry[key] for key in sorted(entry) if key != "id")
                    found.setdefault(name, []).append(what)
        return found

    warm, cold = job(True), job(False)
    assert outputs(warm)[-8:] == outputs(cold)[-8:] == expected * 2
    assert len(per_request(cold)) == 8
    # The second time the asker's own memory helps, in fewer steps.
    steps = {name: len(found) for name, found in per_request(cold).items()}
    first, second = (
        sum(steps[f"asker{time}{i}"] for i in range(4)) for time in range(2)
    )
    assert second < first
    if kind == "other salt":
        assert per_request(warm) == per_request(cold)
        counts = [dict(result["request_counts"]) for result in (warm, cold)]
        assert set(steps) <= set(counts[1])
        for name in steps:
            assert counts[0][name] == counts[1][name]
    else:
        assert per_request(warm) != per_request(cold)
