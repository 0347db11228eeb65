"""Engines started side by side, and points taken of one engine at a time."""

import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from grid.arms import Arm, parse_arms
from grid.child import Child, EngineFailed
from grid.plan import Point
from grid.shapes import LLAMA_8B, TINY, Shape, write_model
from grid.workloads import DataMissing, make_plan

START_LIMIT_SECONDS = 420.0
# vLLM's caches and the logs, where no other folder is asked for.
WORK = Path(tempfile.gettempdir()) / "mrv2-spec-grid"


def leave_without_gpu(tiny: bool) -> None:
    """End a benchmark that has no GPU here and is not asked for a tiny run."""
    import torch

    if not tiny and not torch.cuda.is_available():
        print("left out everything: no GPU here (--tiny runs on the CPU)")
        raise typer.Exit(0)


def end_when_told() -> None:
    """Let a termination signal unwind the stack, so that engines are ended too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@dataclass(slots=True)
class Waves:
    """Takes the same points of every arm.

    Attributes:
        shape: the model's shape.
        model: its folder.
        work: folder of vLLM's caches and the logs.
        module: what each arm's process runs.
        in_process: whether the engine is in that process.
        kv_gib: the KV cache of each engine.
        length: output tokens of each request; 0: the workload's own.
        deadline: on the monotonic clock.
        more: what each process is told beside its arm.
        failures: what went wrong, one line each.
        point_limit: seconds after which a point without an answer is given up.
    """

    shape: Shape
    model: Path
    work: Path
    module: str
    in_process: bool
    kv_gib: float
    length: int
    deadline: float
    more: dict[str, Any]
    failures: list[str] = field(default_factory=list)
    point_limit: float = float("inf")

    @classmethod
    def within(
        cls,
        seconds: float,
        *,
        shape: Shape,
        work: Path | None,
        model: Path | None = None,
        **others: Any,
    ) -> "Waves":
        """Make waves that end after some seconds, or when the process is told to.

        Args:
            seconds: from now.
            shape: the model's shape.
            work: see the class; None for the usual folder.
            model: see the class; None for dummy weights of the shape.
            others: the other attributes.
        """
        end_when_told()
        work = work or WORK
        return cls(
            shape=shape,
            model=model or write_model(shape, work),
            work=work,
            deadline=time.monotonic() + seconds,
            **others,
        )

    def left(self) -> float:
        """Return the seconds left."""
        return self.deadline - time.monotonic()

    def run(
        self, arms: Sequence[Arm], points: Iterable[Point], at_once: int
    ) -> Iterator[tuple[Arm, Point, dict[str, Any]]]:
        """Yield each point's answer as it comes; arms that fail are given up."""
        points = list(points)
        arms = [arm for arm in arms if any(arm.takes(point.c) for point in points)]
        for at in range(0, len(arms), at_once):
            yield from self._wave(arms[at : at + at_once], points)

    def _wave(
        self, arms: Sequence[Arm], points: Sequence[Point]
    ) -> Iterator[tuple[Arm, Point, dict[str, Any]]]:
        print(f"starting {', '.join(arm.label for arm in arms)}", flush=True)
        logs = self.work / "logs"
        children = {
            arm: Child(
                arm,
                self.shape,
                self.model,
                kv_gib=self.shape.kv_gib(arm.most, self.kv_gib),
                cache=self.work / f"cache-{place}",
                log=logs / f"{self.module}-{arm.label.replace(':', '-k')}.log",
                more=self.more,
                module=self.module,
                in_process=self.in_process,
            )
            for place, arm in enumerate(arms)
        }
        try:
            limit = time.monotonic() + START_LIMIT_SECONDS
            for arm in arms:
                self._start(children, arm, limit)
            for point in points:
                for arm in arms:
                    if arm in children and arm.takes(point.c):
                        answer = self._take(children, arm, point)
                        if answer is not None:
                            yield arm, point, answer
        finally:
            for child in children.values():
                child.stop()

    def _start(self, children: dict[Arm, Child], arm: Arm, limit: float) -> None:
        seconds = min(limit - time.monotonic(), self.left())
        try:
            ready = children[arm].wait_until_ready(max(seconds, 0.0))
        except EngineFailed as error:
            self._give_up(children, arm, f"{arm.label} did not start: {error}")
            return
        described = children[arm].described
        print(f"  {arm.label} is up after {ready:.0f} s: {described}", flush=True)

    def _take(
        self, children: dict[Arm, Child], arm: Arm, point: Point
    ) -> dict[str, Any] | None:
        begun = time.monotonic()
        try:
            answer: dict[str, Any] = children[arm].measure(
                point.workload,
                point.c,
                self.length,
                max(min(self.left(), self.point_limit), 0.0),
            )
            if "mismatch" in answer:
                raise EngineFailed(f"MISMATCH {answer['mismatch']}")
        except EngineFailed as error:
            self._give_up(children, arm, f"{arm.label} {point}: {error}")
            return None
        taken = time.monotonic() - begun
        print(
            f"  {arm.label} {point} took {taken:.1f} s, {self.left():.0f} s left",
            flush=True,
        )
        return answer

    def _give_up(self, children: dict[Arm, Child], arm: Arm, text: str) -> None:
        self.failures.append(text)
        print(f"FAILED {text}", flush=True)
        children.pop(arm).stop()


def of_one_workload(
    seconds: float,
    *,
    arms: str,
    fits: Callable[[Arm], bool],
    lacking: str,
    workload: str,
    tiny: bool,
    length: int,
    **others: Any,
) -> tuple[list[Arm], Waves]:
    """Return the arms of a command line that can run here, and waves for them.

    Args:
        seconds: see :meth:`Waves.within`.
        arms: as the command line names them.
        fits: whether an arm has what is measured.
        lacking: what is said of one that does not fit.
        workload: whose texts must be there.
        tiny: whether a small model runs on the CPU.
        length: output tokens of each request; 0: the workload's own.
        others: other attributes of the waves.

    Raises:
        typer.BadParameter: an arm or workload that cannot be measured.
        typer.Exit: there is no GPU.
    """
    leave_without_gpu(tiny)
    shape = TINY if tiny else LLAMA_8B
    try:
        chosen = parse_arms(arms)
        make_plan(workload, 1, shape.vocab_size, length)
    except (KeyError, ValueError, DataMissing) as error:
        raise typer.BadParameter(str(error)) from error
    unfit = [arm.label for arm in chosen if not fits(arm)]
    if unfit:
        raise typer.BadParameter(f"{', '.join(unfit)}: {lacking}")
    waves = Waves.within(
        seconds, shape=shape, length=length, in_process=False, **others
    )
    return present(chosen, tiny), waves


def present(arms: Iterable[Arm], on_cpu: bool) -> list[Arm]:
    """Return the arms that can run here; name the others."""
    found = []
    for arm in arms:
        why_not = arm.why_not_here(on_cpu)
        if why_not is None:
            found.append(arm)
        else:
            print(f"left out {arm.label}: {why_not}", flush=True)
    return found
