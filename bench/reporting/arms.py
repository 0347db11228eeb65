"""How arms and workloads are named, ordered and drawn."""

from dataclasses import dataclass

from grid.arms import KINDS

from reporting.compare import Arm, Grid

KS = (5, 16)
OURS = ("ngram", "suffix")
WORKLOADS = {
    "low": "Spec-Bench reference answers",
    "low-smollm2": "SmolLM2's answers",
    "low-smollm2-noloop": "SmolLM2's, without loops",
    "mid": "copies, 1 token in 24 replaced",
    "high": "code edits",
    "agentic": "agent logs, memory warm",
    "agentic-cold": "agent logs, memory cold",
    "shift": "prose, code edits, prose",
}


@dataclass(frozen=True, slots=True)
class Look:
    """How an arm is named and drawn."""

    title: str
    colour: str
    line: str = "-"
    marker: str = "o"


_LOOKS = {
    "v2-oracle": Look("perfect drafts, V2", "#555555", ":", "*"),
    "suffix": Look("mrv2-spec suffix", "#0072b2"),
    "ngram": Look("mrv2-spec n-gram", "#d55e00"),
    "suffix-untrimmed": Look("mrv2-spec suffix, untrimmed", "#0072b2", "--", "s"),
    "ngram-untrimmed": Look("mrv2-spec n-gram, untrimmed", "#d55e00", "--", "s"),
    "v2-intree-ngram": Look("vLLM n-gram, V2", "#e69f00", "-", "^"),
    "v1-ngram-gpu": Look("vLLM ngram_gpu, V1", "#009e73", "-", "v"),
    "v1-suffix": Look("vLLM suffix (arctic), V1", "#cc79a7", "-", "D"),
    "v2-none": Look("no speculation, V2", "#000000"),
    "v1-none": Look("no speculation, V1", "#000000", "--"),
}


def look(name: str) -> Look:
    """Return how an arm is named and drawn."""
    return _LOOKS.get(name, Look(name, "#999999", "-.", "x"))


def in_order(arms: list[Arm]) -> list[Arm]:
    """Return arms in the order of the tables: by drafter, then by k."""
    order = list(_LOOKS)

    def place(arm: Arm) -> tuple[int, str, int]:
        known = order.index(arm.name) if arm.name in order else len(order)
        return known, arm.name, arm.k

    return sorted(arms, key=place)


def workloads_in_order(found: set[str]) -> list[str]:
    """Return workloads in the order of the tables, unknown ones last."""
    return [*filter(found.__contains__, WORKLOADS), *sorted(found - set(WORKLOADS))]


def expected() -> list[Arm]:
    """Return the arms of a whole grid."""
    arms = []
    for name, kind in KINDS.items():
        arms += [Arm(name)] if kind.method == "none" else [Arm(name, k) for k in KS]
    return in_order(arms)


Found = list[tuple[float, Arm, int, str]]


def found_ratios(grid: Grid, arms: list[Arm]) -> Found:
    """Return all ratios of some arms, with arm, requests and workload.

    What was measured once is there once.
    """
    return [
        (ratio.value, arm, c, workload)
        for arm in arms
        for workload in workloads_in_order(grid.workloads)
        for c in grid.concurrencies
        if (ratio := grid.ratio(arm, c, workload)) and not ratio.point.copied
    ]
