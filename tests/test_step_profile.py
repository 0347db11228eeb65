"""The measurement at start: which dummy steps it asks for, what it makes of them."""

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner")

from mrv2_spec.integration import step_profile
from mrv2_spec.integration.step_profile import StepProfile
from mrv2_spec.step_costs import CONTEXT_LEN

GRAPHS = [8, 1, 4]
ROW_MS, CONTEXT_MS, LOGITS_MS = 0.25, 0.5, 0.125


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return whether graphs are wide just now."""
    wide = [False]

    @contextlib.contextmanager
    def no_one_query_graphs(manager: Any) -> Any:
        wide[0] = True
        yield
        wide[0] = False

    monkeypatch.setattr(step_profile, "no_one_query_graphs", no_one_query_graphs)
    monkeypatch.setattr(StepProfile, "_on_first_rank", lambda self, work: work())
    logits = [(1, LOGITS_MS), (32, 32 * LOGITS_MS)]
    monkeypatch.setattr(StepProfile, "_time_logits", lambda self: logits)
    return wide


def make(max_num_reqs: int) -> StepProfile:
    runner = SimpleNamespace(
        cudagraph_manager=None, max_num_reqs=max_num_reqs, max_num_tokens=20
    )
    return StepProfile(runner, 20, None)


def test_drafts_are_charged_rows_and_requests_contexts(wide: list[bool]) -> None:
    made = make(4)
    samples, asked = [], []
    for batch in made.batches(GRAPHS):
        tokens, context = batch["num_tokens"], batch["context_len"]
        assert context in (0, CONTEXT_LEN)
        asked.append((wide[0], tokens, context > 0))
        ms = 3.0 + ROW_MS * tokens
        # As vLLM lays dummy steps out: requests of one token each, as far as they go.
        ms += CONTEXT_MS * min(tokens, 4) * (context > 0)
        # The first run of each size is disturbed.
        ms += 5.0 * (asked.count(asked[-1]) == 1)
        samples.append(SimpleNamespace(forward_ms=ms))
    narrow = {(False, n, context) for n in (1, 4) for context in (True, False)}
    assert set(asked) == narrow | {(True, n, False) for n in (1, 4, 8, 13, 20)}
    costs, sizes = made.costs(samples)
    assert sizes == sorted(GRAPHS)
    requests = np.array([1.0, 4.0])
    row_ms = ROW_MS + LOGITS_MS
    assert costs.plain(requests).tolist() == pytest.approx(
        [3 + n * (row_ms + CONTEXT_MS) for n in (1, 4)]
    )
    assert costs.context(requests).tolist() == pytest.approx(
        [n * CONTEXT_MS for n in (1, 4)]
    )
    tokens = np.array([1.0, 8.0, 13.0, 20.0])
    assert costs.drafting(tokens).tolist() == pytest.approx(
        [3 + n * row_ms for n in (1, 8, 13, 20)]
    )


@pytest.mark.parametrize(
    ("max_num_reqs", "graphs", "narrow"),
    [
        (2, [4, 8], {4: 2}),
        (6, [1, 4, 8], {1: 1, 4: 4, 8: 6}),
        (8, [1, 4, 8], {1: 1, 4: 4, 8: 8}),
        (1, [], {2: 1}),
        (12, [1, 4], {1: 1, 4: 4, 7: 7, 11: 11, 17: 12}),
    ],
)
def test_every_number_of_requests_has_its_graph(
    max_num_reqs: int, graphs: list[int], narrow: dict[int, int], wide: list[bool]
) -> None:
    # As many requests as there may be are padded to the next graph: it is measured
    # with them, and not with more tokens than they have.
    made = make(max_num_reqs)
    asked = [
        (wide[0], batch["num_tokens"], batch["context_len"])
        for batch in made.batches(graphs)
    ]
    plain = {tokens for is_wide, tokens, context in asked if context and not is_wide}
    assert plain == set(narrow.values())
    # A step's cost tells its size.
    samples = [SimpleNamespace(forward_ms=float(tokens)) for _, tokens, _ in asked]
    costs, _ = made.costs(samples)
    assert costs.plain.tokens.tolist() == costs.bare.tokens.tolist() == list(narrow)
    assert costs.plain(np.array([float(max_num_reqs)])) >= max_num_reqs
