"""The replay counts what it says, for every drafter and any file of texts."""

import gzip
import importlib.util
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
REPLY = list(range(100, 112))
LOOP = [7, 8, 9] * 40
Text = tuple[list[int], list[int], str]
TWICE: list[Text] = [([1, 2], REPLY, "a"), ([1, 2, *REPLY, 2], REPLY, "b")]


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script."""
    monkeypatch.syspath_prepend(BENCH)
    module = import_module("replay")
    # Not compiled: compiling takes longer than these few tokens do.
    learned = sys.modules["tests.reference.suffix_learned"]
    for name, function in list(vars(learned).items()):
        if hasattr(function, "py_func"):
            monkeypatch.setattr(learned, name, function.py_func)
    return module


def write(path: Path, texts: list[Text]) -> Path:
    """Write a file of recorded replies."""
    lines = "".join(
        json.dumps(
            {"prompt_token_ids": p, "output_token_ids": output, "category": category}
        )
        + "\n"
        for p, output, category in texts
    )
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)
    return path


def record(
    replay: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *options: object
) -> dict[str, Any]:
    """Run the script and return what it saved."""
    command = [str(BENCH / "replay.py"), *map(str, options), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    replay.main()
    found: dict[str, Any] = json.loads((out / "replay.json").read_text())
    return found


def random_texts(rng: Any, num: int, vocab: int = 6) -> list[Text]:
    """Return short texts in which much repeats."""
    return [
        (
            [rng.randrange(vocab) for _ in range(rng.randint(1, 10))],
            [rng.randrange(vocab) for _ in range(rng.randint(2, 20))],
            "x",
        )
        for _ in range(num)
    ]


@pytest.mark.parametrize("tie", ["earliest", "latest"])
def test_counts_of_a_copied_reply(
    replay: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tie: str
) -> None:
    path = write(tmp_path / "twice.jsonl.gz", TWICE)
    found = record(
        replay, monkeypatch, tmp_path, path, "--drafter", f"ngram-{tie}", "--k", 4
    )
    everything, first, second = found["results"]
    assert [r["category"] for r in found["results"]] == ["ALL", "a", "b"]
    assert {(r["file"], r["drafter"]) for r in found["results"]} == {
        ("twice", f"ngram-{tie}")
    }
    keys = ("requests", "steps", "drafting_steps", "tokens", "drafted", "accepted")
    assert [first[key] for key in keys] == [1, 11, 0, 11, 0, 0]
    # "2 100" is found at once: 4 + 1 tokens, then 4 + 1, then the last one.
    assert [second[key] for key in keys] == [1, 3, 3, 11, 9 + 1 + 2, 9]
    assert everything["drafted_at"] == [3, 3, 3, 3]
    assert everything["accepted_at"] == [3, 2, 2, 2]
    assert everything["coverage"] == 3 / 14
    assert everything["tokens_per_step"] == 22 / 14
    assert everything["host_us"] > 0
    assert everything["gpu_us"] is None
    for key in ("gpu", "torch", "vllm", "commit", "command"):
        assert key in found


def test_replies_that_end_in_a_loop_are_left_out_the_second_time(
    replay: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    texts: list[Text] = [([1, 2], REPLY, "a"), ([3, 4], LOOP, "a")]
    path = write(tmp_path / "loop.jsonl", texts)
    found = record(
        replay, monkeypatch, tmp_path, path, "--drafter", "ngram-latest", "--k", 16
    )
    full, shorter = (r for r in found["results"] if r["category"] == "ALL")
    assert (full["loops"], full["requests"]) == (True, 2)
    assert (shorter["loops"], shorter["requests"]) == (False, 1)
    # A draft ends where the text so far does: 3 tokens behind the latest copy.
    assert full["accepted"] > 80
    assert shorter["accepted"] == 0


def test_what_cannot_run_is_named_and_the_rest_runs(
    replay: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    monkeypatch.setitem(sys.modules, "vllm.v1.spec_decode.ngram_proposer", None)
    path = write(tmp_path / "twice.jsonl", TWICE)
    found = record(
        replay, monkeypatch, tmp_path, path, "--device", "cpu", "--k", 4, "--drafter",
        "arctic-global", "vllm-ngram", "suffix-gpu-local", "ngram-latest",
    )  # fmt: skip
    assert set(found["left_out"]) == {"arctic-global", "vllm-ngram", "suffix-gpu-local"}
    assert "arctic-inference does not import" in found["left_out"]["arctic-global"]
    assert "vLLM with numba does not import" in found["left_out"]["vllm-ngram"]
    assert {r["drafter"] for r in found["results"]} == {"ngram-latest"}


@pytest.mark.parametrize("text", ["{", '{"prompt_token_ids": [1]}', "[]"])
def test_a_broken_file_is_refused_with_its_line(
    replay: ModuleType, tmp_path: Path, text: str
) -> None:
    path = write(tmp_path / "broken.jsonl", TWICE)
    path.write_text(path.read_text() + text + "\n")
    with pytest.raises(replay.DataMissing, match=r"broken\.jsonl:3 is no recorded req"):
        replay.load(str(path), 0)
    with pytest.raises(replay.DataMissing, match="no file nowhere"):
        replay.load("nowhere", 0)


def test_files_that_cannot_be_read_are_left_out_and_the_rest_is_saved(
    replay: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = write(tmp_path / "whole.jsonl.gz", TWICE)
    cut = write(tmp_path / "cut.jsonl.gz", TWICE)
    cut.write_bytes(cut.read_bytes()[:-20])
    found = record(
        replay, monkeypatch, tmp_path, cut, whole, "nowhere", "--device", "cpu",
        "--k", 4, "--drafter", "ngram-latest",
    )  # fmt: skip
    assert {r["file"] for r in found["results"]} == {"whole"}
    assert set(found["left_out"]) == {str(cut), "nowhere"}
    printed = capsys.readouterr().out
    assert f"left out {cut}: {cut} is cut short or damaged: " in printed
    assert "left out nowhere: no file nowhere" in printed
    (tmp_path / "replay.json").unlink()
    with pytest.raises(SystemExit, match="no file to replay"):
        record(replay, monkeypatch, tmp_path, cut, "--drafter", "ngram-latest")
    assert not (tmp_path / "replay.json").exists()


def drafts_of(
    replay: ModuleType, drafter: Any, texts: list[Text], in_flight: int, k: int
) -> tuple[list[Any], dict[str, Any]]:
    """Return every draft in order, and the totals."""
    seen: list[Any] = []
    step = drafter.step

    def spy(active: Any) -> Any:
        for slot, draft in step(active):
            seen.append((slot, active[slot].total, list(draft)))
            yield slot, draft

    drafter.step = spy
    requests = [
        replay.Request(np.array([*p, *o]), len(p), len(p) + 1, c) for p, o, c in texts
    ]
    totals, times = replay.replay(requests, drafter, in_flight, k)
    assert len(times) > 0
    return seen, totals


def setup_of(texts: list[Text], in_flight: int, k: int) -> Any:
    width = max(len(p) + len(o) for p, o, _ in texts) + k
    return sys.modules["replay_drafters"].Setup(k, in_flight, width)


@pytest.mark.parametrize("latest", [False, True])
def test_the_ngram_kernel_drafts_what_its_model_does(
    replay: ModuleType, rng: Any, latest: bool
) -> None:
    texts = random_texts(rng, 4)
    drafters = sys.modules["replay_drafters"]
    setup = setup_of(texts, 2, 3)
    model = drafts_of(replay, drafters.NgramModel(setup, latest), texts, 2, 3)
    kernel = drafts_of(replay, drafters.NgramKernel(setup, latest), texts, 2, 3)
    assert model == kernel
    assert model[1]["ALL"].drafted > 0


# The hash wraps around, which numpy reports and compiled code does not.
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("local", [False, True])
def test_suffix_kernels_draft_what_their_model_does(
    replay: ModuleType, rng: Any, local: bool
) -> None:
    texts = random_texts(rng, 3)
    drafters = sys.modules["replay_drafters"]
    setup = setup_of(texts, 2, 3)
    model = drafters.DRAFTERS["suffix-local" if local else "suffix-global"](setup)
    expected = drafts_of(replay, model, texts, 2, 3)
    assert drafts_of(replay, drafters.SuffixKernel(setup, local), texts, 2, 3) == (
        expected
    )
    assert expected[1]["ALL"].drafted > 0


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None
    or importlib.util.find_spec("numba") is None,
    reason="vLLM and numba are not both installed",
)
@pytest.mark.slow
def test_vllm_drafts_what_our_rule_for_the_earliest_copy_does(
    replay: ModuleType, rng: Any
) -> None:
    texts = random_texts(rng, 5)
    drafters = sys.modules["replay_drafters"]
    setup = setup_of(texts, 2, 3)
    ours = drafts_of(replay, drafters.NgramModel(setup, latest=False), texts, 2, 3)
    assert drafts_of(replay, drafters.VllmNgram(setup), texts, 2, 3) == ours


@pytest.mark.parametrize(
    ("package", "name"),
    [("arctic_inference", "Arctic"), ("suffix_gpu", "SuffixGpu")],
)
def test_another_suffix_drafter_reads_the_memory_or_not(
    replay: ModuleType, package: str, name: str
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    reply = list(range(100, 300))
    texts: list[Text] = [([1, 2], reply, "a"), ([3, 4], reply, "b")]
    make = getattr(sys.modules["replay_drafters"], name)
    accepted = {
        local: drafts_of(replay, make(setup_of(texts, 1, 4), local), texts, 1, 4)[1]
        for local in (False, True)
    }
    assert accepted[True]["ALL"].drafted == 0
    assert accepted[False]["a"].accepted == 0
    assert accepted[False]["b"].accepted > 150


def test_the_command_on_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", TWICE)
    done = subprocess.run(
        [
            sys.executable, str(BENCH / "replay.py"), str(path), "--drafter",
            "ngram-latest", "suffix-gpu-global", "--k", "4", "--device", "cpu",
            "--out", str(tmp_path), "--categories",
        ],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "left out suffix-gpu-global: it drafts on a GPU" in done.stdout
    assert (tmp_path / "replay.json").is_file()


def test_drafters_are_made_for_the_device(replay: ModuleType) -> None:
    drafters = sys.modules["replay_drafters"]
    setup = drafters.Setup(4, 1, 64, device=torch.device("cpu"))
    made = drafters.DRAFTERS["ngram-latest"](setup)
    assert isinstance(made, drafters.NgramModel)
    assert made.latest
