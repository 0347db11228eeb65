"""What the drafters from token rows have in common."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner")

import torch

from mrv2_spec.draft_values import DraftValues
from mrv2_spec.speculator import RowSpeculator, looks
from mrv2_spec.views import StepInputs

K, SLOTS = 4, 2


class Counting(RowSpeculator):
    """Drafts nothing, and counts how often it was asked to."""

    def __init__(self, device: torch.device) -> None:
        # As much as ``propose`` reads.
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        rows = torch.zeros(SLOTS, 32, **ints)
        self.num_speculative_steps = K
        self.req_states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=rows),
            total_len=SimpleNamespace(gpu=torch.ones(SLOTS, **ints)),
            max_model_len=32,
        )
        self.draft_tokens = torch.zeros(SLOTS, K, dtype=torch.int64, device=device)
        self._draft_tokens_of = [self.draft_tokens[:n] for n in range(SLOTS + 1)]
        self.draft_token_confidence_probs = torch.zeros(SLOTS, K, device=device)
        self.num_valid_drafts_for_trim = torch.zeros(SLOTS, **ints)
        self.draft_values = DraftValues(SLOTS, K, 0, device)
        self._pending = np.zeros(SLOTS, dtype=np.bool_)
        self._idle_steps = 0
        self.asked = 0

    def draft(self, step: StepInputs) -> None:
        self.asked += 1
        self.num_valid_drafts_for_trim[step.idx_mapping] = 1

    def step(self, slots: np.ndarray, places: int) -> None:
        """Ask for so many places, as the runner does."""
        device, ones = self.draft_tokens.device, torch.ones(len(slots)).int()
        batch: Any = SimpleNamespace(
            num_reqs=len(slots),
            seq_lens_cpu_upper_bound=ones,
            idx_mapping=torch.tensor(slots, device=device),
            idx_mapping_np=slots,
        )
        self.propose(
            batch, *[None] * 4, ones.to(device), *[None] * 5,
            num_speculative_tokens=places,
        )  # fmt: skip


def test_what_it_passes_by_it_would_not_have_drafted_in(
    rng: random.Random, device: torch.device
) -> None:
    """One is always asked, the other only in steps that it does not pass by."""
    always, spared = Counting(device), Counting(device)
    passed = looked = 0
    places = K
    for _ in range(400):
        slots = np.array(rng.choice([[0, 1], [1, 0], [0], [1]]))
        # Mostly without places, and soon asleep where there are none.
        if rng.random() < (0.2 if places else 0.04):
            places = K - places
        if rng.random() < 0.2:
            for one in (always, spared):
                one.draft_values.asleep = True
        if rng.random() < 0.05:
            stirring = rng.random() < 0.3
            for one in (always, spared):
                one.draft_values.stirring = stirring
        for one in (always, spared):
            if one is spared and one.passes_by(places, slots):
                passed += 1
                continue
            one.step(slots, places)
        assert spared.asked == always.asked
        assert (spared._pending == always._pending).all()
        # What a slot has pending stays until a step that has the slot.
        for one in (always, spared):
            assert one.num_valid_drafts_for_trim.tolist() == one._pending.tolist()
        assert spared.draft_values.asleep == always.draft_values.asleep
        asleep = places == 0 and spared.draft_values.asleep
        looked += asleep and bool(spared._pending[slots].any())
    # About 134 and 101; of 20000 seeds none passed by fewer than 41, or looked in fewer
    # than 48.
    assert passed > 30 and looked > 30, (passed, looked)
    assert np.array_equal(spared.draft_values.counts, always.draft_values.counts)


def test_the_longer_nobody_asks_the_fewer_steps_look() -> None:
    steps = [step for step in range(1, 1000) if looks(step, stirring=False)]
    assert steps[:5] == [1, 8, 9, 16, 17]
    # Always two in a row: the first one's drafts are judged in the second.
    assert all(step + 1 in steps for step in steps[1:-1:2])
    assert len([step for step in steps if step < 64]) == 1 + 2 * 7
    assert len([step for step in steps if 64 <= step < 192]) == 2 * 8
    assert len([step for step in steps if 192 <= step < 512]) == 2 * 10


def test_good_drafts_are_looked_at_more_often_in_a_quarter_of_the_steps() -> None:
    good = {step for step in range(1024) if looks(step, stirring=True)}
    bad = {step for step in range(1024) if looks(step, stirring=False)}
    assert good > bad
    assert good - bad <= {step for step in range(192, 1024) if step % 64 < 16}
    # A change is seen within a period, and then in a row.
    assert all(set(range(start, start + 16)) <= good for start in range(192, 1024, 64))


def test_asked_again_it_looks_as_often_as_at_first(device: torch.device) -> None:
    one = Counting(device)

    def times_asked(places: int, num_steps: int) -> int:
        before = one.asked
        for _ in range(num_steps):
            one.draft_values.asleep |= places == 0
            one.step(np.array([0, 1]), places)
        return one.asked - before

    assert times_asked(0, 512) == 1 + 2 * 7 + 2 * 8 + 2 * 10 + 1
    assert times_asked(K, 3) == 3
    assert times_asked(0, 16) == 1 + 2 + 1
