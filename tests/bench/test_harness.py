"""What all benchmarks share: a record is written whole or not at all."""

import importlib
import json
import os
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_a_record_that_was_not_written_whole_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    save = importlib.import_module("harness").save
    path = save("some", {"tokens": 1}, tmp_path)
    with pytest.raises(TypeError):
        save("some", {"tokens": object()}, tmp_path)

    def full(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="no space"):
            save("some", {"tokens": 2}, tmp_path)
    assert json.loads(path.read_text()) == {"tokens": 1}
    assert list(tmp_path.iterdir()) == [path]
    again = save("some", {"tokens": 3}, tmp_path)
    assert json.loads(again.read_text()) == {"tokens": 3}
