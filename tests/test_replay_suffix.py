"""The replay counts what it says, and its record carries the figures beside."""

import gzip
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
REPLY = list(range(100, 112))
LOOP = [7, 8, 9] * 40
RECORDED = {
    "steps": 20,
    "tokens": 22,
    "tokens_per_step": 1.1,
    "coverage": 0.1,
    "drafted": 3,
    "accepted": 2,
}


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Return the script, reading recorded replies made here."""
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.setenv("MRV2_SPEC_SHARED", str(tmp_path))
    spec = importlib.util.spec_from_file_location("rs", BENCH / "replay_suffix.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look themselves up here.
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    # Not compiled: compiling takes longer than these few tokens do.
    learned = sys.modules[module.LearnedModel.__module__]
    for name, function in list(vars(learned).items()):
        if hasattr(function, "py_func"):
            monkeypatch.setattr(learned, name, function.py_func)

    (tmp_path / "data").mkdir()
    write(tmp_path, "twice", [([1, 2], REPLY, "a"), ([3, 4], REPLY, "b")])
    write(tmp_path, "loop", [([1, 2], REPLY, "a"), ([3, 4], LOOP, "a")])
    method = {"ALL": RECORDED, "b": {**RECORDED, "tokens_per_step": 2.2}}
    names = [f"arctic {s} factor=2.0 k=16" for s in ("local", "local+global")]
    golden = {
        "settings": {"arctic": {"version": "some version"}},
        "results": {f: dict.fromkeys(names, method) for f in ("twice", "loop")},
    }
    (tmp_path / "golden").mkdir()
    path = tmp_path / "golden" / "replay_tokens_per_step.json"
    path.write_text(json.dumps(golden))
    return module


def write(
    folder: Path, name: str, requests: list[tuple[list[int], list[int], str]]
) -> None:
    """Write a file of recorded replies."""
    with gzip.open(folder / "data" / f"{name}.jsonl.gz", "wt") as file:
        for prompt, output, category in requests:
            found = {
                "prompt_token_ids": prompt,
                "output_token_ids": output,
                "category": category,
            }
            file.write(json.dumps(found) + "\n")


def record(
    replay: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    *options: str,
) -> dict[str, Any]:
    """Run the script and return the record that it saved under this name."""
    script = str(BENCH / "replay_suffix.py")
    out = ["--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [script, *options, *out])
    replay.main()
    assert [p.stem for p in (tmp_path / "out").iterdir()] == [name]
    found: dict[str, Any] = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    return found


def totals(found: dict[str, Any]) -> tuple[Any, ...]:
    keys = ("requests", "steps", "drafting_steps", "tokens", "drafted", "accepted")
    return tuple(found[key] for key in keys)


def test_counts_of_the_reference_scoring(
    replay: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second reply is a copy: 2 drafts after one token, 8 after four."""
    found = record(
        replay, monkeypatch, tmp_path, "replay_suffix_reference_global_k16",
        "--reference", "--files", "twice",
    )  # fmt: skip
    everything, first, second = found["results"]
    assert [r["category"] for r in found["results"]] == ["ALL", "a", "b"]
    assert totals(first) == (1, 11, 0, 11, 0, 0)
    assert totals(second) == (1, 2, 2, 11, 10, 10)
    assert totals(everything) == (2, 13, 2, 22, 10, 10)
    assert everything["tokens_per_step"] == 22 / 13
    assert everything["coverage"] == 2 / 13
    assert everything["recorded"] == RECORDED
    assert first["recorded"] is None
    assert second["recorded"]["tokens_per_step"] == 2.2
    assert found["recorded"] == {
        "version": "some version",
        "method": "arctic local+global factor=2.0 k=16",
        "in_flight": 1,
    }
    settings = [found[key] for key in ("scoring", "scope", "k", "in_flight")]
    assert settings == ["reference", "local+global", 16, 1]
    assert found["command"] == (
        "python bench/replay_suffix.py --reference --files twice"
    )


def test_requests_in_flight_do_not_see_what_is_not_yet_there(
    replay: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = record(
        replay, monkeypatch, tmp_path,
        "replay_suffix_reference_global_k16_2_in_flight",
        "--reference", "--in-flight", "2", "--files", "twice",
    )  # fmt: skip
    # Both replies advance by one token a step: neither ever leads.
    assert totals(found["results"][0]) == (2, 22, 0, 22, 0, 0)


# The hash wraps around, which numpy reports and compiled code does not.
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("scope", ["global", "local"])
def test_the_learned_scoring_finds_a_copy_in_the_memory_alone(
    replay: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scope: str
) -> None:
    options = ["--local"] if scope == "local" else []
    found = record(
        replay, monkeypatch, tmp_path, f"replay_suffix_learned_{scope}_k16",
        "--files", "twice", *options,
    )  # fmt: skip
    everything, first, second = found["results"]
    assert totals(first) == (1, 11, 0, 11, 0, 0)
    if scope == "local":
        assert totals(second) == (1, 11, 0, 11, 0, 0)
    else:
        assert second["steps"] < 11 and second["accepted"] > 0
        assert second["tokens"] == 11
    assert everything["tokens"] == 22


def test_replies_that_end_in_a_loop_are_left_out_the_second_time(
    replay: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = record(
        replay, monkeypatch, tmp_path, "replay_suffix_reference_local_k16",
        "--reference", "--local", "--files", "loop",
    )  # fmt: skip
    full, shorter = (r for r in found["results"] if r["category"] == "ALL")
    assert full["loops"] and full["requests"] == 2
    assert full["recorded"] == RECORDED
    assert not shorter["loops"] and shorter["recorded"] is None
    assert totals(shorter) == (1, 11, 0, 11, 0, 0)
