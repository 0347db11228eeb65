"""Reads results for the report, and refuses what is truncated or cannot be."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRID = "engine_grid.jsonl"
MACHINE = ("gpu", "driver", "torch", "vllm", "commit", "command")
_TEXT = ("arm", "runner", "method", "workload", "run_id", "command")


class ResultError(RuntimeError):
    """A result that must not be reported; one line that names it."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measured point of the engine grid.

    Attributes:
        spread: of ``tpot_ms`` over the point's runs, as a share of their mean.
        turns: TPOT of each run, in order, where the arms of a wave took turns.
        stages: TPOT of each third of a workload that changes its nature.
        asleep: share of steps that scheduled no drafts.
        p99_ms: the TPOT that all but the slowest hundredth of the requests stay below.
        prefill_tok_s: prompt tokens a second until every request had its first token.
        prefill_s: how long that took.
        host_ms: what a fixed piece of Python took the host just before.
        graph_mib: memory that the engine's CUDA graphs hold.
        when: when it was measured; orders runs.
    """

    arm: str
    runner: str
    method: str
    trimmed: bool
    k: int
    c: int
    workload: str
    tpot_ms: float
    spread: float
    turns: tuple[float, ...]
    tok_s: float
    tokens_per_step: float
    coverage: float | None
    drafted: int | None
    accepted: int | None
    run_id: str
    gpu: str | None
    driver: str | None
    torch: str
    vllm: str
    commit: str | None
    command: str
    model: str | None
    stages: tuple[float, ...] | None
    asleep: float | None
    p99_ms: float | None
    prefill_tok_s: float | None
    prefill_s: float | None
    host_ms: float | None
    graph_mib: float | None
    when: str

    @property
    def label(self) -> str:
        """Return the arm as the grid's command line names it."""
        return f"{self.arm}:{self.k}" if self.k else self.arm


def read_json(path: Path) -> dict[str, Any]:
    """Return one benchmark's record.

    Raises:
        ResultError: it is truncated, or lacks what tells where it comes from.
    """
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise ResultError(
            f"{path.name} is no JSON ({error}): truncated? Measure it again"
        ) from error
    if not isinstance(record, dict):
        raise ResultError(f"{path.name} holds no JSON object")
    missing = [name for name in MACHINE if name not in record]
    if missing:
        raise ResultError(f"{path.name} lacks {', '.join(missing)}")
    return record


def read_grid(path: Path) -> list[Point]:
    """Return the points of a grid's record; none if there is no file.

    Raises:
        ResultError: a line is truncated or holds what cannot be; the whole record is
            refused, as nobody knows what else is wrong with it.
    """
    points = []
    for number, line in _lines(path):
        try:
            points.append(_point(line))
        except ValueError as error:
            raise ResultError(f"{path.name}:{number}: {error}") from None
    machines = {(point.gpu, point.model) for point in points}
    if len(machines) > 1:
        names = " and ".join(sorted(f"{model} on {gpu}" for gpu, model in machines))
        raise ResultError(f"{path.name} mixes {names}: keep a record for each")
    return points


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if not path.is_file():
        return
    text = path.read_text()
    lines = text.split("\n")
    if text and lines.pop():
        raise ResultError(
            f"{path.name}:{len(lines) + 1} does not end in a line break: a truncated "
            "record; remove that line, or run the grid again"
        )
    for number, one in enumerate(lines, 1):
        try:
            line = json.loads(one)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            raise ResultError(
                f"{path.name}:{number} is no JSON object: a truncated record; remove "
                "that line, or run the grid again"
            )
        yield number, line


def _point(line: dict[str, Any]) -> Point:
    for name in _TEXT:
        if not isinstance(line.get(name), str) or not line[name]:
            raise ValueError(f"{name} is {line.get(name)!r}, not a text")
    for name in (*MACHINE, "coverage", "drafted", "accepted", "trimmed"):
        if name not in line:
            raise ValueError(f"no {name}")
    if line["runner"] not in ("v1", "v2"):
        raise ValueError(f"runner is {line['runner']!r}, not v1 or v2")
    k = _whole(line, "k", 0)
    if (k == 0) != (line["method"] == "none"):
        raise ValueError(f"method {line['method']} with k={k}")
    drafted, accepted = (
        None if line[name] is None else _whole(line, name, 0)
        for name in ("drafted", "accepted")
    )
    if drafted is not None and accepted is not None and accepted > drafted:
        raise ValueError(f"accepted {accepted} of {drafted} drafted")
    stages = line.get("stage_tpot_ms")
    return Point(
        arm=line["arm"],
        runner=line["runner"],
        method=line["method"],
        trimmed=bool(line["trimmed"]),
        k=k,
        c=_whole(line, "c", 1),
        workload=line["workload"],
        tpot_ms=_number(line, "tpot_ms", 1e-6),
        spread=_number(line, "tpot_spread", 0.0),
        turns=_turns(line),
        tok_s=_number(line, "tok_s", 1e-6),
        # A step brings one token at least, and k accepted ones beside it at most.
        tokens_per_step=_number(line, "tokens_per_step", 1 - 1e-9, k + 1 + 1e-9),
        coverage=None
        if line["coverage"] is None
        else _number(line, "coverage", 0.0, 1 + 1e-9),
        drafted=drafted,
        accepted=accepted,
        run_id=line["run_id"],
        gpu=line["gpu"],
        driver=line["driver"],
        torch=str(line["torch"]),
        vllm=str(line["vllm"]),
        commit=line["commit"],
        command=line["command"],
        model=line.get("model"),
        stages=None if stages is None else tuple(map(float, stages)),
        asleep=_number_if_any(line, "asleep", 0.0, 1.0),
        p99_ms=_number_if_any(line, "tpot_p99_ms", 1e-6),
        prefill_tok_s=_number_if_any(line, "prefill_tok_s", 1e-6),
        prefill_s=_number_if_any(line, "prefill_s", 1e-6),
        host_ms=_number_if_any(line, "host_loop_ms", 1e-6),
        graph_mib=_number_if_any(line, "graph_mib", 0.0),
        when=str(line.get("time", "")),
    )


def _turns(line: dict[str, Any]) -> tuple[float, ...]:
    runs = line.get("tpot_runs_ms")
    if line.get("turns") is None or runs is None or _whole(line, "turns", 1) == 1:
        return ()
    if not isinstance(runs, list) or not runs:
        raise ValueError(f"tpot_runs_ms is {runs!r}, not a list of times")
    times = {f"tpot_runs_ms[{i}]": value for i, value in enumerate(runs)}
    return tuple(_number(times, name, 1e-6) for name in times)


def _whole(line: dict[str, Any], name: str, least: int) -> int:
    value = line.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}, not a whole number from {least}")
    return value


def _number_if_any(
    line: dict[str, Any], name: str, least: float, most: float = math.inf
) -> float | None:
    return None if line.get(name) is None else _number(line, name, least, most)


def _number(
    line: dict[str, Any], name: str, least: float, most: float = math.inf
) -> float:
    value = line.get(name)
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not math.isfinite(value)
        or not least <= value <= most
    ):
        raise ValueError(f"{name} is {value!r}, not from {least:g} to {most:g}")
    return float(value)
