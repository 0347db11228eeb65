"""The other drafters that ours is timed beside are driven as their authors mean it."""

import importlib.util
import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCH = Path(__file__).resolve().parent.parent / "bench" / "suffix_rivals.py"
K, DEPTH, LEN = 8, 12, 256


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("suffix_rivals", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up here
    spec.loader.exec_module(module)
    return module


rivals = _load()


def _missing(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is None
    except ModuleNotFoundError:
        return True


needs_arctic = pytest.mark.skipif(
    _missing("arctic_inference.suffix_decoding"),
    reason="arctic-inference is not installed",
)
needs_suffix_gpu = pytest.mark.skipif(
    _missing("suffix_gpu"), reason="suffix-gpu is not installed"
)
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CLASSES = [
    pytest.param(rivals.ArcticRival, {}, marks=needs_arctic, id="arctic"),
    pytest.param(
        rivals.SuffixGpuRival,
        {"device": "cpu", "delta_capacity": 256, "memory_tokens": 4096},
        marks=needs_suffix_gpu,
        id="suffix-gpu",
    ),
]


@pytest.mark.parametrize(
    ("rival", "module"),
    [
        ("ArcticRival", "arctic_inference.suffix_decoding"),
        ("SuffixGpuRival", "suffix_gpu"),
    ],
)
def test_a_missing_package_is_one_clear_line(
    rival: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(rivals.RivalUnavailable, match=r"^\S+ does not import .*$") as e:
        getattr(rivals, rival)([[1, 2]])
    assert "\n" not in str(e.value)


def test_the_newest_documents_that_fit_are_kept() -> None:
    documents = [[1] * 9, [2] * 4, [3] * 4]
    assert rivals.documents_within(documents, 20) == documents
    assert rivals.documents_within(documents, 19) == documents[1:]
    assert rivals.documents_within(documents, 10) == documents[1:]
    assert rivals.documents_within(documents, 9) == documents[2:]
    assert rivals.documents_within(documents, 0) == []


@pytest.mark.parametrize(("rival", "options"), CLASSES)
def test_an_own_repetition_is_drafted(rival, options) -> None:
    period = list(range(10, 22))
    drafter = rival([period * 3, [5]], k=K, depth=DEPTH, max_row_len=LEN, **options)
    first, second = drafter.step([[10, 11], [6]])
    # Some part of the period, in its order; the other row has seen nothing twice.
    assert first and first == (period * 2)[2 : 2 + len(first)]
    assert second == []
    assert drafter.last.host_us > 0
    first, _ = drafter.step([[12, 13, 14], []])
    assert first and first == (period * 2)[5 : 5 + len(first)]


@pytest.mark.parametrize(("rival", "options"), CLASSES)
def test_documents_and_other_responses_are_drafted_but_prompts_are_not(
    rival, options
) -> None:
    rng = random.Random(5)
    texts = [[rng.randrange(100, 10**6) for _ in range(80)] for _ in range(9)]
    documents, prompt, answer = texts[:7], texts[7], texts[8]
    drafter = rival(
        [[1], [2], [3], prompt], documents, k=K, depth=DEPTH, max_row_len=LEN, **options
    )
    for begin in range(0, 80, K):
        reply = [rng.randrange(100, 10**6) for _ in range(K)]
        drafter.step([[], [], answer[begin : begin + K], reply])
    # Each row ends in tokens of a document, an answer elsewhere, a prompt elsewhere.
    of_document, of_answer, _, own = drafter.step(
        [documents[3][20:26], answer[20:26], [], prompt[20:26]]
    )
    assert of_document and of_document == documents[3][26 : 26 + len(of_document)]
    assert of_answer and of_answer == answer[26 : 26 + len(of_answer)]
    assert own and own == prompt[26 : 26 + len(own)]
    drafts = drafter.step([[7], prompt[40:46], [], []])
    assert drafts[:2] == [[], []]


@pytest.mark.parametrize(("rival", "options"), CLASSES)
def test_the_draft_follows_the_majority(rival, options) -> None:
    rng = random.Random(9)
    row: list[int] = []
    for _ in range(40):
        row += [1, 2, 3, rng.choice([4, 4, 4, 5]), rng.randrange(50, 10**6)]
    following = Counter(row[3::5])
    assert following[4] > following[5] > 0
    (draft,) = rival([row], k=K, depth=DEPTH, max_row_len=LEN, **options).step(
        [[1, 2, 3]]
    )
    assert draft[0] == 4


@pytest.mark.parametrize(("rival", "options"), CLASSES)
def test_rows_without_room_are_refused(rival, options) -> None:
    with pytest.raises(ValueError, match="row 1 has 8 tokens: 1 to 7"):
        rival([[1], [1] * 8], max_row_len=8, k=K, depth=DEPTH, **options)
    drafter = rival([[1] * 7], max_row_len=8, k=K, depth=DEPTH, **options)
    with pytest.raises(ValueError, match="row 0 grows beyond 8 tokens"):
        drafter.step([[1, 1]])
    with pytest.raises(ValueError, match="row 0: 10 new tokens, at most k"):
        drafter.step([[1] * 10])


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])


@needs_suffix_gpu
@DEVICES
def test_suffix_gpu_keeps_the_newest_memory_across_rebuilds(device: str) -> None:
    rng = random.Random(3)
    documents = [[rng.randrange(10**6) for _ in range(50)] for _ in range(40)]
    drafter = rivals.SuffixGpuRival(
        [[1], [2]], documents, k=K, depth=DEPTH, max_row_len=64,
        memory_tokens=1024, delta_capacity=256, device=device,
    )  # fmt: skip
    # 20 documents and their separators fit, 5 of them into a delta.
    assert drafter.rebuilds == 4
    assert drafter.index.active_len == 20 * 51
    old, new = drafter.step([documents[19][:9], documents[20][:9]])
    assert old == [] and new == documents[20][9 : 9 + len(new)] and new
    assert drafter.device_bytes()["memory"] == 4 * 1024 * 4 + 256 * 4 + 8


@needs_suffix_gpu
@DEVICES
def test_suffix_gpu_drafts_the_same_in_a_step_as_alone(device: str) -> None:
    rng = random.Random(7)
    documents = [[rng.randrange(9) for _ in range(50)] for _ in range(40)]
    rows = [[rng.randrange(9) for _ in range(90)] for _ in range(4)]
    drafter = rivals.SuffixGpuRival(
        rows, documents, k=K, depth=DEPTH, max_row_len=LEN,
        memory_tokens=2048, delta_capacity=256, ingest_chunk=16, device=device,
    )  # fmt: skip
    before = drafter.rebuilds
    drafted = 0
    for step in range(40):
        new = [[rng.randrange(9) for _ in range(1 + step % 3)] for _ in rows]
        rows = [row + tokens for row, tokens in zip(rows, new, strict=True)]
        # A step ingests after it proposes, so both see the same memory.
        drafter.settle()
        alone, counts = drafter.launch(drafter.place(rows))
        kept = [
            draft[:count]
            for draft, count in zip(alone.tolist(), counts.tolist(), strict=True)
        ]
        assert drafter.step(new) == kept
        drafted += sum(map(bool, kept))
    assert drafter.rebuilds > before
    assert drafted > 20
    if device == "cuda":
        assert drafter.last.propose_gpu_us > 0 and drafter.last.update_gpu_us > 0
        cost = drafter.rebuild_cost()
        assert cost.gpu_us > 0 and cost.peak_bytes > 0
        assert drafter.device_bytes()["graph"] > 0
