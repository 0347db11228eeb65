"""Write the tables in the documents from the committed results.

    python bench/tables.py [--check]

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. A truncated or
impossible result is refused with its file, and nothing is written. With ``--check``
nothing is written; the exit code is 1 if a table differs.
"""

import argparse
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from reporting.compare import Arm, Grid
from reporting.load import GRID, ResultError, making, read_grid, read_json
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def load(name: str) -> dict[str, Any]:
    """Return a committed result."""
    return read_json(RESULTS / f"{name}.json")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; all columns but the first are aligned to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def _machine(record: dict[str, Any]) -> str:
    names = ("driver", "torch", "triton", "vllm")
    versions = [f"{name} {record[name]}" for name in names if record.get(name)]
    return ", ".join([record["gpu"] or "CPU", *versions])


def _from(record: dict[str, Any]) -> str:
    return f"\n{_machine(record)}: `{record['command']}`\n"


def propose_ngram() -> str:
    """GPU time of drafting, beside vLLM's own kernels."""
    record = load("propose_ngram")
    # Earlier records have no times of the default tie rule.
    both = all("latest_us" in case for case in record["cases"])
    rows = []
    for case in record["cases"]:
        ours, theirs = case["ours_us"]["p50"], case["in_tree_us"]["p50"]
        latest = [f"{case['latest_us']['p50']:.1f}"] if both else []
        rows.append(
            (
                f"{case['num_reqs']} x {case['row_len']}",
                "many matches" if case["text"] == "dense" else "few matches",
                *latest,
                *(f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.2f}"),
                f"{case['read_floor_us']:.1f}",
            )
        )
    head = (
        "requests x row", "text", *(["mrv2-spec, latest match, us"] if both else []),
        "mrv2-spec us", "in-tree us", "ratio", "reading the rows us",
    )  # fmt: skip
    return table(head, rows) + _from(record)


def trim() -> str:
    """GPU time of trimming, counting and valuing."""
    record = load("trim")
    heads = {
        "trim": "trim us", "fill": "fill a budget us", "in-tree fill": "in-tree us",
        "count": "count us", "value": "value us",
    }  # fmt: skip
    names = [name for name in heads if name in record["cases"][0]["p50_us"]]
    rows = [
        (c["num_reqs"], c["k"], *(f"{c['p50_us'][name]:.1f}" for name in names))
        for c in record["cases"]
    ]
    return table(("requests", "k", *(heads[name] for name in names)), rows) + _from(
        record
    )


def replay_ngram() -> str:
    """Tokens a step by tie rule."""
    record = load("replay")
    found = {
        (r["drafter"], r["k"], r["file"]): r
        for r in record["results"]
        if r["drafter"].startswith("ngram-") and r["category"] == "ALL" and r["loops"]
    }
    files = list(dict.fromkeys(file for _, _, file in found))
    rows = []
    for k, name in sorted({(k, drafter) for drafter, k, _ in found}):
        every = [found[name, k, file] for file in files]
        steps, tokens, drafted = (
            sum(r[key] for r in every) for key in ("steps", "tokens", "drafted")
        )
        per_step = (*(r["tokens_per_step"] for r in every), tokens / steps)
        tie = name.removeprefix("ngram-")
        rows.append((f"{tie}, k={k}", *(f"{x:.3f}" for x in per_step), drafted))
    return table(("tie rule", *files, "all", "drafted"), rows)


def identity() -> str:
    """Tokens changed, and drafts verified and accepted, by arm."""
    record = load("identity")
    rows = []
    for name, arm in record["arms"].items():
        counters = arm["counters"]
        numbers: tuple[object, ...] = ("", "", "", "")
        if counters is not None:
            places = counters["verified"] + counters["fillers"]
            length = 1 + counters["accepted"] / counters["rounds"]
            numbers = (
                places,
                counters["accepted"],
                f"{100 * counters['accepted'] / places:.0f} %" if places else "-",
                f"{length:.2f}",
            )
        rows.append((name, arm["different_tokens"], *numbers))
    head = (
        "arm", "tokens changed", "draft places verified", "accepted", "of places",
        "tokens a round",
    )  # fmt: skip
    note = (
        f"\n{record['prompts']} prompts, twice each, {record['tokens']} tokens, "
        "`VLLM_BATCH_INVARIANT=1`. Each arm is compared with no speculation in its own "
        "mode; compiled and eager models themselves differ in "
        f"{record['graphs_against_eager_without_speculation']} of these tokens.\n"
    )
    return table(head, rows) + note + _from(record)


def _commands(*records: dict[str, Any]) -> str:
    commands = [f"`{r['command']}` (commit {r['commit']})" for r in records]
    return "\n" + ", ".join(commands) + ".\n"


def _totals(record: dict[str, Any], loops: bool = True) -> dict[str, dict[str, Any]]:
    return {
        r["file"]: r
        for r in record["results"]
        if r["category"] == "ALL" and r["loops"] == loops
    }


def _gain(found: dict[str, Any]) -> str:
    # Its own tokens a step are rounded; its totals are not.
    was = found["recorded"]["tokens"] / found["recorded"]["steps"]
    return f"{100 * (found['tokens_per_step'] / was - 1):+.1f} %"


def _suffix_replay(run: str) -> str:
    """Tokens a step of the learned scoring beside the recorded reference."""
    record = load(f"replay_suffix_learned_{run}")
    model = load(f"replay_suffix_reference_{run}")
    rows = [
        (
            name,
            f"{found['tokens_per_step']:.3f}",
            f"{was['tokens_per_step']:.3f}",
            _gain(found),
            *(n for key in ("drafted", "accepted") for n in (found[key], was[key])),
        )
        for name, found in _totals(record).items()
        for was in (found["recorded"],)
    ]
    head = (
        "file", "tokens a step", "recorded", "gain", "drafted", "recorded",
        "accepted", "recorded",
    )  # fmt: skip
    notes = ""
    for name, found in _totals(record, loops=False).items():
        left_out = _totals(record)[name]["requests"] - found["requests"]
        counted = _totals(model, loops=False)[name]
        notes += (
            f"\n{name} without the {left_out} replies that end in an exact loop: "
            f"{found['tokens_per_step']:.3f} tokens a step, {found['drafted']} "
            f"drafted, {found['accepted']} accepted; reference scoring there "
            f"{counted['tokens_per_step']:.3f}, {counted['drafted']} and "
            f"{counted['accepted']}.\n"
        )
    return table(head, rows) + notes + _commands(record, model)


def suffix_in_flight() -> str:
    """Tokens a step of the agentic file by requests in flight."""
    names = ("global_k16", "global_k16_8_in_flight", "global_k16_64_in_flight")
    records = [
        [
            load(f"replay_suffix_{scoring}_{name}")
            for scoring in ("learned", "reference")
        ]
        for name in names
    ]
    rows = []
    for pair in records:
        found = [_totals(record)["agentic"] for record in pair]
        cells = [f"{f['tokens_per_step']:.3f} ({f['drafted']})" for f in found]
        rows.append((pair[0]["in_flight"], *cells))
    head = ("in flight", "learned: tokens a step (drafted)", "reference scoring")
    return table(head, rows) + _commands(*(r for pair in records[1:] for r in pair))


def suffix_reference() -> str:
    """Tokens a step of the reference scoring, by category."""
    runs = ("global_k16", "global_k5", "local_k16", "local_k5")
    records = [load(f"replay_suffix_reference_{run}") for run in runs]
    cells: dict[tuple[str, str], list[str]] = {}
    for record in records:
        for r in record["results"]:
            if r["loops"]:
                text = f"{r['tokens_per_step']:.3f} ({_gain(r)})"
                cells.setdefault((r["file"], r["category"]), []).append(text)
    rows = [
        (file if category == "ALL" else "", category.replace("ALL", "all"), *row)
        for (file, category), row in cells.items()
    ]
    head = ("file", "category", *(f"{r['scope']} k={r['k']}" for r in records))
    return table(head, rows) + _commands(*records)


def suffix_variants() -> str:
    """What each setting is worth."""
    record = load("replay_suffix_variants")
    rows = [
        (
            v["variant"],
            *(
                f"{_gain(r)} ({r['drafted'] / r['recorded']['drafted']:.2f})"
                for r in v["results"]
            ),
        )
        for v in record["variants"]
    ]
    files = [r["file"] for r in record["variants"][0]["results"]]
    return table(("variant", *files), rows) + _commands(record)


def suffix() -> str:
    """GPU time of the whole propose step with its memory."""
    record = load("suffix")
    rows = [
        (
            f"{c['num_reqs']} x {c['row_len']}",
            c["text"],
            f"{c['propose_us']['p50']:.1f}",
            f"{c['draft_us']['p50']:.1f}",
            f"{c['drafted_per_row']:.2f}",
            f"{c['reference_us']:.0f}" if "reference_us" in c else "",
        )
        for c in record["cases"]
    ]
    head = (
        "requests x row", "text", "propose us", "of which draft us",
        "drafted a row", "draft us, reference scoring",
    )  # fmt: skip
    return table(head, rows) + _gpu(record)


def suffix_rivals() -> str:
    """Time of a step beside two other drafters."""
    record = load("suffix_rivals")
    names = list(dict.fromkeys(n for c in record["cases"] for n in c["arms"]))
    rebuilds = [n for n in names if "rebuild_us" in record["cases"][0]["arms"][n]]

    def time(arm: dict[str, Any] | None) -> str:
        if arm is None:
            return ""
        found = arm["propose_us"]["p50"] if "propose_us" in arm else arm["host_us"]
        return f"{found:.1f}"

    rows = []
    for case in record["cases"]:
        arms = case["arms"]
        rebuild = [arms[n]["rebuild_us"] for n in rebuilds if n in arms]
        rows.append(
            (
                f"{case['num_reqs']} x {case['row_len']}",
                *(time(arms.get(name)) for name in names),
                f"{max(rebuild):.0f}" if rebuild else "",
                f"{arms['mrv2-spec']['drafted_per_row']:.2f}",
            )
        )
    head = (
        "requests x row", *(f"{name} us" for name in names), "suffix-gpu's rebuild us",
        "mrv2-spec drafted a row",
    )  # fmt: skip
    return table(head, rows) + _gpu(record)


def _gpu(record: dict[str, Any]) -> str:
    vllm = f", vLLM {record['vllm']}" if record["vllm"] else ""
    return (
        f"\n{record['gpu']}, driver {record['driver']}, torch {record['torch']}, "
        f"triton {record['triton']}{vllm}: `{record['command']}`\n"
    )


def engine() -> str:
    """TPOT of no speculation over that of our drafters at k = 16, as in the report."""
    points = read_grid(RESULTS / GRID)
    if not points:
        raise ResultError(f"{GRID} has no point")
    grid = Grid(points)
    columns = (1, 16, 64, 256)
    texts = {
        "low": "reference answers of Spec-Bench",
        "low-smollm2": "SmolLM2's answers",
        "mid": "code copied, 1 token in 24 replaced",
        "high": "code edits",
        "agentic": "agent logs, similar ones remembered",
    }
    rows, used = [], set()
    for name, text in texts.items():
        for arm in ("ngram", "suffix"):
            ratios = [grid.ratio(Arm(arm, 16), c, name) for c in columns]
            rows.append((text, arm, *(ratio or "" for ratio in ratios)))
            used |= {f"{r.point.run_id} ({r.point.commit})" for r in ratios if r}
    source = f"`bench/engine_grid.py`, runs {' and '.join(sorted(used))}"
    head = ("text", "method", *map(str, columns))
    return table(head, rows) + f"\n{_machine(asdict(points[-1]))}: {source}\n"


def counting_cost() -> str:
    """What counting adds to a token's time, pair by pair."""
    record = load("counting_cost")
    rows = []
    for arm, one in record["arms"].items():
        pairs = zip(one["counted_ms"], one["uncounted_ms"], strict=True)
        added = sorted((a - b) / one["uncounted_tpot_ms"] * 100 for a, b in pairs)
        rows.append(
            (
                f"{arm}, {record['workload']}, {record['c']} requests",
                f"{one['uncounted_tpot_ms']:.2f}",
                ", ".join(f"{percent:+.1f}" for percent in added),
                f"{median(added):+.2f}",
                f"{one['added_percent']:+.2f} ± {one['standard_error']:.2f}",
            )
        )
    head = ("", "TPOT ms", "added by pair, %", "median, %", "mean, standard error, %")
    return table(head, rows) + _from(record)


def suffix_gpu_checks() -> str:
    """Rows on which the CUDA and the tensor version were compared, and sanitizers."""
    record = load("suffix_gpu_checks")
    rows: list[tuple[object, ...]] = []
    for part in (record, record["later"]):
        commit = part["commit"]
        for run in part["runs"]:
            name = "equal to the tensor version"
            rows.append(
                (name, commit, run["seed"], run["rows"], run["tokens_drafted"], "")
            )
        for tool in ("memcheck", "racecheck"):
            found = part[tool]
            numbers = (found["seed"], found["rows"], found["tokens_drafted"])
            rows.append((tool, commit, *numbers, found["summary"].partition(": ")[2]))
    head = ("check", "commit", "seed", "rows", "tokens drafted", "found")
    return table(head, rows) + _from(record)


def suffix_golden() -> str:
    """Recorded drafts that the count model of the reference scoring gives."""
    record = load("suffix_golden")
    names = ("steps", "exact", "ambiguous_allowed", "wrong")
    runs = record["runs"]
    total = {"run": "all", **{n: sum(run[n] for run in runs) for n in names}}
    rows = [
        (
            run["run"],
            run["steps"],
            run["exact"],
            f"{(num := run['ambiguous_allowed'])} ({num / run['steps']:.1%})",
            run["wrong"],
        )
        for run in (*runs, total)
    ]
    head = ("streams", "steps", "exact", "ambiguous, allowed", "not given")
    return table(head, rows) + _commands(record)


def scorecard() -> str:
    """The scorecard of a server, as `mrv2-spec scorecard` prints its ratios."""
    from mrv2_spec.errors import UserError
    from mrv2_spec.scorecard.score import score
    from mrv2_spec.scorecard.scrape import parse
    from mrv2_spec.scorecard.show import ratio_table

    record = load("scorecard")
    try:
        card = score(parse("\n".join((*record["samples"], ""))))
    except UserError as error:
        raise ResultError(f"scorecard.json: {error}") from None
    printed = io.StringIO()
    Console(file=printed, width=80).print(ratio_table(card))
    lines = [line for line in printed.getvalue().splitlines() if line[0] in "┃│"]
    shown = "\n".join([*lines, "...", card.verdict])
    return f"```\n{shown}\n```\n{_from(record)}"


TABLES: dict[str, Callable[[], str]] = {
    "propose-ngram": propose_ngram,
    "trim": trim,
    "replay-ngram": replay_ngram,
    "identity": identity,
    "suffix-replay-k16": partial(_suffix_replay, "global_k16"),
    "suffix-replay-k5": partial(_suffix_replay, "global_k5"),
    "suffix-local": partial(_suffix_replay, "local_k16"),
    "suffix-in-flight": suffix_in_flight,
    "suffix-variants": suffix_variants,
    "suffix-reference": suffix_reference,
    "suffix": suffix,
    "suffix-rivals": suffix_rivals,
    "engine": engine,
    "suffix-golden": suffix_golden,
    "suffix-gpu-checks": suffix_gpu_checks,
    "counting-cost": counting_cost,
    "scorecard": scorecard,
}


def refresh(text: str) -> str:
    """Return a document with its tables made anew."""

    def replace(match: re.Match[str]) -> str:
        make = TABLES[match[2]]
        with making(f"table {match[2]}"):
            return match[1] + make() + match[3]

    return MARKED.sub(replace, text)


def main() -> None:
    """Refresh or check all documents."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    old = {path: path.read_text() for path in DOCUMENTS}
    try:
        new = {path: refresh(text) for path, text in old.items()}
    except ResultError as error:
        raise SystemExit(f"refused: {error}") from None
    stale = [path for path in DOCUMENTS if new[path] != old[path]]
    if args.check and stale:
        names = ", ".join(path.name for path in stale)
        raise SystemExit(f"stale tables in {names}: run bench/tables.py")
    for path in stale:
        path.write_text(new[path])


if __name__ == "__main__":
    main()
