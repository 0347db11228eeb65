"""What was pending in slots that were given up."""

from typing import Any

import pytest
import torch

pytest.importorskip("vllm.v1.worker.gpu.model_runner")

from mrv2_spec.integration.counting import _GivenUp
from mrv2_spec.metrics.step import Ended


class Drafter:
    """Publishes by slot what a drafter does; drafts are pending in some slots."""

    def __init__(self, pending: set[int]) -> None:
        self.pending = pending
        self.num_valid_drafts_for_trim = torch.tensor([4, 3, 2], dtype=torch.int32)
        self.draft_sources = torch.tensor([0, 1, 0], dtype=torch.int32)

    def has_pending_drafts(self, slots: Any) -> bool:
        """Tell whether any of these slots has drafts."""
        return not self.pending.isdisjoint(slots.tolist())


def test_drafts_are_those_of_the_moment_that_the_slots_were_given_up() -> None:
    drafter = Drafter({1, 2})
    given_up = _GivenUp()
    for req_id, slot in (("b", 1), ("a", 0), ("c", 2)):
        given_up.add(req_id, slot, drafter)
    # The slots go to others.
    drafter.num_valid_drafts_for_trim.fill_(9)
    drafter.draft_sources.fill_(1)
    # Nothing was pending in slot 0, whatever it says.
    assert given_up.ended() == [Ended("b", 3, 1), Ended("a", 0, 0), Ended("c", 2, 0)]


def test_a_drafter_that_does_not_tell_what_is_pending() -> None:
    class Silent:
        num_valid_drafts_for_trim = torch.tensor([4, 3, 2], dtype=torch.int32)

    given_up = _GivenUp()
    given_up.add("a", 2, Silent())
    assert given_up.ended() == [Ended("a", 2, 0)]


def test_nothing_is_copied_where_nothing_is_pending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "to", None)
    given_up = _GivenUp()
    given_up.add("a", 0, Drafter({1, 2}))
    # Nor waited for.
    monkeypatch.setattr(torch.cuda, "Event", None)
    given_up.wait()
    assert given_up.ended() == [Ended("a", 0, 0)]
