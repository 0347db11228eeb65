"""The report's section on both runners, beside figures that others published."""

import json
import tomllib
from pathlib import Path
from typing import Any

from reporting.arms import KS
from reporting.compare import Arm, Grid
from reporting.markdown import NOTHING, percent, table

HERE = Path(__file__).resolve().parent
RANGES = {"c=1 to 16": (1, 4, 16), "c=64 to 256": (64, 128, 192, 256)}
# V2 arms against the V1 arm of the same method.
PAIRS = (
    ("v2-intree-ngram", "v1-ngram-gpu"),
    ("ngram-untrimmed", "v1-ngram-gpu"),
    ("suffix-untrimmed", "v1-suffix"),
    ("ngram", "v1-ngram-gpu"),
    ("suffix", "v1-suffix"),
)
# Texts of a model, and of its references: what the published figures ran is like one.
WORKLOADS = ("low-smollm2", "low")


def published() -> dict[str, Any]:
    """Return the figures of the proposal."""
    figures: dict[str, Any] = json.loads((HERE / "published.json").read_text())
    return figures


def notes() -> dict[str, dict[str, str]]:
    """Return the hand-written sentences."""
    return tomllib.loads((HERE / "notes.toml").read_text())


class Notes:
    """Hand-written sentences by table and row; remembers which are not written.

    Args:
        sentences: by table and row.
    """

    def __init__(self, sentences: dict[str, dict[str, str]]) -> None:
        self._sentences = sentences
        self.unwritten: list[str] = []

    def __call__(self, table_name: str, row: str) -> str:
        """Return the sentence of a row."""
        text = self._sentences.get(table_name, {}).get(row, "")
        if not text:
            self.unwritten.append(f"{table_name}: {row}")
        return text or "no sentence yet"


def _range(grid: Grid, v2: Arm, v1: Arm, places: tuple[int, ...], workload: str) -> str:
    changes = []
    for c in places:
        pair = grid.together((v2, v1), c, workload)
        if pair:
            changes.append(pair[0].tok_s / pair[1].tok_s - 1)
    if not changes:
        return NOTHING
    low, high = percent(min(changes)), percent(max(changes))
    return low if low == high else f"{low} to {high}"


def v2_against_v1(grid: Grid, note: Notes) -> str:
    """Output tok/s of V2 against V1 of the same method, beside the published change."""
    theirs = published()["v2_against_v1"]
    rows = []
    for workload in WORKLOADS:
        for name, places in RANGES.items():
            change = _range(grid, Arm("v2-none"), Arm("v1-none"), places, workload)
            rows.append((name, workload, theirs["none"][name], change))
    parts = [
        table(("no speculation", "workload", "published", "here"), rows),
        f"No speculation: {note('v2_against_v1', 'no speculation')}",
        _by_method(grid, theirs),
    ]
    for k in KS:
        for name in RANGES:
            row = f"k={k}, {name}"
            parts.append(f"{row}: {note('v2_against_v1', row)}")
    return "\n\n".join(parts)


def _by_method(grid: Grid, theirs: dict[str, dict[str, str]]) -> str:
    rows = []
    for workload in WORKLOADS:
        for k in KS:
            for name, places in RANGES.items():
                cells = [
                    _range(grid, Arm(v2, k), Arm(v1, k), places, workload)
                    for v2, v1 in PAIRS
                ]
                rows.append((f"k={k}, {name}", workload, theirs[str(k)][name], *cells))
    head = (
        "", "workload", "published: GPU suffix, fixed width on V2, trimmed on V1",
        *(f"`{v2}` / `{v1}`" for v2, v1 in PAIRS),
    )  # fmt: skip
    return table(head, rows)


def v1_arms(grid: Grid, note: Notes) -> str:
    """Each V1 arm's TPOT against no speculation on V1, beside the published one."""
    figures = published()
    places, tpot = figures["c"], figures["v1_tpot_ms"]
    rows: list[tuple[object, ...]] = []
    lines = []

    def theirs(label: str) -> list[str]:
        pairs = zip(tpot["v1-none"], tpot[label], strict=True)
        return [f"{none / own:.2f}" for none, own in pairs]

    for arm in (Arm(name, k) for name in ("v1-suffix", "v1-ngram-gpu") for k in KS):
        rows.append((arm.label, "published", *theirs(arm.label)))
        for workload in WORKLOADS:
            found = [grid.ratio(arm, c, workload) for c in places]
            rows.append(("", f"here, {workload}", *(r or NOTHING for r in found)))
        lines.append(f"{arm.label}: {note('v1', arm.label)}")
    for k in KS:
        name = f"its GPU suffix drafter, k={k}"
        rows.append((name, "published", *theirs(f"suffix_gpu:{k}")))
    head = ("V1 arm", "", *(f"c={c}" for c in places))
    return table(head, rows) + "\n\n" + "\n\n".join(lines)


def v1_suffix_against_v2(grid: Grid) -> str:
    """vLLM's CPU suffix decoding on V1 against no speculation on V2."""
    rows = []
    for k in KS:
        arm = Arm("v1-suffix", k)
        for workload in sorted(grid.workloads):
            found = [
                grid.ratio(arm, c, workload, base=Arm("v2-none"))
                for c in grid.concurrencies
            ]
            if any(found):
                cells = [str(ratio or NOTHING) for ratio in found]
                rows.append((arm.label, workload, *cells))
    if not rows:
        return "No run has V1's suffix decoding and V2 without speculation together."
    return table(("arm", "workload", *(f"c={c}" for c in grid.concurrencies)), rows)
