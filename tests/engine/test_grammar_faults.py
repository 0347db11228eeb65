"""Grammars where something goes wrong: no token changes, and nobody else notices."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.faults import POISON
from tests.engine.harness import add, ids, ngram, outputs

pytestmark = pytest.mark.vllm

Run = Callable[..., dict[str, Any]]

K = 4
CHOICES = ["refused", "renewed", "reduced"]
# What is copied from the prompt starts like a choice and goes on otherwise.
GRAMMARS: dict[str, tuple[dict[str, Any], str]] = {
    "choice": ({"choice": CHOICES}, "refuses reduces renews " * 2),
    "digits": ({"regex": "[0-3]{6}"}, "0109 0119 0029 0139 " * 2),
    # Everything that is copied is allowed.
    "legal": ({"regex": "[a-z]+"}, "abcdefgh" * 3),
    "poison": ({"regex": f"{POISON}[0-9]"}, "poison9 " * 2),
}
# Of these, nothing is handed over for the step at hand.
NOT_HANDED_OVER = ("lost", "empty", "stranger's", "late")


def job(drafter: dict[str, Any], async_scheduling: bool) -> dict[str, Any]:
    return {
        "model": "text",
        "engine": {
            **drafter,
            "skip_tokenizer_init": False,
            "max_model_len": 128,
            "structured_outputs_config": {"backend": "xgrammar"},
        },
        "async_scheduling": async_scheduling,
        "record": bool(drafter),
        "faults": True,
    }


def request(phase: str, kind: str) -> list[Any]:
    if kind == "free":
        return add(f"{phase}/free", ids("abcabcabdabc" * 2), 10)
    grammar, look_alikes = GRAMMARS[kind]
    return add(
        f"{phase}/{kind}",
        ids(look_alikes),
        20,
        structured_outputs=grammar,
        ignore_eos=False,
    )


def phase(name: str, *kinds: str, fault: str | None = None) -> list[list[Any]]:
    """Return actions that run requests to their ends, maybe while a fault is on."""
    requests = [request(name, kind) for kind in kinds]
    return [["fault", fault], *requests, ["finish"]]


def by_name(result: dict[str, Any], actions: list[list[Any]]) -> dict[str, Any]:
    names = [action[1] for action in actions if action[0] in ("add", "refuse")]
    return dict(zip(names, result["requests"], strict=True))


@pytest.fixture(scope="module")
def plain(worker: Any) -> dict[str, list[int]]:
    """Return what each kind of request says without speculation."""
    kinds = ("choice", "digits", "legal", "free")
    actions = phase("plain", *kinds)
    result = worker.run({**job({}, True), "actions": actions})
    assert "error" not in result, result["traceback"]
    return dict(zip(kinds, outputs(result), strict=True))


def num_legal(text: list[int], draft: list[int]) -> int:
    """Return how many leading drafts keep a text the beginning of a choice."""
    choices = [ids(choice) for choice in CHOICES]
    return max(
        n
        for n in range(len(draft) + 1)
        if n == 0 or any(c[: len(text) + n] == text + draft[:n] for c in choices)
    )


def check_widths(
    records: list[dict[str, Any]], counts: dict[str, Any], async_scheduling: bool
) -> None:
    """Check what places one request's drafts got, and how they were booked."""
    text: list[int] = []
    num_illegal = num_saved = 0
    for made, verified in itertools.pairwise(records):
        text += made["emitted"]
        row = made["drafts"] + [text[-1]] * (K - len(made["drafts"]))
        legal = num_legal(text, row)
        num_illegal += max(0, len(made["drafts"]) - legal)
        # In time only where the drafts are known before the step is scheduled.
        assert verified["width"] == (K if async_scheduling else legal)
        num_saved += K - verified["width"]
    assert counts["invalid"] == num_illegal > 0
    assert counts["never_issued"] == 0
    if not async_scheduling:
        assert num_saved >= num_illegal
        assert counts["fillers"] == 0


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_whatever_goes_wrong(
    async_scheduling: bool, plain: dict[str, list[int]], run: Run
) -> None:
    no_counts = ("no counts", "few counts") if async_scheduling else ()
    actions = phase("well", "choice", "free")
    for fault in (*NOT_HANDED_OVER, *no_counts):
        actions += phase(fault, "choice", "legal", "free", fault=fault)
    actions += phase("one mask", "choice", "digits", "free", fault="one mask")
    # Its counts take with them those of whoever ended just before.
    actions += phase("spared", "free")
    actions += phase("no step counts", "choice", "free", fault="no step counts")
    actions += phase("well again", "choice", "free")
    result = run(actions, **job(ngram(K, trim=False), async_scheduling))
    requests = by_name(result, actions)
    counts = dict(result["request_counts"])

    for name, found in requests.items():
        kind = name.rpartition("/")[2]
        if name != "one mask/digits":
            assert found["token_ids"] == plain[kind], name
    # It never saw a mask of its own: what is illegal ends it, and it alone.
    assert requests["one mask/digits"]["finish_reason"] == "error"
    assert counts["one mask/digits"]["accepted"] == 0

    for fault in (*NOT_HANDED_OVER, *no_counts, "one mask"):
        assert result["struck"][fault] > 0
        for kind in ("choice", *["legal"][: fault != "one mask"]):
            unjudged = counts[f"{fault}/{kind}"]
            assert unjudged["proposed"] > 0, fault
            assert unjudged["verified"] == unjudged["accepted"] == 0, fault
        # Nobody else waits for what is handed over where the engine runs ahead.
        if async_scheduling or fault == "one mask":
            assert counts[f"{fault}/free"]["accepted"] > 0, fault
    assert result["struck"]["no step counts"] > 0
    for name in ("well", "well again"):
        assert counts[f"{name}/choice"]["verified"] > 0
    records = [one for step in result["records"] for one in step]
    records = [one for one in records if one["id"] == "well/choice"]
    check_widths(records, counts["well/choice"], async_scheduling)

    assert any("came where" in line for line in result["log"])


def test_no_places_where_nobody_can_be_asked(run: Run) -> None:
    # The two before it leave tokens for the third one's prompt, and then none until
    # they end: when its first drafts are verified, their hand-over is long gone.
    before = {"max_tokens": 12, "ignore_eos": True}
    grammar = {"structured_outputs": {"regex": "[a-z]+"}}
    actions = [
        ["add", "first", ids("abcdefgh" * 3 + "a"), before],
        ["add", "second", ids("abcdefgh" * 3 + "b"), before],
        ["add", "third", ids("bcb"), {**before, **grammar}],
    ]
    few = {"max_num_batched_tokens": 6, "long_prefill_token_threshold": 3}
    plain, drafted = (
        run(actions, **{**one, "engine": {**one["engine"], **few}})
        for one in (job({}, True), job(ngram(K, trim=False), True))
    )
    assert outputs(drafted) == outputs(plain)
    in_steps = [[one["id"] for one in step] for step in drafted["records"]]
    drafting = next(i for i, names in enumerate(in_steps) if "third" in names)
    steps = [one for step in drafted["records"] for one in step if one["id"] == "third"]
    assert len(steps[0]["drafts"]) > 0
    assert "third" not in in_steps[drafting + 1]
    assert steps[1]["width"] == 0
    # Its later steps follow one another.
    assert {step["width"] for step in steps[2:]} == {K}
    counts = dict(drafted["request_counts"])["third"]
    assert counts["invalid"] == 0
    assert counts["accepted"] > 0


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_grammar_that_cannot_be_compiled(
    async_scheduling: bool, plain: dict[str, list[int]], run: Run
) -> None:
    refused = {"regex": "a("}, {"json": {"type": "no such type"}}, {"choice": []}
    prompt = ids(GRAMMARS["choice"][1])
    actions = [
        request("beside", "choice"),
        ["step", 3],
        *(
            ["refuse", str(grammar), prompt, {"structured_outputs": grammar}]
            for grammar in refused
        ),
        request("beside", "poison"),
        request("beside", "free"),
        ["finish"],
        # And where there is nobody else to run.
        *phase("alone", "poison"),
        *phase("after", "choice"),
    ]
    result = run(actions, **job(ngram(K), async_scheduling))
    requests = by_name(result, actions)
    for name in ("beside/choice", "beside/free", "after/choice"):
        assert requests[name]["token_ids"] == plain[name.rpartition("/")[2]], name
    for name in ("beside/poison", "alone/poison"):
        assert requests[name]["finish_reason"] == "error", name
        assert requests[name]["token_ids"] == [], name
    assert all(requests[str(grammar)]["refused"] for grammar in refused)
