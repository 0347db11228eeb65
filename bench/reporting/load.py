"""Reads results for the report, and refuses what is truncated or cannot be."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from grid.record import COSTS as COSTS
from grid.record import NAME as GRID

# Where a result comes from. On a CPU there is no driver, and not all need vLLM.
MACHINE = ("gpu", "driver", "torch", "vllm", "commit", "command")
# When a point was measured that does not say it.
NO_TIME = datetime(1970, 1, 1, tzinfo=UTC)
_NO_TEXT = ("gpu", "driver", "vllm")
_TEXT = ("arm", "runner", "method", "workload", "run_id", "vllm")
# No number of a result is as large.
MOST = 1e12
# What may be below 0: differences.
_SIGNED = {"errors", "added_percent", "rest_ms"}
# What is shown as it is, so must be a number.
_NUMBERS = {
    *("c", "k", "in_flight", "limit", "num_reqs", "row_len", "requests", "steps"),
    *("seed", "rows", "tokens_drafted", "drafted", "accepted"),
}
# What may be unknown.
_MAY_BE_NULL = {
    *("gpu", "driver", "cuda", "triton", "vllm", "counters", "start_up_line"),
    *("recorded", "gpu_us", "in_tree_us", "difference", "max_query_len", "cprofile"),
    *("asleep", "awake_without", "awake_with", "mean_budget", "graph_mib"),
    *("expected_accepted", "clock_drafts", "clock_host", "reckoned_ms", "took_ms"),
    *("busy_ms", "mean_ms", "median_ms", "tpot_p99_ms", "stage_tpot_ms"),
    *("first_different_token", "coverage", "fillers", "proposed"),
}
# What is unknown where an arm that drafts nothing has it.
_OF_DRAFTS = {"drafted", "accepted"}
_KINDS = {str: "a text", bool: "true or false", list: "a list"}
# Of a workload that changes its nature.
_STAGES = 3


class ResultError(RuntimeError):
    """A result that must not be reported; one line that names it."""


class Part(dict[str, Any]):
    """A JSON object of a record, which knows its file.

    Attributes:
        last: the file of which an object was read last.
    """

    last: ClassVar[str] = ""

    def __init__(self, file: str, pairs: Iterable[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self._file = file

    def __getitem__(self, name: str) -> Any:
        Part.last = self._file
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None, /) -> Any:
        """Return a member, or the default."""
        Part.last = self._file
        return super().get(name, default)


@contextmanager
def making(what: str) -> Iterator[None]:
    """Name the file where a record is not what something is made of.

    Raises:
        ResultError: something was missing or of another kind.
    """
    Part.last = GRID
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise ResultError(f"{Part.last}: no {what} can be made of it: {e!r}") from e


Curve = tuple[tuple[float, float], ...]
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Costs:
    """What steps cost, as an engine measured it before its first point.

    Attributes:
        plain: (requests, ms) of steps of one token a request, with a context.
        bare: the same without contexts.
        drafting: (tokens, ms) in graphs that admit drafts, without contexts.
    """

    label: str
    run_id: str
    commit: str
    gpu: str | None
    model: str
    plain: Curve
    bare: Curve
    drafting: Curve


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
        mean_budget: draft places of the steps that verified any.
        expected_accepted: tokens that these steps were expected to accept, the mean.
        fillers: of all draft places that were verified those without a draft.
        reckoned_ms: what steps amid others with drafts should have taken, by the costs
            measured at start.
        took_ms: what these took.
        copied: whether it is what another workload's point measured, which for this arm
            is the same.
        when: when it was measured, ``NO_TIME`` where that is not known; orders runs.
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
    triton: str | None
    vllm: str
    commit: str
    command: str
    model: str | None
    stages: tuple[float, ...] | None
    asleep: float | None
    p99_ms: float | None
    prefill_tok_s: float | None
    prefill_s: float | None
    host_ms: float | None
    graph_mib: float | None
    mean_budget: float | None
    expected_accepted: float | None
    fillers: int | None
    reckoned_ms: float | None
    took_ms: float | None
    copied: bool
    when: datetime

    @property
    def label(self) -> str:
        """Return the arm as the grid's command line names it."""
        return f"{self.arm}:{self.k}" if self.k else self.arm


def read_json(path: Path) -> dict[str, Any]:
    """Return one benchmark's record.

    Raises:
        ResultError: it is truncated, or lacks what tells where it comes from.
    """
    text = _text(path)
    try:
        record = json.loads(
            text, object_pairs_hook=lambda pairs: Part(path.name, pairs)
        )
    except ValueError as error:
        raise ResultError(
            f"{path.name} is no JSON ({error}): truncated? Measure it again"
        ) from error
    if not isinstance(record, Part):
        raise ResultError(f"{path.name} holds no JSON object")
    missing = [name for name in MACHINE if name not in record]
    if missing:
        raise ResultError(f"{path.name} lacks {', '.join(missing)}")
    try:
        _machine(record)
        _possible(record, "", "", {})
    except ValueError as error:
        raise ResultError(f"{path.name}: {error}") from None
    return record


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{path.name} cannot be read: {error}") from error


def _machine(record: dict[str, Any]) -> None:
    """Refuse a record that does not say in words where it comes from.

    Raises:
        ValueError: what it says.
    """
    for name in MACHINE:
        if not (name in _NO_TEXT and record[name] is None):
            _words(record, name)


def _possible(value: Any, at: str, place: str, kinds: dict[str, str]) -> None:
    """Refuse a value of a record that cannot be, and any within it.

    Args:
        value: it.
        at: where it is, for the message.
        place: the same for all that must be of one kind: the members of a list, or of
            an object of like objects.
        kinds: by place.

    Raises:
        ValueError: not a number where others are, not finite, negative, or missing.
    """
    name = place.rpartition("/")[2]
    if value is None and name in _MAY_BE_NULL:
        return
    kind = "an object" if isinstance(value, dict) else "a number"
    kind = "null" if value is None else _KINDS.get(type(value), kind)
    if kind == "null":
        raise ValueError(f"{at} is null")
    wanted = kinds.setdefault(place, "a number" if name in _NUMBERS else kind)
    if kind != wanted:
        raise ValueError(f"{at} is {kind}, not {wanted}")
    if isinstance(value, dict):
        members = [one.keys() for one in value.values() if isinstance(one, dict)]
        alike = len(members) == len(value) and all(m == members[0] for m in members)
        for key, one in value.items():
            if one is None and key in _OF_DRAFTS and value.get("k") == 0:
                continue
            below = f"{at}.{key}" if at else key
            _possible(one, below, f"{place}/{'*' if alike else key}", kinds)
    elif isinstance(value, list):
        for i, one in enumerate(value):
            _possible(one, f"{at}[{i}]", f"{place}[]", kinds)
    elif kind == "a number":
        least = 0.0 if _SIGNED.isdisjoint(place.split("/")) else -MOST
        _number({at: value}, at, least, MOST)


def read_grid(path: Path) -> list[Point]:
    """Return the points of a grid's record; none if there is no file.

    Raises:
        ResultError: a line is truncated or holds what cannot be; the whole record is
            refused, as nobody knows what else is wrong with it.
    """
    points = list(_each(path, _point))
    _same_machine(path, points)
    return points


def _each(path: Path, make: Callable[[dict[str, Any]], Made]) -> Iterator[Made]:
    """Yield what is made of each line of a record; a line that cannot be is named."""
    for number, line in _lines(path):
        try:
            yield make(line)
        except ValueError as error:
            raise ResultError(f"{path.name}:{number}: {error}") from None


def _same_machine(path: Path, lines: Sequence[Point] | Sequence[Costs]) -> None:
    machines = {(line.gpu, line.model) for line in lines}
    if len(machines) > 1:
        names = " and ".join(sorted(f"{model} on {gpu}" for gpu, model in machines))
        raise ResultError(f"{path.name} mixes {names}: keep a record for each")


def read_costs(path: Path) -> list[Costs]:
    """Return what engines measured steps to cost; none if there is no file.

    Of an arm that a resumed run started again, what it measured last.

    Raises:
        ResultError: as of a grid's record.
    """
    found = {}
    for costs in _each(path, _costs):
        machine = costs.gpu, costs.model
        found[machine, costs.run_id, costs.commit, costs.label] = costs
    _same_machine(path, list(found.values()))
    return list(found.values())


def _costs(line: dict[str, Any]) -> Costs:
    _members(line, MACHINE)
    _machine(line)
    for name in ("arm", "run_id", "model"):
        _words(line, name)
    _whole(line, "max_graph_tokens", 0)
    return Costs(
        f"{line['arm']}:{_whole(line, 'k', 1)}",
        line["run_id"],
        line["commit"],
        line["gpu"],
        line["model"],
        **{name: _curve(line, name) for name in ("plain", "bare", "drafting")},
    )


def _curve(line: dict[str, Any], name: str) -> Curve:
    pairs = line.get(name)
    if not isinstance(pairs, list) or not pairs:
        raise ValueError(f"{name} is {pairs!r}, not a list of sizes and times")
    points = []
    for i, pair in enumerate(pairs):
        if not isinstance(pair, list) or len(pair) != len(("tokens", "ms")):
            raise ValueError(f"{name}[{i}] is {pair!r}, not a size and a time")
        values = {f"{name}[{i}][{j}]": value for j, value in enumerate(pair)}
        points.append(tuple(_number(values, one, 1e-6) for one in values))
    if any(a[0] >= b[0] for a, b in pairwise(points)):
        raise ValueError(f"the sizes of {name} do not rise")
    return tuple((tokens, ms) for tokens, ms in points)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if not path.is_file():
        return
    text = _text(path)
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
    _members(line, (*MACHINE, "coverage", "drafted", "accepted", "trimmed"))
    _machine(line)
    for name in _TEXT:
        _words(line, name)
    for name in ("model", "time", "triton"):
        if line.get(name) is not None:
            _words(line, name)
    if not isinstance(line["trimmed"], bool):
        raise ValueError(f"trimmed is {line['trimmed']!r}, not true or false")
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
    stages = None
    if line.get("stage_tpot_ms") is not None:
        stages = _times(line, "stage_tpot_ms")
        if len(stages) != _STAGES:
            raise ValueError(f"stage_tpot_ms has {len(stages)} stages, not {_STAGES}")
    return Point(
        arm=line["arm"],
        runner=line["runner"],
        method=line["method"],
        trimmed=line["trimmed"],
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
        torch=line["torch"],
        triton=line.get("triton"),
        vllm=line["vllm"],
        commit=line["commit"],
        command=line["command"],
        model=line.get("model"),
        stages=stages,
        asleep=_number_if_any(line, "asleep", 0.0, 1.0),
        p99_ms=_number_if_any(line, "tpot_p99_ms", 1e-6),
        prefill_tok_s=_number_if_any(line, "prefill_tok_s", 1e-6),
        prefill_s=_number_if_any(line, "prefill_s", 1e-6),
        host_ms=_number_if_any(line, "host_loop_ms", 1e-6),
        graph_mib=_number_if_any(line, "graph_mib", 0.0),
        mean_budget=_number_if_any(line, "mean_budget", 1.0),
        expected_accepted=_number_if_any(line, "expected_accepted", 0.0),
        fillers=None if line.get("fillers") is None else _whole(line, "fillers", 0),
        reckoned_ms=_number_if_any(line, "reckoned_ms", 1e-6),
        took_ms=_number_if_any(line, "took_ms", 1e-6),
        copied=line.get("measured_as") is not None,
        when=_moment(line),
    )


def _members(line: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if name not in line:
            raise ValueError(f"no {name}")


def _moment(line: dict[str, Any]) -> datetime:
    text = line.get("time")
    if text is None:
        return NO_TIME
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise ValueError(f"time is {text!r}, not as 2026-01-31T23:59:59Z") from None


def _turns(line: dict[str, Any]) -> tuple[float, ...]:
    runs = line.get("tpot_runs_ms")
    if line.get("turns") is None or runs is None or _whole(line, "turns", 1) == 1:
        return ()
    return _times(line, "tpot_runs_ms")


def _times(line: dict[str, Any], name: str) -> tuple[float, ...]:
    runs = line[name]
    if not isinstance(runs, list) or not runs:
        raise ValueError(f"{name} is {runs!r}, not a list of times")
    times = {f"{name}[{i}]": value for i, value in enumerate(runs)}
    return tuple(_number(times, one, 1e-6) for one in times)


def _words(line: dict[str, Any], name: str) -> None:
    if not isinstance(line.get(name), str) or not line[name]:
        raise ValueError(f"{name} is {line.get(name)!r}, not a text")


def _whole(line: dict[str, Any], name: str, least: int) -> int:
    value = line.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}, not a whole number from {least}")
    return value


def _number_if_any(
    line: dict[str, Any], name: str, least: float, most: float = MOST
) -> float | None:
    return None if line.get(name) is None else _number(line, name, least, most)


def _number(line: dict[str, Any], name: str, least: float, most: float = MOST) -> float:
    value = line.get(name)
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not least <= value <= most
    ):
        raise ValueError(f"{name} is {value!r}, not from {least:g} to {most:g}")
    return float(value)
