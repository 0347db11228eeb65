"""n-gram drafting: recorded drafts, the plain reference, and what may be written."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrv2_spec.kernels import propose_ngram as kernel
from tests.kernels.ngram_batch import POISON, Batch, random_row

GOLDEN = "ngram_cpu.jsonl.gz"
COMMITTED = Path(__file__).resolve().parents[1] / "data" / "ngram_cpu.jsonl"

# (positions a block, programs that chunks grow towards): as shipped, many chunks of one
# block, few chunks of several blocks.
TILINGS = [(1024, 1024), (16, 1024), (16, 4)]


def check_golden(case: dict[str, Any], device: torch.device) -> None:
    batch = Batch(
        [case["context"]],
        device,
        num_slots=case["k"],
        min_n=case["min_n"],
        max_n=case["max_n"],
        max_model_len=case["max_model_len"],
        slots=[1],
    )
    assert batch.launch() == [case["expected"]], case
    assert batch.expected()[0][0] == case["expected"], case


@pytest.fixture(params=TILINGS, ids=lambda t: f"block{t[0]}-programs{t[1]}")
def tiling(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    block, programs = request.param
    monkeypatch.setattr(kernel, "BLOCK", block)
    monkeypatch.setattr(kernel, "TARGET_PROGRAMS", programs)
    return request.param


def test_committed_cases(device: torch.device, tiling: tuple[int, int]) -> None:
    cases = [json.loads(line) for line in COMMITTED.read_text().splitlines()]
    assert len(cases) >= 40
    for case in cases:
        check_golden(case, device)


def test_sample_of_the_recorded_cases(
    load_golden: Any, device: torch.device, rng: random.Random
) -> None:
    for case in rng.sample(list(load_golden(GOLDEN)), 300):
        check_golden(case, device)


@pytest.mark.slow
def test_all_recorded_cases(load_golden: Any, device: torch.device) -> None:
    cases = list(load_golden(GOLDEN))
    assert len(cases) == 3000
    for case in cases:
        check_golden(case, device)


@pytest.mark.parametrize(
    ("context", "earliest", "latest"),
    [
        # Two copies of `1 2`: what followed the first, what followed the last.
        ([1, 2, 3, 3, 1, 2, 4, 4, 1, 2], [3, 3, 1], [4, 4, 1]),
        # The longer match wins over a shorter one at either end.
        ([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], [3, 6, 1], [3, 6, 1]),
        ([6, 1, 2, 4, 5, 1, 2, 3, 5, 1, 2], [3, 5, 1], [3, 5, 1]),
        # A match may overlap the suffix; the draft ends where the context does.
        ([7, 7, 7, 7], [7], [7]),
        ([1, 2, 1, 2], [1, 2], [1, 2]),
        ([1, 2, 1, 2, 1, 2], [1, 2], [1, 2]),
        # Only a single token repeats, and the shortest match is two.
        ([1, 2, 3, 2], [], []),
        ([1, 2], [], []),
        ([1], [], []),
        ([], [], []),
    ],
)
def test_ties(
    context: list[int],
    earliest: list[int],
    latest: list[int],
    device: torch.device,
    tiling: tuple[int, int],
) -> None:
    for is_latest, want in ((False, earliest), (True, latest)):
        batch = Batch([context], device, num_slots=3, latest=is_latest)
        assert batch.launch() == [want]
        assert batch.expected()[0][0] == want


@pytest.mark.parametrize("latest", [False, True])
def test_random_batches(
    latest: bool, device: torch.device, tiling: tuple[int, int], rng: random.Random
) -> None:
    for _ in range(12):
        num_reqs = rng.randrange(1, 6)
        alphabet = rng.randrange(2, 5)
        min_n = rng.randrange(1, 4)
        longest = rng.choice([8, 40, 90])
        contexts = [
            random_row(rng, rng.randrange(longest + 1), alphabet)
            for _ in range(num_reqs)
        ]
        batch = Batch(
            contexts,
            device,
            num_slots=rng.choice([1, 3, 4, 5, 16]),
            min_n=min_n,
            max_n=min_n + rng.randrange(4),
            max_model_len=rng.choice([longest, longest + 2, 4096]),
            latest=latest,
            placeholder_ids=rng.choice([(), (0,), (0, 3)]),
            slots=rng.sample(range(num_reqs + 6), num_reqs),
            num_sampled=[rng.choice([0, 1, 1, 1, 3]) for _ in range(num_reqs)],
        )
        batch.check()
        batch.check(num_steps=rng.randrange(batch.num_slots + 1))


@given(
    context=st.integers(2, 4).flatmap(
        lambda alphabet: st.lists(st.integers(0, alphabet - 1), max_size=40)
    ),
    lengths=st.tuples(st.integers(1, 4), st.integers(0, 4)),
    num_slots=st.integers(1, 6),
    room=st.integers(0, 8),
    latest=st.booleans(),
)
def test_any_small_row(
    device: torch.device,
    context: list[int],
    lengths: tuple[int, int],
    num_slots: int,
    room: int,
    latest: bool,
) -> None:
    Batch(
        [context],
        device,
        num_slots=num_slots,
        min_n=lengths[0],
        max_n=sum(lengths),
        max_model_len=len(context) + room,
        latest=latest,
    ).check()


@pytest.mark.parametrize("latest", [False, True])
@pytest.mark.parametrize("programs", [1, 2, 1024])
def test_rows_around_block_edges(
    latest: bool,
    programs: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    rng: random.Random,
) -> None:
    monkeypatch.setattr(kernel, "TARGET_PROGRAMS", programs)
    block = kernel.BLOCK
    lengths = [block - 1, block, block + 1, block + 2, 2 * block + 1, 5, 3 * block]
    # A large alphabet with one planted copy: a match missed at an edge shows.
    contexts = []
    for length in lengths:
        row = [rng.randrange(1 << 20) for _ in range(length)]
        at = rng.choice([0, length // 2, max(length - 9, 0), min(block, length) - 4])
        row[at : at + 3] = row[-3:]
        contexts.append(row)
    Batch(contexts, device, latest=latest, slots=[8, 2, 5, 0, 3, 9, 6]).check()


def test_match_straddles_every_chunk_edge(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "BLOCK", 16)
    for at in range(60):
        row = list(range(100, 164))
        row[at : at + 3] = [1, 2, 3]
        Batch([[*row, 1, 2, 3]], device, min_n=3).check()


def test_empty_batch(device: torch.device) -> None:
    assert Batch([], device).launch() == []


@pytest.mark.parametrize("min_n", [1, 2, 5])
def test_shortest_rows(min_n: int, device: torch.device) -> None:
    # The suffix itself is no match: one token more than the shortest match is needed.
    rows = [[7] * length for length in (min_n - 1, min_n, min_n + 1, min_n + 2)]
    batch = Batch(rows, device, min_n=min_n, max_n=min_n + 3)
    assert batch.launch() == [[], [], [7], [7]]
    batch.check()


def test_rows_without_a_sample_draft_nothing(
    device: torch.device, tiling: tuple[int, int]
) -> None:
    rows = [[1, 2, 3] * 20] * 4
    batch = Batch(rows, device, slots=[3, 0, 5, 1], num_sampled=[0, 1, 0, 2])
    assert batch.launch() == [[], [1, 2, 3, 1, 2], [], [1, 2, 3, 1, 2]]


def test_prefilling_row_longer_than_the_grid(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A chunk of a long prompt was computed: the row holds all of the prompt, the grid
    # is sized for what was computed.
    monkeypatch.setattr(kernel, "BLOCK", 16)
    rows = [[1, 2] * 100, [1, 2, 3] * 7]
    batch = Batch(rows, device, num_sampled=[0, 1], max_total_len=33)
    for _ in range(3):
        assert batch.launch() == [[], [1, 2, 3, 1, 2]]
    batch.num_sampled = [1, 1]
    batch.max_total_len = 200
    batch.check()


def test_scratch_serves_many_steps(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    monkeypatch.setattr(kernel, "BLOCK", 16)
    rows = [random_row(rng, 120, 3) for _ in range(3)]
    batch = Batch(rows, device, slots=[4, 1, 2])
    for length in range(40, 120, 7):
        batch.contexts = [row[:length] for row in rows]
        batch.total_len[[4, 1, 2]] = length
        batch.check()


def test_what_follows_the_row_does_not_matter(
    device: torch.device, tiling: tuple[int, int]
) -> None:
    # The slot's former request left a longer row that would match.
    batch = Batch([[65, 66]], device, min_n=1)
    stale = torch.tensor([65, 66, 67, 68] * 2, dtype=torch.int32)
    for tail in (stale[2:8], torch.full((6,), POISON, dtype=torch.int32)):
        batch.rows[0, 2:8] = tail.to(device)
        assert batch.launch() == [[]]


def test_steps_change_from_step_to_step(device: torch.device) -> None:
    batch = Batch([[1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]], device, num_slots=5)
    widths = []
    for num_steps in (5, 2, 0, 5):
        (draft,) = batch.launch(num_steps)
        widths.append(len(draft))
        assert draft == [5, 6, 7, 1, 2][:num_steps]
        # The runner cuts the columns past the step's number in place.
        batch.drafts[:1, num_steps:] = -1
    assert widths == [5, 2, 0, 5]


def test_placeholders_neither_match_nor_are_copied(device: torch.device) -> None:
    image = 9
    run = [image] * 4000
    batch = Batch(
        [
            [*run, 1, 2, 3, *run, 1, 2],
            [*run, 1, 2, 3, *run],
            [1, image, 2, 3, 1, image, 2],
            [4, 5, 6, image, 7, 4, 5],
        ],
        device,
        min_n=1,
        max_n=4,
        max_model_len=10_000,
        placeholder_ids=[image],
    )
    # The third row matches its last token alone: the match stops at the image.
    assert batch.launch() == [[3], [], [3, 1], [6]]
    batch.check()


@pytest.mark.parametrize("room", range(7))
def test_drafts_end_at_the_length_limit(room: int, device: torch.device) -> None:
    row = [1, 2, 3, 4] * 5
    batch = Batch([row], device, num_slots=5, max_model_len=len(row) + room)
    assert batch.launch() == [[1, 2, 3, 4, 1][:room]]


def test_row_past_two_to_the_31_tokens(device: torch.device) -> None:
    stride = (1 << 30) + 64
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 16 * stride:
        pytest.skip("needs 13 GB of free GPU memory")
    try:
        # Untouched pages of it take no memory on the CPU.
        rows = torch.empty(3, stride, dtype=torch.int32, device=device)
    except RuntimeError:
        pytest.skip("needs 13 GB of address space")
    batch = Batch([[1, 2, 3, 1, 2]], device, slots=[2])
    rows[2, : batch.rows.shape[1]] = batch.rows[2]
    batch.rows = rows
    assert batch.launch() == [[3, 1, 2]]
