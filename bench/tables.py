"""Write the tables in the documents from the committed results.

    python bench/tables.py [--check]

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. With ``--check``
nothing is written; the exit code is 1 if a table differs.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def load(name: str) -> dict[str, Any]:
    """Return a committed result."""
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return record


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; all columns but the first are aligned to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def _from(record: dict[str, Any]) -> str:
    return (
        f"\n{record['gpu'] or 'CPU'}, driver {record['driver']}, torch "
        f"{record['torch']}, triton {record['triton']}, vLLM {record['vllm']}: "
        f"`{record['command']}`\n"
    )


def propose_ngram() -> str:
    """GPU time of drafting, beside vLLM's own kernels."""
    record = load("propose_ngram")
    rows = [
        (
            f"{case['num_reqs']} x {case['row_len']}",
            "many matches" if case["text"] == "dense" else "few matches",
            f"{case['ours_us']['p50']:.1f}",
            f"{case['in_tree_us']['p50']:.1f}",
            f"{case['in_tree_us']['p50'] / case['ours_us']['p50']:.2f}",
            f"{case['read_floor_us']:.1f}",
        )
        for case in record["cases"]
    ]
    head = (
        "requests x row", "text", "mrv2-spec us", "in-tree us", "ratio",
        "reading the rows us",
    )  # fmt: skip
    return table(head, rows) + _from(record)


def trim() -> str:
    """GPU time of trimming and counting."""
    record, names = load("trim"), ("trim", "fill", "count")
    rows = [
        (c["num_reqs"], c["k"], *(f"{c['p50_us'][name]:.1f}" for name in names))
        for c in record["cases"]
    ]
    head = ("requests", "k", "trim us", "fill a budget us", "count us")
    return table(head, rows) + _from(record)


def replay_ngram() -> str:
    """Tokens a step by tie rule."""
    record = load("replay_ngram")
    files = [found["file"] for found in record["results"][0]["files"]]
    rows = [
        (
            f"{result['tie']}, k={result['k']}",
            *(f"{found['tokens_per_step']:.3f}" for found in result["files"]),
            result["files"][-1]["drafted"],
        )
        for result in sorted(record["results"], key=lambda r: (r["k"], r["tie"]))
    ]
    return table(("tie rule", *files, "drafted"), rows)


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
                f"{100 * counters['accepted'] / places:.0f} %",
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


TABLES: dict[str, Callable[[], str]] = {
    "propose-ngram": propose_ngram,
    "trim": trim,
    "replay-ngram": replay_ngram,
    "identity": identity,
}


def refresh(text: str) -> str:
    """Return a document with its tables made anew."""

    def replace(match: re.Match[str]) -> str:
        return match[1] + TABLES[match[2]]() + match[3]

    return MARKED.sub(replace, text)


def main() -> None:
    """Refresh or check all documents."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = []
    for path in DOCUMENTS:
        old = path.read_text()
        new = refresh(old)
        if new != old:
            stale.append(path.name)
            if not args.check:
                path.write_text(new)
    if args.check and stale:
        raise SystemExit(f"stale tables in {', '.join(stale)}: run bench/tables.py")


if __name__ == "__main__":
    main()
