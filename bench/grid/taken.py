"""What was taken of one point of one arm, turn by turn."""

from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from grid.arms import Arm
from grid.measure import IN_FORCE, Run, decode_run, point_figures
from grid.plan import Point
from grid.workloads import SHIFT


@dataclass(slots=True)
class Taken:
    """What was taken of a point so far.

    Attributes:
        arm: whose point it is.
        point: which one.
        graph_mib: what the arm's CUDA graphs hold, if known.
        runs: of all turns, in order.
        stages: the TPOT of each stage of `shift`; None for other points.
        host_ms: what a fixed piece of Python took the host before each turn.
        seconds: what each turn took.
        in_force: what the engine said to be in force in it.
    """

    arm: Arm
    point: Point
    graph_mib: float | None
    runs: list[Run] = field(default_factory=list)
    stages: list[float | None] | None = None
    host_ms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    in_force: dict[str, Any] = field(default_factory=dict)

    @property
    def turns(self) -> int:
        """The turns taken."""
        return len(self.seconds)

    def add(self, answer: dict[str, Any], host_ms: float, seconds: float) -> None:
        """Take in an engine's answer to a turn."""
        self.runs += [decode_run(run) for run in answer["runs"]]
        self.stages = answer["stage_tpot_ms"]
        self.in_force = answer.get("in_force", {})
        self.host_ms.append(host_ms)
        self.seconds.append(seconds)

    def figures(self) -> dict[str, Any]:
        """Return the figures of all turns.

        Raises:
            ValueError: no run, or not every stage, can be timed.
        """
        shift = self.point.workload == SHIFT
        own = self._shift_figures() if shift else point_figures(self.runs)
        return {
            **own,
            "turns": self.turns,
            "host_loop_ms": median(self.host_ms),
            "host_loop_turns_ms": self.host_ms,
            "graph_mib": self.graph_mib,
            **{name: self.in_force.get(name) for name in IN_FORCE},
        }

    def _shift_figures(self) -> dict[str, Any]:
        stages = [value for value in self.stages or [] if value is not None]
        if stages != self.stages:
            raise ValueError(
                "a stage is too short to be timed after its first 200 steps"
            )
        return {
            **point_figures(self.runs, prefill_between=True),
            "tpot_ms": fmean(stages),
            "tpot_runs_ms": [fmean(stages)],
            "tpot_spread": 0.0,
            "tpot_p99_ms": None,
            "stage_tpot_ms": stages,
        }
