"""The kernels of n-gram drafting and trimming, compiled and on a GPU."""

import os
import random
import sys
from collections.abc import Iterator

import pytest
import torch

from mrv2_spec.kernels.count_drafts import count_drafts, count_drafts_ref
from mrv2_spec.kernels.fill_draft_budget import (
    fill_draft_budget,
    fill_draft_budget_ref,
)
from mrv2_spec.kernels.propose_ngram import (
    BLOCK,
    NUM_CLASSES,
    match_class_ref,
    propose_ngram,
    propose_ngram_ref,
)
from mrv2_spec.lagged_counts import LaggedCounts
from mrv2_spec.trimmer import VariableDraftTrimmer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

POISON = 0x7FFFFFFF


@pytest.fixture
def seed() -> Iterator[int]:
    """A fresh seed, shown when the test fails."""
    value = int.from_bytes(os.urandom(4), "little")
    yield value
    sys.stderr.write(f"seed {value}\n")


@pytest.fixture
def no_sync() -> Iterator[None]:
    """Any wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


class Batch:
    """Random rows over a small alphabet, in permuted slots, and the outputs."""

    def __init__(self, rng: random.Random, max_num_reqs: int, width: int, k: int):
        self.k = k
        self.num_reqs = rng.randint(1, max_num_reqs)
        self.slots = rng.sample(range(max_num_reqs), self.num_reqs)
        self.lens = [rng.randint(1, width) for _ in range(max_num_reqs)]
        self.sampled = [rng.choice([0, 1, 1, 1, 3]) for _ in range(self.num_reqs)]
        alphabet = rng.choice([2, 3, 4, 1000])
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        self.rows = torch.randint(
            alphabet, (max_num_reqs, width), dtype=torch.int32, generator=generator
        )
        padded = self.rows.clone()
        for slot, total_len in enumerate(self.lens):
            padded[slot, total_len:] = POISON
        self.token_ids = padded.cuda()
        self.idx_mapping = torch.tensor(self.slots).cuda()
        self.total_len = torch.tensor(self.lens, dtype=torch.int32).cuda()
        self.num_sampled = torch.tensor(self.sampled, dtype=torch.int32).cuda()
        self.drafts = torch.full((max_num_reqs, k), -7).cuda()
        self.num_drafts = torch.full((max_num_reqs,), -7, dtype=torch.int32).cuda()
        self.confidences = torch.full((max_num_reqs, k), -7.0).cuda()
        self.best = torch.zeros(max_num_reqs, dtype=torch.int64).cuda()
        self.arrivals = torch.zeros(max_num_reqs, dtype=torch.int32).cuda()
        self.no_placeholders = torch.empty(0, dtype=torch.int32).cuda()
        self.prior = torch.rand(NUM_CLASSES, k).clamp(0.01, 0.99).cuda()
        self.classes = torch.full((max_num_reqs,), -7, dtype=torch.int32).cuda()

    def propose(self, *, min_n: int, max_n: int, latest: bool, limit: int) -> None:
        propose_ngram(
            self.token_ids,
            self.idx_mapping,
            self.total_len,
            self.num_sampled,
            self.no_placeholders,
            self.prior,
            self.best,
            self.arrivals,
            self.drafts,
            self.num_drafts,
            self.confidences,
            self.classes,
            max_total_len=max(self.lens),
            max_model_len=limit,
            num_steps=self.k,
            min_n=min_n,
            max_n=max_n,
            latest=latest,
        )

    def expected(
        self, i: int, *, min_n: int, max_n: int, latest: bool, limit: int
    ) -> tuple[list[int], int]:
        """Return the draft and the class of its match."""
        if self.sampled[i] == 0:
            return [], 0
        slot = self.slots[i]
        context = self.rows[slot, : self.lens[slot]].tolist()
        draft, n = propose_ngram_ref(
            context,
            num_steps=self.k,
            min_n=min_n,
            max_n=max_n,
            max_model_len=limit,
            latest=latest,
        )
        if n == 0:
            return draft, 0
        tail = context[-n:]
        ends = [e for e in range(n, len(context)) if context[e - n : e] == tail]
        return draft, match_class_ref(context, ends[-1] if latest else ends[0])


@pytest.mark.parametrize("latest", [False, True])
@pytest.mark.parametrize("width", [37, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
def test_propose_ngram_equals_the_reference(
    seed: int, width: int, latest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    # Small enough that long rows are split between programs.
    monkeypatch.setattr("mrv2_spec.kernels.propose_ngram.TARGET_PROGRAMS", 10**6)
    for _ in range(6):
        batch = Batch(rng, max_num_reqs=24, width=width, k=rng.choice([1, 5, 16]))
        min_n = rng.randint(1, 3)
        rule = {
            "min_n": min_n,
            "max_n": rng.randint(min_n, 8),
            "latest": latest,
            "limit": rng.choice([width, width + 3, width + 100]),
        }
        for _ in range(2):  # the scratch must be clean for the second launch
            batch.propose(**rule)
        for i, slot in enumerate(batch.slots):
            expected, found = batch.expected(i, **rule)
            assert batch.classes[slot] == found
            assert batch.drafts[i, : batch.num_drafts[slot]].tolist() == expected
            last = int(batch.token_ids[slot, batch.lens[slot] - 1])
            rest = batch.drafts[i, len(expected) :].tolist()
            assert rest == [last] * (batch.k - len(expected))
            confidences = torch.zeros(batch.k).cuda()
            confidences[: len(expected)] = batch.prior[found, : len(expected)]
            assert torch.equal(batch.confidences[i], confidences)
        assert not batch.best.any()
        assert not batch.arrivals.any()


def test_propose_ngram_replays_in_a_graph_with_changed_rows(seed: int) -> None:
    rng = random.Random(seed)
    rule = {"min_n": 1, "max_n": 4, "latest": False, "limit": 5000}
    batch = Batch(rng, max_num_reqs=16, width=3 * BLOCK, k=8)
    batch.propose(**rule)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.propose(**rule)
    for slot, total_len in enumerate(batch.lens):
        batch.rows[slot] = batch.rows[slot].flip(0)
        batch.token_ids[slot, :total_len] = batch.rows[slot, :total_len].cuda()
    graph.replay()
    for i, slot in enumerate(batch.slots):
        got = batch.drafts[i, : batch.num_drafts[slot]].tolist()
        assert got == batch.expected(i, **rule)[0]


def test_rows_past_two_to_the_31_tokens() -> None:
    width, max_num_reqs = 2**20, 2**11 + 8
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * width * max_num_reqs * 4 // 2:
        pytest.skip("needs 13 GB of free GPU memory")
    batch = Batch(random.Random(1), max_num_reqs=1, width=8, k=4)
    batch.token_ids = torch.zeros(max_num_reqs, width, dtype=torch.int32).cuda()
    slot = max_num_reqs - 1
    batch.token_ids[slot, :6] = torch.tensor([5, 6, 7, 8, 5, 6]).cuda()
    batch.idx_mapping = torch.tensor([slot]).cuda()
    batch.total_len = torch.full((max_num_reqs,), 6, dtype=torch.int32).cuda()
    batch.num_sampled = torch.ones(1, dtype=torch.int32).cuda()
    batch.num_drafts = torch.zeros(max_num_reqs, dtype=torch.int32).cuda()
    batch.classes = torch.zeros_like(batch.num_drafts)
    batch.lens = [6]
    batch.propose(min_n=2, max_n=4, latest=False, limit=width)
    assert batch.num_drafts[slot] == 4
    assert batch.drafts[0].tolist() == [7, 8, 5, 6]


@pytest.mark.parametrize("max_num_reqs", [1, 63, 65, 256, 1024])
def test_fill_draft_budget_equals_the_reference(seed: int, max_num_reqs: int) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        num_reqs, k = rng.randint(1, max_num_reqs), rng.choice([1, 5, 16, 24])
        slots = rng.sample(range(max_num_reqs), num_reqs)
        valid = [rng.randint(-1, k + 1) for _ in range(max_num_reqs)]
        drafts = [rng.randint(0, k) for _ in range(num_reqs)]
        scheduled = [d + rng.choice([1, 7]) for d in drafts]
        # Multiples of 1/8 multiply and round alike on every device.
        confidences = [
            [rng.choice([0.0, 0.125, 0.5, 0.875, 1.0, float("nan")]) for _ in range(k)]
            for _ in range(max_num_reqs)
        ]
        budget = rng.randint(0, sum(drafts))
        cu_num_logits = torch.full((max_num_reqs + 1,), -7, dtype=torch.int32).cuda()
        query_start_loc = torch.full_like(cu_num_logits, -7)
        fill_draft_budget(
            torch.tensor(slots).cuda(),
            torch.tensor(valid, dtype=torch.int32).cuda(),
            torch.tensor(drafts, dtype=torch.int32).cuda(),
            torch.tensor(scheduled, dtype=torch.int32).cuda(),
            torch.tensor(confidences).cuda(),
            cu_num_logits,
            query_start_loc,
            draft_budget=budget,
            num_bonus_tokens=1,
        )
        widths = (cu_num_logits[1 : num_reqs + 1] - cu_num_logits[:num_reqs] - 1).cpu()
        tokens = query_start_loc.diff().cpu().tolist()
        assert int(widths.sum()) == budget
        assert tokens[:num_reqs] == [
            s - d + w
            for s, d, w in zip(scheduled, drafts, widths.tolist(), strict=True)
        ]
        assert tokens[num_reqs:] == [0] * (max_num_reqs - num_reqs)
        expected = fill_draft_budget_ref(
            slots, valid, drafts, confidences, draft_budget=budget
        )
        # A square root on the edge between two levels may round to either.
        off = sum(abs(a - b) for a, b in zip(widths.tolist(), expected, strict=True))
        assert off <= 2 + num_reqs // 50


def test_trimming_and_counting_never_wait_for_the_device(no_sync: None) -> None:
    device = torch.device("cuda")
    valid = torch.tensor([0, 9, 3, 9, 1], dtype=torch.int32, pin_memory=True)
    valid = valid.to(device, non_blocking=True)
    query_start_loc = torch.empty(6, dtype=torch.int32, device=device)
    trimmer = VariableDraftTrimmer(
        valid, query_start_loc, max_num_reqs=5, max_total_logits=100, device=device
    )
    idx_mapping = torch.tensor([4, 2, 0], pin_memory=True).to(device, non_blocking=True)
    drafts = torch.tensor([2, 2, 0], dtype=torch.int32).numpy()
    scheduled = torch.tensor([3, 3, 7], dtype=torch.int32).numpy()
    trimmed = [t.clone() for t in trimmer.trim(idx_mapping, drafts, scheduled)]
    confidences = torch.full((5, 2), 0.5, device=device)
    filled = [
        t.clone() for t in trimmer.fill(idx_mapping, drafts, scheduled, confidences, 4)
    ]
    lagged = LaggedCounts(valid, lag=3)
    for _ in range(8):
        lagged.read()
        lagged.publish(valid)
    counts = count_drafts(idx_mapping, trimmed[0], valid, valid % 2)
    torch.cuda.set_sync_debug_mode("default")
    # The example of the interface's description.
    assert trimmed[0].tolist() == [0, 2, 5, 6]
    assert trimmed[1].tolist() == [0, 2, 5, 12, 12, 12]
    assert counts.tolist() == [[1, 2, 0], [1, 3, 0], [1, 1, 0]]
    assert filled[0].tolist() == [0, 3, 6, 7]
    assert filled[1].tolist() == [0, 3, 6, 13, 13, 13]
    landed = lagged.read()
    assert landed is not None and landed.tolist() == [0, 9, 3, 9, 1]


def test_count_drafts_equals_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    max_num_reqs = 700
    for _ in range(5):
        num_reqs = rng.randint(1, max_num_reqs)
        slots = rng.sample(range(max_num_reqs), num_reqs)
        widths = [rng.randint(0, 16) for _ in range(num_reqs)]
        proposed = [rng.randint(0, 16) for _ in range(max_num_reqs)]
        sources = [rng.randint(0, 1) for _ in range(max_num_reqs)]
        cu_num_logits = torch.tensor([0] + [w + 1 for w in widths]).cumsum(0)

        def device(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32).cuda()

        counts = count_drafts(
            torch.tensor(slots).cuda(), cu_num_logits.to(torch.int32).cuda(),
            device(proposed), device(sources),
        )  # fmt: skip
        assert counts.tolist() == count_drafts_ref(slots, widths, proposed, sources)
