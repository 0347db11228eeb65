"""What the drafters from token rows have in common."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner")

import torch

from mrv2_spec.draft_values import DraftValues
from mrv2_spec.speculator import RowSpeculator
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
        self.draft_token_confidence_probs = torch.zeros(SLOTS, K, device=device)
        self.num_valid_drafts_for_trim = torch.zeros(SLOTS, **ints)
        self.draft_values = DraftValues(SLOTS, K, 0, device)
        self._pending = np.zeros(SLOTS, dtype=np.bool_)
        self._idle_steps = 0
        self.asked = 0

    def draft(self, step: StepInputs) -> None:
        self.asked += 1
        self.num_valid_drafts_for_trim[step.idx_mapping] = 1


def batch_of(slots: np.ndarray, device: torch.device) -> Any:
    return SimpleNamespace(
        num_reqs=len(slots),
        seq_lens_cpu_upper_bound=torch.ones(len(slots), dtype=torch.int32),
        idx_mapping=torch.tensor(slots, dtype=torch.int32, device=device),
        idx_mapping_np=slots,
    )


def test_what_it_passes_by_it_would_not_have_drafted_in(
    rng: random.Random, device: torch.device
) -> None:
    """One is always asked, the other only in steps that it does not pass by."""
    always, spared = Counting(device), Counting(device)
    passed = 0
    places = K
    for _ in range(400):
        slots = np.array(rng.choice([[0, 1], [1, 0], [0], [1]]))
        batch = batch_of(slots, device)
        num_sampled = torch.ones(len(slots), dtype=torch.int32, device=device)
        if rng.random() < 0.05:
            places = K - places
        if rng.random() < 0.1:
            asleep = rng.random() < 0.8
            for one in (always, spared):
                one.draft_values.asleep |= asleep
        for one in (always, spared):
            if one is spared and one.passes_by(places, slots):
                passed += 1
                continue
            one.propose(
                batch, *[None] * 4, num_sampled, *[None] * 5,
                num_speculative_tokens=places,
            )  # fmt: skip
        assert spared.asked == always.asked
        assert (spared._pending == always._pending).all()
        # What a slot has pending stays until a step that has the slot.
        for one in (always, spared):
            assert one.num_valid_drafts_for_trim.tolist() == one._pending.tolist()
        assert spared.draft_values.asleep == always.draft_values.asleep
    assert passed > 50
    assert np.array_equal(spared.draft_values.counts, always.draft_values.counts)
