"""How many drafts a step verifies."""

from bisect import bisect_left
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mrv2_spec.budget import choose_draft_budget

GRAPHS = [1, 2, 4, 8, 16, 24, 32, 64]


def budget(**changes: Any) -> int:
    defaults: dict[str, Any] = {
        "num_non_draft_tokens": 20,
        "num_scheduled_drafts": 100,
        "num_real_drafts": 0,
        "max_draft_budget": 1000,
        "min_tokens": 16,
        "graph_sizes": (),
    }
    return choose_draft_budget(**{**defaults, **changes})


def test_as_many_as_were_real() -> None:
    assert budget(num_real_drafts=7) == 7


def test_none_were_real() -> None:
    assert budget() == 0
    assert budget(graph_sizes=GRAPHS) == 0


def test_small_steps_verify_freely() -> None:
    assert budget(num_non_draft_tokens=3) == 13
    assert budget(num_non_draft_tokens=3, num_real_drafts=5) == 13
    assert budget(num_non_draft_tokens=3, num_real_drafts=30) == 30
    assert budget(num_non_draft_tokens=3, min_tokens=0) == 0
    assert budget(num_non_draft_tokens=16) == 0


def test_padding_is_used() -> None:
    assert budget(num_real_drafts=2, graph_sizes=GRAPHS) == 4
    assert budget(num_real_drafts=4, graph_sizes=GRAPHS) == 4
    assert budget(num_real_drafts=5, graph_sizes=GRAPHS) == 12
    # Past the largest graph nothing is padded.
    assert budget(num_real_drafts=90, graph_sizes=GRAPHS) == 90


def test_limits() -> None:
    assert budget(num_real_drafts=7, num_scheduled_drafts=5) == 5
    assert budget(num_real_drafts=7, max_draft_budget=3) == 3
    assert budget(num_real_drafts=7, max_draft_budget=0) == 0
    assert budget(num_non_draft_tokens=3, num_scheduled_drafts=0) == 0


counts = st.integers(0, 80)


@given(
    num_non_draft_tokens=counts,
    num_scheduled_drafts=counts,
    num_real_drafts=counts,
    max_draft_budget=counts,
    min_tokens=counts,
    graph_sizes=st.lists(st.integers(1, 99), unique=True).map(sorted),
)
def test_any_numbers(**numbers: Any) -> None:
    chosen = choose_draft_budget(**numbers)
    cap = min(numbers["num_scheduled_drafts"], numbers["max_draft_budget"])
    assert 0 <= chosen <= cap
    if numbers["num_real_drafts"]:
        assert chosen >= min(numbers["num_real_drafts"], cap)
    # Growing is free: the step is padded to the same graph as without it.
    sizes, base = numbers["graph_sizes"], numbers["num_non_draft_tokens"]
    free = base + numbers["num_real_drafts"]
    if sizes and chosen and free >= numbers["min_tokens"]:
        assert bisect_left(sizes, base + chosen) <= bisect_left(sizes, free)
