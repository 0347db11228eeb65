"""The tables in the documents are made of whole results, or not at all."""

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
OLD = "of an earlier result\n"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Return the script, which reads and writes in ``tmp_path``."""
    monkeypatch.syspath_prepend(ROOT / "bench")
    module = import_module("tables")
    for name in ("engine_grid.jsonl", "trim.json", "scorecard.json"):
        shutil.copyfile(RESULTS / name, tmp_path / name)
    documents = []
    # The first table can be made: it is not written if the second one cannot.
    for name, table in (("a", "scorecard"), ("b", "trim"), ("c", "engine")):
        path = tmp_path / f"{name}.md"
        path.write_text(f"Text.\n<!-- table: {table} -->\n{OLD}<!-- end -->\n")
        documents.append(path)
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "DOCUMENTS", tuple(documents))
    monkeypatch.setattr(sys, "argv", ["tables.py"])
    return module


def change_line(path: Path, **changes: Any) -> None:
    """Change the grid's last line."""
    *before, last = path.read_text().splitlines()
    new = {**json.loads(last), **changes}
    lines = [*before, json.dumps({k: v for k, v in new.items() if v != "gone"})]
    path.write_text("\n".join(lines) + "\n")


def refused(tables: ModuleType, folder: Path) -> str:
    """Return the one line with which it refuses; nothing may be written."""
    with pytest.raises(SystemExit) as raised:
        tables.main()
    # What is printed; the exit code is 1.
    assert isinstance(raised.value.code, str)
    assert all(OLD in path.read_text() for path in tables.DOCUMENTS)
    (text,) = raised.value.code.splitlines()
    return text


def test_all_tables_are_written(tables: ModuleType) -> None:
    tables.main()
    assert not any(OLD in path.read_text() for path in tables.DOCUMENTS)
    assert "NVIDIA H200, driver" in tables.DOCUMENTS[2].read_text()
    assert ", triton 3" in tables.DOCUMENTS[2].read_text()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tpot_ms": float("nan")}, "tpot_ms is nan"),
        ({"tpot_ms": -5}, "tpot_ms is -5"),
        ({"commit": "gone"}, "no commit"),
    ],
)
def test_an_impossible_point_is_refused(
    tables: ModuleType, tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    change_line(tmp_path / "engine_grid.jsonl", **changes)
    text = refused(tables, tmp_path)
    assert text.startswith("refused: engine_grid.jsonl:")
    assert why in text


@pytest.mark.parametrize("name", ["engine_grid.jsonl", "trim.json", "scorecard.json"])
def test_a_cut_file_is_refused(tables: ModuleType, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(path.read_text()[:-30])
    assert refused(tables, tmp_path).startswith(f"refused: {name}")


@pytest.mark.parametrize("name", ["engine_grid.jsonl", "trim.json"])
def test_a_file_that_is_not_there_or_empty_is_refused(
    tables: ModuleType, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("")
    assert refused(tables, tmp_path).startswith(f"refused: {name}")
    (tmp_path / name).unlink()
    assert refused(tables, tmp_path).startswith(f"refused: {name}")


def test_a_record_that_lacks_what_its_table_shows_is_refused(
    tables: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "trim.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "cases": []}))
    assert refused(tables, tmp_path).startswith("refused: trim.json: no table trim")
    del record["commit"]
    path.write_text(json.dumps(record))
    assert refused(tables, tmp_path) == "refused: trim.json lacks commit"


def test_a_scrape_that_is_cut_short_is_refused(
    tables: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "scorecard.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "samples": record["samples"][:3]}))
    assert refused(tables, tmp_path).startswith("refused: scorecard.json: the scrape")
