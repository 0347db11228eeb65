"""Whether a draft came from the own row or the memory: examples by hand."""

from __future__ import annotations

import pytest
import torch

from mrv2_spec.config import Scoring
from mrv2_spec.corpus.namespaces import Namespace
from mrv2_spec.kernels.suffix_state import MEMORY, OWN
from mrv2_spec.suffix_memory import RequestAccess, SuffixMemory, settings_for

SLOTS, K, WIDTH = 4, 4, 64
GUARD = -9
A: Namespace = ("adapter", "salt a", None)
SCORINGS = pytest.mark.parametrize("scoring", ["learned", "reference"])


class Steps:
    """Rows on the CPU; each step is of one request."""

    def __init__(self, scoring: Scoring) -> None:
        settings = settings_for(
            scoring,
            num_speculative_tokens=K,
            max_model_len=WIDTH,
            corpus_tokens=1024,
            max_cached_requests=10,
        )
        self.memory = SuffixMemory(settings, SLOTS, torch.device("cpu"), scoring)
        self.memory.state.draft_sources.fill_(GUARD)
        self.rows = torch.zeros(SLOTS, WIDTH, dtype=torch.int32)
        self.total = torch.zeros(SLOTS, dtype=torch.int32)
        self.prompt = torch.ones(SLOTS, dtype=torch.int32)

    def run(
        self,
        slot: int,
        text: list[int],
        namespace: Namespace | None = None,
        num_sampled: int = 1,
        num_steps: int = K,
    ) -> tuple[list[int], int]:
        """Begin a request with this text; return its draft and where it came from."""
        access = RequestAccess(namespace) if namespace else RequestAccess()
        self.memory.add_request(slot, access)
        self.rows[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        self.total[slot] = len(text)
        sampled = torch.tensor([num_sampled], dtype=torch.int32)
        inputs = (self.rows, torch.tensor([slot]), self.total, self.prompt, sampled)
        drafts = torch.zeros(1, K, dtype=torch.int64)
        num_drafts = torch.zeros(SLOTS, dtype=torch.int32)
        self.memory.update(*inputs)
        self.memory.draft(
            *inputs, drafts, num_drafts, torch.zeros(1, K), num_steps=num_steps
        )
        source = int(self.memory.state.draft_sources[slot])
        return drafts[0, : num_drafts[slot]].tolist(), source


@SCORINGS
def test_only_one_of_them_knows(scoring: Scoring) -> None:
    steps = Steps(scoring)
    steps.run(3, [1, 2, 3, 4, 5, 6, 7, 8])
    drafts, source = steps.run(0, [30, 31, 3, 4, 5])
    assert drafts[0] == 6
    assert source == MEMORY
    drafts, source = steps.run(0, [20, 21, 22, 23, 20, 21, 22])
    assert drafts[0] == 23
    assert source == OWN
    # Other rows are left alone.
    assert steps.memory.state.draft_sources.tolist()[1:3] == [GUARD, GUARD]


@SCORINGS
def test_both_know_the_same(scoring: Scoring) -> None:
    steps = Steps(scoring)
    steps.run(3, [1, 2, 3, 4, 5, 6, 7, 8])
    drafts, source = steps.run(0, [20, 3, 4, 5, 6, 21, 3, 4, 5])
    assert drafts[0] == 6
    assert source == OWN


@SCORINGS
def test_both_know_but_the_memory_knows_better(scoring: Scoring) -> None:
    steps = Steps(scoring)
    steps.run(3, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    # The own row has seen 9 after a single token of them, the memory after eight.
    drafts, source = steps.run(0, [40, 8, 9, 41, 1, 2, 3, 4, 5, 6, 7, 8])
    assert drafts[0] == 9
    assert source == MEMORY


@SCORINGS
def test_they_disagree_and_the_longer_match_wins(scoring: Scoring) -> None:
    steps = Steps(scoring)
    steps.run(3, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    drafts, source = steps.run(0, [40, 8, 50, 41, 1, 2, 3, 4, 5, 6, 7, 8])
    assert (drafts[0], source) == (9, MEMORY)
    # The other way round: the memory has seen 9 after a single 8.
    steps = Steps(scoring)
    steps.run(3, [60, 61, 62, 8, 9, 63])
    text = [1, 2, 3, 4, 5, 6, 7, 8, 50, 51, 52, 53, 1, 2, 3, 4, 5, 6, 7, 8]
    drafts, source = steps.run(0, text)
    assert (drafts[0], source) == (50, OWN)


@SCORINGS
@pytest.mark.parametrize("why", ["not sampled", "no steps", "too short", "tenant"])
def test_nothing_drafted_is_own(scoring: Scoring, why: str) -> None:
    steps = Steps(scoring)
    steps.run(3, [1, 2, 3, 4, 5, 6, 7, 8], namespace=A)
    text, namespace = [1, 2, 3, 4, 5], A
    assert steps.run(0, text, namespace)[1] == MEMORY
    if why == "too short":
        text = [1]
    drafts, source = steps.run(
        0,
        text,
        None if why == "tenant" else namespace,
        num_sampled=int(why != "not sampled"),
        num_steps=0 if why == "no steps" else K,
    )
    assert drafts == []
    assert source == OWN


@SCORINGS
def test_reset_forgets_sources_in_place(scoring: Scoring) -> None:
    steps = Steps(scoring)
    published = steps.memory.state.draft_sources
    steps.run(3, [1, 2, 3, 4, 5, 6, 7, 8])
    assert steps.run(0, [1, 2, 3, 4, 5])[1] == MEMORY
    steps.memory.reset()
    assert published is steps.memory.state.draft_sources
    assert published.tolist() == [OWN] * SLOTS
