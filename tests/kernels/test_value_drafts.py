"""Learning from drafts: the plain reference, over random runs of random requests."""

import random
from typing import Any

import pytest
import torch

from mrv2_spec.draft_values import DraftValues
from mrv2_spec.kernels.value_drafts import (
    NUM_BINS,
    NUM_CONFIDENCES,
    TOKENS,
    DraftValuesRef,
    bin_edges,
    confidence_edges,
)

SLOTS = 6
CLASSES = 3
MODEL_LEN = 400


class Run:
    """Requests that come, go on and leave slots; drafts that are sometimes right."""

    def __init__(
        self,
        device: torch.device,
        rng: random.Random,
        num_slots: int,
        num_classes: int = CLASSES,
    ) -> None:
        self.device = device
        self.rng = rng
        self.num_slots = num_slots
        self.values = DraftValues(SLOTS, num_slots, num_classes, device)
        self.reference = DraftValuesRef(num_slots, num_classes > 0)
        self.rows = torch.full((SLOTS, MODEL_LEN), -7, dtype=torch.int32, device=device)
        self.texts: dict[int, list[int]] = {}
        self.drafts: dict[int, list[int]] = {}

    def emit(self, slot: int) -> int:
        """Let a request's text grow by what a step emits; return by how much."""
        rng = self.rng
        if slot not in self.texts or rng.random() < 0.05:
            self.texts[slot] = [rng.randrange(3) for _ in range(rng.randint(1, 9))]
            # Inside a prefill nothing is sampled.
            return rng.randint(0, 1)
        draft = self.drafts.get(slot, [])
        right = rng.randint(0, len(draft))
        last = rng.randrange(3)
        if rng.random() < 0.5 and right < len(draft):
            last = draft[right]
        self.texts[slot] += [*draft[:right], last]
        return right + 1

    def step(self, *, odd: bool = False) -> None:
        """Run one step of a random batch on both sides and compare all that came."""
        rng = self.rng
        slots = rng.sample(range(SLOTS), rng.randint(1, SLOTS))
        num_sampled = [self.emit(slot) for slot in slots]
        drafts = [
            [rng.randrange(3) for _ in range(rng.randint(0, self.num_slots))]
            for _ in slots
        ]
        given = [[rng.random() for _ in range(self.num_slots)] for _ in slots]
        classes = [rng.randrange(CLASSES) for _ in slots]
        counted = [len(draft) for draft in drafts]
        if odd:
            given[0][0] = float("nan")
            given[-1][-1] = 7.0
            given[-1][0] = -1.0
            counted[0], drafts[0] = -3, []
            if len(drafts[-1]) == self.num_slots:
                counted[-1] = self.num_slots + 9
        confidences = self._launch(slots, num_sampled, drafts, counted, given, classes)
        self.reference.begin_step()
        for i, slot in enumerate(slots):
            self.drafts[slot] = drafts[i] if num_sampled[i] else []
            want = self.reference.take(
                slot,
                self.texts[slot],
                num_sampled[i],
                drafts[i],
                given[i],
                classes[i],
                counted[i],
            )
            padded = torch.tensor(want + [0.0] * (self.num_slots - len(want)))
            torch.testing.assert_close(confidences[i].cpu(), padded)
            assert torch.equal(self.values.confidences[slot], confidences[i])
        self.check()

    def _launch(
        self,
        slots: list[int],
        num_sampled: list[int],
        drafts: list[list[int]],
        counted: list[int],
        given: list[list[float]],
        classes: list[int],
    ) -> torch.Tensor:
        ints: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        idx_mapping = torch.tensor(slots, device=self.device)
        total_len = torch.full((SLOTS,), 77, **ints)
        num_drafts = torch.full((SLOTS,), 99, **ints)
        num_drafts[idx_mapping] = torch.tensor(counted, **ints)
        for slot in slots:
            text = torch.tensor(self.texts[slot], **ints)
            self.rows[slot, : len(text)] = text
            total_len[slot] = len(text)
        if self.values.classes is not None:
            self.values.classes[idx_mapping] = torch.tensor(classes, **ints)
        padded = [[*d, *[-1] * (self.num_slots - len(d))] for d in drafts]
        confidences = torch.tensor(given, dtype=torch.float32, device=self.device)
        self.values.update(
            self.rows,
            idx_mapping,
            total_len,
            torch.tensor(num_sampled, **ints),
            torch.tensor(padded, dtype=torch.int64, device=self.device),
            num_drafts,
            confidences,
        )
        return confidences

    def check(self) -> None:
        decided, came_true = self.values.counts.tolist()
        for cell in range(len(decided)):
            want = self.reference.counts.get(cell, [0, 0])
            assert [decided[cell], came_true[cell]] == want
        tally = self.values.tally.tolist()
        assert tally[NUM_BINS:] == self.reference.tally[NUM_BINS:]
        assert sum(tally[:NUM_BINS]) == sum(self.reference.tally[:NUM_BINS])
        # A value at an edge may fall to either side of it.
        moved = sum(
            abs(a - b) for a, b in zip(tally, self.reference.tally, strict=True)
        )
        assert moved <= 2


@pytest.mark.parametrize("num_slots", [1, 5, 16])
@pytest.mark.parametrize("num_classes", [0, CLASSES])
def test_follows_the_reference(
    num_slots: int, num_classes: int, device: torch.device, rng: random.Random
) -> None:
    run = Run(device, rng, num_slots, num_classes)
    # All tables of counts come round several times.
    for step in range(20):
        run.step(odd=step % 5 == 4)
    if num_slots > 1:
        assert any(came_true for _, came_true in run.reference.counts.values())


def one_step(values: DraftValues, text: list[int], draft: list[int]) -> list[float]:
    """Let the one request there is emit its last token, and draft."""
    device = values.confidences.device
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    given = torch.full((1, len(draft)), 0.5, device=device)
    values.update(
        torch.tensor([text], **ints),
        torch.tensor([0], device=device),
        torch.tensor([len(text)], **ints),
        torch.tensor([1], **ints),
        torch.tensor([draft], device=device),
        torch.tensor([len(draft)], **ints),
        given,
    )
    return given[0].tolist()


def test_drafts_count_though_none_was_verified(device: torch.device) -> None:
    # One token a step: it decides the first place of the draft made before.
    values = DraftValues(1, 2, 1, device)
    text = [5]
    for token in [6, 7, 3, 4]:
        one_step(values, text, [text[-1] + 1, 9])
        text = [*text, token]
    one_step(values, text, [0, 0])
    assert values.counts.tolist() == [[4, 0], [3, 0]]
    # What was learned is known from the next step on, beside what the drafter says.
    assert one_step(values, [*text, 8], [0, 0]) == pytest.approx([5 / 8, 0.5])


def test_another_requests_draft_is_not_booked(device: torch.device) -> None:
    values = DraftValues(1, 2, 1, device)
    one_step(values, [1, 2, 3], [4, 5])
    # A new request in the slot, with a prompt of another length.
    one_step(values, [1, 2, 3, 9, 4], [0, 0])
    assert not values.counts.any()


def test_counts_fade(device: torch.device) -> None:
    values = DraftValues(1, 2, 2, device)
    # What the first step takes for all that came before.
    values.sums[1, 0] = torch.tensor([1100, 1024, 4000, 0])
    values.sums[1, 1] = torch.tensor([1, 1024, 3000, 0])
    for step in range(16):
        # Every step begins another request: nothing is booked.
        one_step(values, [0] * (1 + 2 * step), [0, 0])
    faded = [[550, 1024, 2000, 0], [0, 1024, 1500, 0]]
    assert values.counts.tolist() == faded
    # Once, though what is halved is read and written on in further steps.
    for step in range(16, 31):
        one_step(values, [0] * (1 + 2 * step), [0, 0])
        assert values.counts.tolist() == faded
    one_step(values, [0] * 64, [0, 0])
    assert values.counts.tolist() == [[550, 1024, 1000, 0], [0, 1024, 750, 0]]


def test_a_step_of_nobody_changes_nothing(device: torch.device) -> None:
    values = DraftValues(1, 2, 1, device)
    one_step(values, [1], [2, 3])
    one_step(values, [1, 2], [3, 4])
    counts, tally = values.counts.tolist(), values.tally.tolist()
    nobody = torch.zeros(0, dtype=torch.int64, device=device)
    values.update(
        torch.zeros(1, 4, dtype=torch.int32, device=device),
        nobody,
        torch.zeros(1, dtype=torch.int32, device=device),
        nobody.to(torch.int32),
        torch.zeros(1, 2, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.zeros(1, 2, device=device),
    )
    assert values.counts.tolist() == counts and values.tally.tolist() == tally
    one_step(values, [1, 2, 3], [0, 0])
    assert values.counts.tolist() == [[2, 0], [2, 0]]


def test_reset_forgets(device: torch.device) -> None:
    values = DraftValues(1, 2, 1, device)
    one_step(values, [1], [2, 3])
    one_step(values, [1, 2], [3, 4])
    assert values.counts.any() and values.tally[TOKENS] == 1
    values.reset()
    assert not values.counts.any() and not values.tally.any()
    one_step(values, [1, 2, 3], [0, 0])
    assert not values.counts.any()


def test_edges() -> None:
    lower = bin_edges()
    assert len(lower) == NUM_BINS - 1 and lower[3] == 0.5 and lower[7] == 0.25
    between = confidence_edges()
    assert len(between) == NUM_CONFIDENCES - 1 and between == sorted(between)
    assert between[0] < 0.03 and between[-1] > 0.997
