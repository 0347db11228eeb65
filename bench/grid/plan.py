"""Which points a run takes, in which order, and what they are expected to cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from grid.arms import Arm
from grid.workloads import SHIFT, SHIFT_STAGES, WORKLOADS, num_rounds

# Most telling first: what does not fit the time is dropped from the end.
CONCURRENCIES = (1, 64, 256, 16, 4, 128, 192)
ORDER = (
    "low",
    "high",
    "low-smollm2",
    "mid",
    "agentic",
    "low-smollm2-noloop",
    "agentic-cold",
)
# Guesses for time planning alone, until points of the engine were measured: tokens a
# step and prompt tokens, by workload.
_GUESS = {
    "low": (1.3, 320),
    "high": (6.0, 440),
    "low-smollm2": (1.8, 340),
    "low-smollm2-noloop": (1.6, 340),
    "mid": (6.0, 160),
    "agentic": (1.5, 50),
    "agentic-cold": (1.5, 50),
}
_STEP_MS = 5.0
_ROW_MS = 0.023
_PREFILL_TOKEN_MS = 0.03
START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Point:
    """One figure to take of an engine."""

    workload: str
    c: int

    def __str__(self) -> str:
        """Return the point as progress lines name it."""
        return f"{self.workload} c={self.c}"


def parse_points(text: str, names: Sequence[str], most: int) -> list[Point]:
    """Parse ``low:256,high:64``.

    Args:
        text: workloads and requests at a time.
        names: the workloads that there are.
        most: requests at a time at most.

    Raises:
        ValueError: an unknown workload, or a number of requests that is too large.
    """
    points = []
    for part in text.split(","):
        name, _, number = part.strip().partition(":")
        if name not in names:
            known = ", ".join(names)
            raise ValueError(f"unknown workload {name!r}: one of {known}")
        if not (number.isdigit() and 1 <= int(number) <= most):
            raise ValueError(f"point {part!r} must be {name}:C, C from 1 to {most}")
        points.append(Point(name, int(number)))
    return points


def guess_seconds(arm: Arm, point: Point, turns: int = 1, length: int = 0) -> float:
    """Guess what a point takes on the 8B shape, before anything was measured.

    Args:
        arm: whose point it is.
        point: which one.
        turns: of the point.
        length: output tokens of each request; 0: the workload's own.
    """
    if point.workload == SHIFT:
        return sum(
            rounds
            * _run_seconds(arm, Point(name, point.c), length)
            / num_rounds(point.c)
            for name, rounds in SHIFT_STAGES
        )
    # Two runs or three in a row; or one a turn, and at times a cold one beside.
    runs = 2.5 if turns == 1 else turns + 0.5
    return runs * _run_seconds(arm, point, length)


def _run_seconds(arm: Arm, point: Point, length: int) -> float:
    tokens_per_step, prompt = _GUESS[point.workload]
    length = length or WORKLOADS[point.workload][1]
    rows = point.c
    # V1 trims drafts of any method before its forward pass.
    if arm.k and not arm.kind.trimmed and arm.kind.runner != "v1":
        rows *= arm.k + 1
    steps = length / (tokens_per_step if arm.k else 1.0)
    decode = steps * (_STEP_MS + rows * _ROW_MS)
    prefill = point.c * prompt * _PREFILL_TOKEN_MS
    return num_rounds(point.c) * (decode + prefill) / 1000 + 0.3


class Estimator:
    """Corrects the guesses by what each arm's points took.

    Of another shape than the 8B one the first guess is too low: nothing is dropped that
    might have been taken.

    Args:
        turns: of each point.
        length: output tokens of each request; 0: each workload's own.
    """

    def __init__(self, turns: int = 1, length: int = 0) -> None:
        self._turns, self._length = turns, length
        self._taken: dict[Arm, tuple[float, float]] = {}

    def note(self, arm: Arm, point: Point, seconds: float) -> None:
        """Take in what a point took."""
        guessed, taken = self._taken.get(arm, (0.0, 0.0))
        # Later points weigh more: they are larger, as those to come.
        guessed = guessed / 2 + self._guess(arm, point)
        self._taken[arm] = (guessed, taken / 2 + seconds)

    def seconds(self, arm: Arm, point: Point) -> float:
        """Return what a point is expected to take."""
        guessed, taken = self._taken.get(arm, (1.0, 1.0))
        return self._guess(arm, point) * taken / guessed

    def _guess(self, arm: Arm, point: Point) -> float:
        return guess_seconds(arm, point, self._turns, self._length)


def make_waves(arms: list[Arm], at_once: int) -> list[list[Arm]]:
    """Return the arms in groups whose engines are up at the same time."""
    return [arms[i : i + at_once] for i in range(0, len(arms), at_once)]
