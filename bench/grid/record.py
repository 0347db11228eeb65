"""The grid's records: one JSON object a line, each written whole."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = "engine_grid.jsonl"
# What steps cost, as each trimmed engine measured it before its first point.
COSTS = "engine_costs.jsonl"
Key = tuple[str, str, int, int, str, str | None]


def append(path: Path, line: dict[str, Any]) -> None:
    """Append a line in one write, so that a killed run leaves whole lines only.

    A last line that was left without its end is ended first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(line).encode() + b"\n"
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            data = b"\n" + data
        if os.write(file, data) != len(data):
            raise OSError(f"{path}: the line was not written whole")
        os.fsync(file)
    finally:
        os.close(file)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a record; none if there is no file.

    Raises:
        ValueError: a line that is no JSON object.
    """
    if not path.is_file():
        return
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise ValueError(f"{path}:{number} is no JSON object: a truncated record?")
        yield line


def key(line: dict[str, Any]) -> Key:
    """Return what tells a point apart from all others."""
    return (
        line["run_id"],
        line["arm"],
        line["k"],
        line["c"],
        line["workload"],
        line["commit"],
    )
