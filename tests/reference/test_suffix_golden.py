"""The count model against the recorded streams of the CPU suffix cache.

Every fourth local stream and one step in eight of the global runs by default;
`MRV2_SPEC_GOLDEN=all` checks every step of the file (minutes).
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.reference.golden import golden_path, load_runs, replay
from tests.reference.suffix import Rules, SuffixModel

pytestmark = pytest.mark.skipif(
    not golden_path().exists(), reason="recorded streams not found"
)

ALL = os.environ.get("MRV2_SPEC_GOLDEN") == "all"
GLOBAL_RUNS = (
    "seq_agentic",
    "seq_smollm2",
    "seq_code_edit",
    "inter8_agentic",
    "inter8_batched_agentic",
    "evict16_agentic",
)


@pytest.fixture(scope="module")
def runs():
    return load_runs()


def check(result: Counter[str], record_property) -> None:
    for key, count in result.items():
        record_property(key, count)
    record_property("ambiguous_share", round(result["allowed"] / result["steps"], 4))
    assert result["wrong"] == 0, dict(result)
    assert result["exact"] > 0


def test_own_history(runs, record_property):
    result = Counter[str]()
    for name, run in runs.items():
        if name.startswith("local") and (ALL or run[0]["stream"] % 4 == 0):
            result += replay(run)
    check(result, record_property)


@pytest.mark.parametrize("name", GLOBAL_RUNS)
def test_memory_across_requests(runs, name, record_property):
    check(replay(runs[name], every=1 if ALL else 8), record_property)


def test_one_earlier_occurrence_is_half_sure():
    model = SuffixModel(Rules(max_spec_factor=2.0), max_cached_requests=0)
    model.start(0, [1, 2, 3, 4, 1, 2])
    draft = model.draft(0, [1, 2, 3, 4, 1, 2])
    assert (draft.tokens, draft.match_len) == ((3, 4, 1, 2), 2)
    assert draft.probs == (0.5, 0.5, 0.5, 0.5)


def test_equal_counts_allow_each_order():
    model = SuffixModel(Rules(), max_cached_requests=0)
    model.start(0, [1, 2, 1, 3, 1])
    allowed = model.allowed(0, [1, 2, 1, 3, 1])
    assert {d.tokens for d in allowed} == {(2,), (3,)}


def test_oldest_response_leaves_first():
    model = SuffixModel(Rules(), max_cached_requests=2)
    for request, text in enumerate(([5, 6, 7], [8, 9, 4])):
        model.start(request, [1])
        model.add(request, text)
        model.stop(request)
    model.start(2, [3, 5, 6])
    assert model.draft(2, [3, 5, 6]).tokens == ()
    model.add(2, [8])
    assert model.draft(2, [3, 5, 6, 8]).tokens == (9,)
