"""Starts engines in waves and takes their points, one engine at a time."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from harness import host_loop_ms

from grid import record
from grid.arms import Arm
from grid.child import Child, EngineFailed
from grid.plan import START_SECONDS, Estimator, Point, make_waves
from grid.shapes import Shape, write_model
from grid.taken import Taken
from grid.workloads import SEED, SHIFT

START_LIMIT_SECONDS = 420.0


@dataclass(slots=True)
class Outcome:
    """What became of a run's points."""

    measured: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Settings:
    """What a run is told beside its arms and points."""

    shape: Shape
    path: Path
    logs: Path
    work: Path
    kv_gib: float
    at_once: int
    length: int
    time_limit: float
    run_id: str
    machine: dict[str, Any]
    say: Callable[[str], None]
    progress: Callable[[int, int], None]
    trim_explain: bool = False
    turns: int = 1


class Orchestrator:
    """One run over arms and points.

    Args:
        arms: in order; those of a wave are up together.
        points: in order of importance.
        settings: everything else.
    """

    def __init__(
        self, arms: list[Arm], points: list[Point], settings: Settings
    ) -> None:
        self._waves = make_waves(arms, settings.at_once)
        self._points = points
        self._settings = settings
        self._estimator = Estimator(settings.turns, settings.length)
        self._starts = [START_SECONDS if settings.shape.name != "tiny" else 20.0]
        self._begun = time.monotonic()
        self._total = sum(arm.takes(point.c) for arm in arms for point in points)
        # Arms without time for a point: no later one is taken in its place.
        self._late: set[Arm] = set()
        self._done = {record.key(line): line for line in record.read(settings.path)}
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Take all points that fit the time."""
        for number, wave in enumerate(self._waves):
            self._run_wave(wave, len(self._waves) - number)
        return self.outcome

    def _left(self) -> float:
        return self._settings.time_limit - (time.monotonic() - self._begun)

    def _run_wave(self, wave: list[Arm], waves_left: int) -> None:
        wanted = {
            arm: [p for p in self._points if arm.takes(p.c) and self._wanted(arm, p)]
            for arm in wave
        }
        wave = [arm for arm in wave if wanted[arm]]
        if not wave:
            return
        start = fmean(self._starts)
        share = (self._left() - waves_left * start) / waves_left
        if share <= 0:
            for arm in wave:
                self._drop(arm, wanted[arm], "no time to start its engine")
            return
        children = self._start(wave)
        # What the start took beyond its estimate, the wave has to bear.
        end = time.monotonic() + min(
            share, self._left() - (waves_left - 1) * fmean(self._starts)
        )
        lost: dict[Arm, list[Point]] = {}
        try:
            for point in self._points:
                arms = [arm for arm in wave if point in wanted[arm]]
                here = [a for a in arms if a in children and a not in self._late]
                for arm in (a for a in arms if a not in here):
                    lost.setdefault(arm, []).append(point)
                self._take(children, here, point, end)
            for arm, points in lost.items():
                late = arm in self._late
                why = "no time for one before" if late else "its engine was given up"
                self._drop(arm, points, why)
        finally:
            for child in children.values():
                child.stop()

    def _wanted(self, arm: Arm, point: Point) -> bool:
        key = record.key({**self._identity(arm, point), **self._settings.machine})
        if key not in self._done:
            return True
        self.outcome.skipped.append(f"{arm.label} {point}")
        return False

    def _identity(self, arm: Arm, point: Point) -> dict[str, Any]:
        return {
            "run_id": self._settings.run_id,
            "arm": arm.name,
            "k": arm.k,
            "c": point.c,
            "workload": point.workload,
        }

    def _start(self, wave: list[Arm]) -> dict[Arm, Child]:
        settings = self._settings
        model = write_model(settings.shape, settings.work)
        names = ", ".join(arm.label for arm in wave)
        settings.say(f"starting {names} ({self._left():.0f} s left)")
        begun = time.monotonic()
        children = {
            arm: Child(
                arm,
                settings.shape,
                model,
                kv_gib=settings.shape.kv_gib(arm.most, settings.kv_gib),
                # One after the other may share what was compiled; engines that start
                # side by side may not write the same files.
                cache=settings.work / f"cache-{place}",
                log=settings.logs / f"{arm.label.replace(':', '-k')}.log",
                more={"trim_explain": settings.trim_explain},
            )
            for place, arm in enumerate(wave)
        }
        for arm in wave:
            left = START_LIMIT_SECONDS - (time.monotonic() - begun)
            try:
                seconds = children[arm].wait_until_ready(max(left, 1.0))
            except EngineFailed as error:
                self._fail(children, arm, f"{arm.label} did not start: {error}")
                continue
            described = children[arm].described
            settings.say(f"  {arm.label} is up after {seconds:.0f} s: {described}")
        # Side by side they disturbed each other's measurement of what steps cost.
        for arm in list(children):
            try:
                costs = children[arm].measure_costs(60.0)
            except EngineFailed as error:
                self._fail(children, arm, f"{arm.label} measured no costs: {error}")
                continue
            if costs is not None:
                settings.say(f"  {arm.label}: {costs['words']}")
                self._record_costs(arm, costs)
        self._starts.append(time.monotonic() - begun)
        if len(self._starts) == 2:
            del self._starts[0]  # it was a guess
        return children

    def _take(
        self, children: dict[Arm, Child], arms: list[Arm], point: Point, end: float
    ) -> None:
        """Take a point of some arms, a turn at a time of each that is still in it."""
        in_it = [
            Taken(arm, point, children[arm].described.get("graph_mib"))
            for arm in arms
            if not self._copy_of_agentic(arm, point)
        ]
        turns = 1 if point.workload == SHIFT else self._settings.turns
        for turn in range(turns):
            for taken in list(in_it):
                number = turn if turns > 1 else None
                goes_on = self._turn(children, taken, number, end)
                if not goes_on or taken.turns == turns:
                    in_it.remove(taken)
                    self._finish(taken, turns)

    def _turn(
        self, children: dict[Arm, Child], taken: Taken, turn: int | None, end: float
    ) -> bool:
        """Take a turn of a point; return whether another may follow."""
        arm, point, settings = taken.arm, taken.point, self._settings
        expected = self._estimator.seconds(arm, point)
        needed = taken.seconds[-1] if taken.turns else expected
        left = end - time.monotonic()
        if needed > left:
            why = f"{needed:.0f} s expected, {left:.0f} s left"
            if not taken.turns:
                self._late.add(arm)
                self._drop(arm, [point], why)
            else:
                settings.say(f"{arm.label} {point}: {taken.turns} turns only, {why}")
            return False
        host_ms = host_loop_ms()
        begun = time.monotonic()
        limit = max(30.0, 4 * expected * settings.shape.slowness)
        try:
            answer = children[arm].measure(
                point.workload, point.c, settings.length, limit, turn
            )
        except EngineFailed as error:
            self._fail(children, arm, f"{arm.label} {point}: {error}")
            return False
        if "mismatch" in answer:
            text = f"{arm.label} {point}: {answer['mismatch']}"
            self.outcome.mismatches.append(text)
            settings.say(f"MISMATCH {text}; not recorded, this engine is given up")
            children.pop(arm).stop()
            taken.runs.clear()  # nor are the turns before
            return False
        taken.add(answer, host_ms, time.monotonic() - begun)
        return True

    def _finish(self, taken: Taken, turns: int) -> None:
        """Record what was taken of a point, if anything."""
        if not taken.runs:
            return
        arm, point, settings = taken.arm, taken.point, self._settings
        seconds = sum(taken.seconds)
        if taken.turns == turns:
            self._estimator.note(arm, point, seconds)
        try:
            figures = taken.figures()
        except ValueError as error:
            text = f"{arm.label} {point}: not recorded, {error}"
            self.outcome.failures.append(text)
            settings.say(text)
            return
        self._record(arm, point, figures)
        steps = f"{figures['tokens_per_step']:.2f} tokens a step"
        settings.say(
            f"{arm.label} {point}: TPOT {figures['tpot_ms']:.3f} ms "
            f"(spread {figures['tpot_spread']:.1%}), {steps}, "
            f"{figures['tok_s']:.0f} tok/s; {seconds:.1f} s, {self._left():.0f} s left"
        )
        settings.progress(len(self.outcome.measured), self._total)

    def _copy_of_agentic(self, arm: Arm, point: Point) -> bool:
        """Without a memory there is no warm and no cold: one measurement is both."""
        if point.workload != "agentic-cold" or arm.kind.memory:
            return False
        same = self._identity(arm, Point("agentic", point.c))
        found = self._done.get(record.key({**same, **self._settings.machine}))
        if found is None:
            return False
        line = {**found, "workload": point.workload, "measured_as": "agentic"}
        self._write(arm, point, line)
        return True

    def _record(self, arm: Arm, point: Point, figures: dict[str, Any]) -> None:
        line = {
            **self._identity(arm, point),
            "runner": arm.kind.runner,
            "method": arm.kind.method,
            "trimmed": arm.kind.trimmed,
            **figures,
            "seed": SEED,
            **self._origin(),
        }
        self._write(arm, point, line)

    def _record_costs(self, arm: Arm, costs: dict[str, Any]) -> None:
        line = {
            "run_id": self._settings.run_id,
            "arm": arm.name,
            "k": arm.k,
            "max_graph_tokens": costs["max_graph_tokens"],
            **costs["curves"],
            **self._origin(),
        }
        record.append(self._settings.path.with_name(record.COSTS), line)

    def _origin(self) -> dict[str, Any]:
        """Return of what, when and where a line is."""
        return {
            "model": self._settings.shape.name,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **self._settings.machine,
        }

    def _write(self, arm: Arm, point: Point, line: dict[str, Any]) -> None:
        record.append(self._settings.path, line)
        self._done[record.key(line)] = line
        self.outcome.measured.append(f"{arm.label} {point}")

    def _drop(self, arm: Arm, points: list[Point], why: str) -> None:
        for point in points:
            self.outcome.dropped.append(f"{arm.label} {point}")
        names = ", ".join(map(str, points))
        self._settings.say(f"dropped {arm.label} {names}: {why}")

    def _fail(self, children: dict[Arm, Child], arm: Arm, text: str) -> None:
        self.outcome.failures.append(text)
        self._settings.say(f"FAILED {text}")
        children.pop(arm).stop()
