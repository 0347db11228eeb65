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
def profile(monkeypatch: pytest.MonkeyPatch) -> tuple[StepProfile, list[bool]]:
    """Return a profile of 4 requests at most, and whether graphs are wide by batch."""
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
    runner = SimpleNamespace(cudagraph_manager=None, max_num_reqs=4, max_num_tokens=20)
    return StepProfile(runner, 20, None), wide


def test_drafts_are_charged_rows_and_requests_contexts(
    profile: tuple[StepProfile, list[bool]],
) -> None:
    made, wide = profile
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
