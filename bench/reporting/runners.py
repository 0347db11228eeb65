"""The report's section on both runners, beside figures that others published."""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reporting.arms import KS
from reporting.compare import SPREAD, Arm, Grid, Ratio
from reporting.markdown import NOTHING, details, table

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
TOK_S = "tok/s"
HEAD = (f"{TOK_S} here", "TPOT ratio here", "at c")
OF_V2 = "GPU suffix, fixed width on V2, trimmed on V1"
HOW = """\
Above 0 %, and above 1, V2 is faster. Tokens a second are those of one run without
prefix caches, prefill included, as in the published figures, and were not repeated. The
TPOT ratio, V1's over V2's, is of decode alone and of all timed runs; the largest spread
of a row stands behind it where it is above 3 %. A row is of one run of the grid; the
last column names its numbers of requests."""
NOT_ALIKE = """\
Not all that differs below is the runner's:

- Only `v2-intree-ngram` / `v1-ngram-gpu` is one way of drafting on both. `ngram` and
  `ngram-untrimmed` continue the latest of several equally long matches, those two the
  earliest. `suffix` and `suffix-untrimmed` score drafts by what they have seen come
  true and remember 4 Mi tokens of replies; `v1-suffix` is arctic-inference's tree, by
  its own scores and with a memory of 10,000 replies.
- Forcing texts costs each runner something else. V2 copies all logits of a step to
  float32 once a request has a logits processor, which it would not for greedy ones:
  going by the bytes, not measured, 0.07 ms a step of 256 rows and 1.1 ms of 4352, the
  fixed width of k=16 at 256 requests. V1 makes such a copy without forcing too; there
  forcing takes five or six small launches, which `v1-suffix`, whose scheduler waits for
  each step, cannot hide.
- On V1 the graph of a whole step is for k + 1 rows of each request. Steps whose drafts
  were trimmed replay a graph for each piece between two attention layers, also where no
  draft is left. Both go up to 512 rows; wider steps replay none. So vLLM sets V1 up.
  Trimmed arms of this project replay graphs of whole steps up to 2048 rows."""


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


@dataclass(frozen=True, slots=True)
class Pair:
    """An arm on V2 against one on V1, at several numbers of requests of one run.

    Attributes:
        places: requests at a time.
        tok_s: changes of the output tokens a second.
        tpot: ratios of V1's TPOT over V2's.
    """

    places: list[int]
    tok_s: list[float]
    tpot: list[Ratio]

    def cells(self, digits: int) -> tuple[str, str, str]:
        """Return both ranges and the numbers of requests, as a table has them.

        Args:
            digits: decimals of a change in percent; of ratios two more.
        """
        ends = [change(end, digits) for end in (min(self.tok_s), max(self.tok_s))]
        values = [ratio.value for ratio in self.tpot]
        tpot = _span([f"{end:.{digits + 2}f}" for end in (min(values), max(values))])
        widest = max(ratio.spread for ratio in self.tpot)
        spread = "" if widest <= SPREAD else f" (±{widest:.0%})"
        return _span(ends), tpot + spread, ", ".join(map(str, self.places))


def change(value: float, digits: int = 0) -> str:
    """Return a change such as +3 %, or 0 % without a sign."""
    text = f"{100 * value:+.{digits}f}"
    return f"{text if float(text) else text[1:]} %"


def _span(ends: list[str]) -> str:
    low, high = ends
    return low if low == high else f"{low} to {high}"


def _runs(grid: Grid) -> list[Grid]:
    """Return each run by itself, the newest first."""
    return [
        Grid(point for point in grid.points if point.run_id == run)
        for run in grid.run_ids
    ]


def _pair(
    runs: list[Grid], v2: Arm, v1: Arm, places: tuple[int, ...], workload: str
) -> Pair | None:
    """Return the points of the run that has most of them, of several the newest."""
    most: list[int] = []
    chosen = None
    for run in runs:
        found = [c for c in places if run.together((v2, v1), c, workload)]
        if len(found) > len(most):
            most, chosen = found, run
    if chosen is None:
        return None
    tok_s, tpot = [], []
    for c in most:
        both = chosen.together((v2, v1), c, workload)
        ratio = chosen.ratio(v2, c, workload, base=v1)
        assert both is not None and ratio is not None
        tok_s.append(both[0].tok_s / both[1].tok_s - 1)
        tpot.append(ratio)
    return Pair(most, tok_s, tpot)


def v2_against_v1(grid: Grid, note: Notes) -> str:
    """V2 against V1 of the same method, beside the published change of tok/s."""
    theirs = published()["v2_against_v1"]
    runs = _runs(grid)
    rows = []
    arms = (Arm("v2-none"), Arm("v1-none"))
    for workload in WORKLOADS:
        for name, places in RANGES.items():
            stated = theirs["none"][name]
            found = _pair(runs, *arms, places, workload)
            cells = found.cells(_digits(stated)) if found else (NOTHING,) * 3
            rows.append((name, workload, stated, *cells))
    parts = [
        HOW + _noise(runs),
        table(("no speculation", "workload", f"published, {TOK_S}", *HEAD), rows),
        *_sentence(note, "v2_against_v1", "no speculation", "No speculation"),
        NOT_ALIKE,
        *_by_method(runs, theirs, note),
    ]
    return "\n\n".join(parts)


def _digits(stated: str) -> int:
    return 1 if "." in stated else 0


def _sentence(note: Notes, name: str, row: str, head: str | None = None) -> list[str]:
    """Return a row's sentence, if it is written."""
    before = len(note.unwritten)
    text = note(name, row)
    return [] if len(note.unwritten) > before else [f"{head or row}: {text}"]


def _noise(runs: list[Grid]) -> str:
    """Return how far the tok/s of the same engine differ from run to run, if known."""
    found = []
    for workload in WORKLOADS:
        for c in sorted({c for run in runs for c in run.concurrencies}):
            points = [run.together([Arm("v2-none")], c, workload) for run in runs]
            tok_s = [point[0].tok_s for point in points if point]
            if len(tok_s) > 1:
                found.append((max(tok_s) / min(tok_s) - 1, workload, c))
    if not found:
        return ""
    share, workload, c = max(found)
    return (
        " The tok/s of V2 without\nspeculation, vLLM's own code in every run, differ "
        f"from run to run by up to\n{share:.0%} ({workload}, c={c})."
    )


def _by_method(
    runs: list[Grid], theirs: dict[str, dict[str, str]], note: Notes
) -> list[str]:
    rows: list[tuple[str, ...]] = []
    sentences, missing = [], []
    for k in KS:
        lacking = [f"`{v2}` / `{v1}`" for v2, v1 in PAIRS]
        for name, places in RANGES.items():
            row, stated = f"k={k}, {name}", theirs[str(k)][name]
            here = []
            for v2, v1 in PAIRS:
                for workload in WORKLOADS:
                    found = _pair(runs, Arm(v2, k), Arm(v1, k), places, workload)
                    if found:
                        pair = f"`{v2}` / `{v1}`"
                        cells = found.cells(_digits(stated))
                        here.append((row, pair, workload, stated, *cells))
                        lacking = [one for one in lacking if one != pair]
            nothing = (row, NOTHING, NOTHING, stated, *[NOTHING] * len(HEAD))
            rows += here or [nothing]
            sentences += _sentence(note, "v2_against_v1", row)
        if lacking:
            names = ", ".join(lacking) if len(lacking) < len(PAIRS) else "all pairs"
            missing.append(f"of k={k} {names}")
    head = ("", "V2 / V1", "workload", f"published, {TOK_S}: {OF_V2}", *HEAD)
    never = [f"Not measured together in a run: {'; '.join(missing)}."]
    return [table(head, rows), *sentences, *(never if missing else [])]


def v1_arms(grid: Grid, note: Notes) -> str:
    """Each V1 arm against no speculation on V1, beside the published figures."""
    figures = published()
    places, base = figures["c"], Arm("v1-none")
    tpot: list[tuple[object, ...]] = []
    tok_s: list[tuple[object, ...]] = []
    lines = []

    def theirs(name: str, label: str) -> None:
        times, rates = figures["v1_tpot_ms"], figures["v1_tok_s"]
        pairs = zip(times[base.label], times[label], strict=True)
        tpot.append((name, "published", *(f"{none / own:.2f}" for none, own in pairs)))
        pairs = zip(rates[base.label], rates[label], strict=True)
        changes = [change(own / none - 1) for none, own in pairs]
        tok_s.append((name, "published", *changes))

    for arm in (Arm(name, k) for name in ("v1-suffix", "v1-ngram-gpu") for k in KS):
        theirs(arm.label, arm.label)
        for workload in WORKLOADS:
            here = f"here, {workload}"
            ratios = [grid.ratio(arm, c, workload) for c in places]
            tpot.append(("", here, *(r or NOTHING for r in ratios)))
            both = [grid.together((arm, base), c, workload) for c in places]
            changes = [
                change(pair[0].tok_s / pair[1].tok_s - 1) if pair else NOTHING
                for pair in both
            ]
            tok_s.append(("", here, *changes))
        lines += _sentence(note, "v1", arm.label)
    for k in KS:
        theirs(f"its GPU suffix drafter, k={k}", f"suffix_gpu:{k}")
    head = ("V1 arm", "", *(f"c={c}" for c in places))
    folded = details("The same by output tok/s with prefill", table(head, tok_s))
    return "\n\n".join([table(head, tpot), *lines, folded])


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
