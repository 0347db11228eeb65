"""Learning from drafts: the plain reference, over random runs of random requests."""

import random
from collections.abc import Sequence

import pytest
import torch

from mrv2_spec.draft_values import DraftValues
from mrv2_spec.kernels.value_drafts import (
    NUM_BINS,
    TALLY_WIDTH,
    DraftValuesRef,
    bin_edges,
)

SLOTS = 6
CLASSES = 3
MODEL_LEN = 400
# Products of these are exact, and no edge of a bin but the powers of two is one.
CHANCES = (0.0, 0.25, 0.5, 0.75, 1.0)


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
        self.reference = DraftValuesRef(num_slots)
        self.rows = torch.full((SLOTS, MODEL_LEN), -7, dtype=torch.int32, device=device)
        self.texts: dict[int, list[int]] = {}
        self.drafts: dict[int, list[int]] = {}
        self.num_drafts = torch.full((SLOTS,), 99, dtype=torch.int32, device=device)

    def step(self, hold: bool, *, odd: bool = False) -> None:
        rng = self.rng
        slots = rng.sample(range(SLOTS), rng.randint(1, SLOTS))
        num_sampled = []
        total_len = torch.zeros(SLOTS, dtype=torch.int32, device=self.device)
        for slot in slots:
            if slot not in self.texts or rng.random() < 0.05:
                self.texts[slot] = [rng.randrange(3) for _ in range(rng.randint(1, 9))]
                # Inside a prefill nothing is sampled.
                num_sampled.append(rng.randint(0, 1))
            else:
                draft = self.drafts.get(slot, [])
                right = rng.randint(0, len(draft))
                last = [rng.randrange(3)]
                if rng.random() < 0.5 and right < len(draft):
                    last = [draft[right]]
                self.texts[slot] += draft[:right] + last
                num_sampled.append(right + 1)
            text = torch.tensor(self.texts[slot], dtype=torch.int32)
            self.rows[slot, : len(text)] = text
            total_len[slot] = len(text)
        drafts, chances, classes = [], [], []
        for slot in slots:
            draft = [rng.randrange(3) for _ in range(rng.randint(0, self.num_slots))]
            self.drafts[slot] = draft
            drafts.append(draft)
            chances.append([rng.choice(CHANCES) for _ in range(self.num_slots)])
            classes.append(rng.randrange(CLASSES))
        counted = [len(draft) for draft in drafts]
        if odd:
            chances[0][0] = float("nan")
            chances[-1][-1] = 7.0
            counted[0] = -3
            drafts[0] = []
            self.drafts[slots[0]] = []
        self._launch(
            slots, num_sampled, total_len, drafts, counted, chances, classes, hold
        )
        self.reference.hold = hold
        for i, slot in enumerate(slots):
            if num_sampled[i] == 0:
                self.drafts[slot] = []
            self.reference.step(
                slot,
                self.texts[slot],
                num_sampled[i],
                drafts[i],
                chances[i],
                classes[i],
            )

    def _launch(
        self,
        slots: Sequence[int],
        num_sampled: Sequence[int],
        total_len: torch.Tensor,
        drafts: Sequence[Sequence[int]],
        counted: Sequence[int],
        chances: Sequence[Sequence[float]],
        classes: Sequence[int],
        hold: bool,
    ) -> None:
        ints = {"dtype": torch.int32, "device": self.device}
        padded = [[*d, *[-1] * (self.num_slots - len(d))] for d in drafts]
        idx_mapping = torch.tensor(slots, device=self.device)
        self.num_drafts[idx_mapping] = torch.tensor(counted, **ints)
        if self.values.classes is not None:
            self.values.classes[idx_mapping] = torch.tensor(classes, **ints)
        self.values.unverified = hold
        self.values.update(
            self.rows,
            idx_mapping,
            total_len,
            torch.tensor(num_sampled, **ints),
            torch.tensor(padded, dtype=torch.int64, device=self.device),
            self.num_drafts,
            torch.tensor(chances, dtype=torch.float32, device=self.device),
        )

    def check(self) -> None:
        if self.values.counts is not None:
            decided, came_true = self.values.counts.tolist()
            want = self.reference.counts
            for draft_class in range(CLASSES):
                for k in range(self.num_slots):
                    expected = want.get((draft_class, k), [0, 0])
                    assert [
                        decided[draft_class][k],
                        came_true[draft_class][k],
                    ] == expected
        assert self.values.tally.tolist() == self.reference.tallies


@pytest.mark.parametrize("num_slots", [1, 5, 16])
@pytest.mark.parametrize("num_classes", [0, CLASSES])
def test_follows_the_reference(
    num_slots: int, num_classes: int, device: torch.device, rng: random.Random
) -> None:
    run = Run(device, rng, num_slots, num_classes)
    for step in range(15):
        run.reference.tallies = [[0] * TALLY_WIDTH for _ in range(2)]
        run.step(hold=rng.random() < 0.5, odd=step % 5 == 4)
        run.check()
    if num_slots > 1:
        assert any(came_true for _, came_true in run.reference.counts.values())


def test_confidences_go_to_the_slots_bounded(device: torch.device) -> None:
    values = DraftValues(4, 3, 0, device)
    ints = {"dtype": torch.int32, "device": device}
    values.update(
        torch.zeros(4, 8, **ints),
        torch.tensor([2, 0], device=device),
        torch.tensor([3, 0, 5, 0], **ints),
        torch.tensor([1, 1], **ints),
        torch.zeros(2, 3, dtype=torch.int64, device=device),
        torch.tensor([3, 9, 2, 9], **ints),
        torch.tensor([[0.5, 0.25, 0.9], [float("nan"), 2.0, -1.0]], device=device),
    )
    assert values.confidences.tolist() == [[0, 1, 0], [0] * 3, [0.5, 0.25, 0], [0] * 3]


def test_a_draft_counts_though_it_was_not_verified(device: torch.device) -> None:
    # Asleep: one token a step, and each of them decides one place of the draft held.
    values = DraftValues(1, 3, 1, device)
    values.unverified = True
    ints = {"dtype": torch.int32, "device": device}
    row = torch.zeros(1, 32, **ints)
    for length, token in enumerate([5, 6, 7, 8, 5, 5], start=1):
        row[0, length - 1] = token
        values.update(
            row,
            torch.tensor([0], device=device),
            torch.tensor([length], **ints),
            torch.tensor([1], **ints),
            # After 5 it drafts 6 7 8; what is drafted meanwhile is not held.
            torch.tensor([[token + 1, token + 2, token + 3]], device=device),
            torch.tensor([3], **ints),
            torch.full((1, 3), 0.5, device=device),
        )
    assert values.counts is not None
    # 6, 7 and 8 came; then 9 was drafted and 5 came; then 6 and 5 came.
    assert values.counts.tolist() == [[[3, 1, 1]], [[1, 1, 1]]]


def test_counts_fade(device: torch.device) -> None:
    values = DraftValues(1, 2, 2, device)
    assert values.counts is not None
    values.counts[0] = torch.tensor([[600, 512], [4000, 0]])
    values.counts[1] = torch.tensor([[601 - 600, 512], [3000, 0]])
    ints = {"dtype": torch.int32, "device": device}
    for _ in range(16):
        values.update(
            torch.zeros(1, 8, **ints),
            torch.tensor([0], device=device),
            torch.tensor([1], **ints),
            torch.tensor([0], **ints),
            torch.zeros(1, 2, dtype=torch.int64, device=device),
            torch.tensor([0], **ints),
            torch.zeros(1, 2, device=device),
        )
    assert values.counts.tolist() == [
        [[300, 512], [2000, 0]],
        [[0, 512], [1500, 0]],
    ]


def test_bins_are_quarters_of_octaves() -> None:
    edges = bin_edges()
    assert len(edges) == NUM_BINS - 1
    assert edges[3] == 0.5 and edges[7] == 0.25
