"""The report's sections on drafts alone: what they are worth and what they take."""

from typing import Any

from reporting.engines import source
from reporting.markdown import NOTHING, table

Records = dict[str, dict[str, Any]]


def replay(records: Records) -> str:
    """Tokens a step of every drafter on every file, without an engine."""
    parts = [
        _replayed(records[name]) for name in ("replay", "replay_gpu") if name in records
    ]
    return "\n\n".join(parts) or "`bench/replay.py` was not run yet."


def _replayed(record: dict[str, Any]) -> str:
    results = [r for r in record["results"] if r["category"] == "ALL" and r["loops"]]
    files = list(dict.fromkeys(r["file"] for r in results))
    parts = []
    for k in sorted({r["k"] for r in results}):
        rows = []
        for drafter in dict.fromkeys(r["drafter"] for r in results):
            cells = []
            for file in files:
                found = [
                    r
                    for r in results
                    if (r["drafter"], r["file"], r["k"]) == (drafter, file, k)
                ]
                cells.append(_worth(found[0]) if found else NOTHING)
            if any(cell != NOTHING for cell in cells):
                rows.append((drafter, *cells))
        parts.append(table((f"k={k}", *files), rows))
    left = "; ".join(f"{name}: {why}" for name, why in record["left_out"].items())
    parts.append(
        "Tokens a step (coverage: steps with a draft; accepted of drafted), "
        f"{_requests(record)}." + (f" Left out: {left}." if left else "")
    )
    parts.append(source(record))
    return "\n\n".join(parts)


def _requests(record: dict[str, Any]) -> str:
    in_flight, limit = record["in_flight"], record["limit"]
    some = f"the first {limit} requests of each file" if limit else "all requests"
    return f"{some}, {in_flight} at a time"


def _worth(found: dict[str, Any]) -> str:
    share = found["accepted"] / max(1, found["drafted"])
    return (
        f"{found['tokens_per_step']:.3f} ({found['coverage']:.0%}; {share:.0%} "
        f"of {found['drafted']})"
    )


def replay_loops(records: Records) -> str:
    """SmolLM2's own answers with and without those that end in a loop."""
    record = records.get("replay")
    if record is None:
        return "`bench/replay.py` was not run yet."
    cells: dict[tuple[str, int], dict[bool, dict[str, Any]]] = {}
    for r in record["results"]:
        if r["category"] == "ALL" and r["file"].startswith("smollm2"):
            cells.setdefault((r["drafter"], r["k"]), {})[r["loops"]] = r
    rows = [
        (f"{drafter}, k={k}", *(_worth(found[loops]) for loops in (True, False)))
        for (drafter, k), found in cells.items()
        if len(found) == 2
    ]
    return table(("drafter", "all answers", "without loops"), rows)


def propose_time(records: Records) -> str:
    """GPU time of drafting, by drafter and batch."""
    rows: list[tuple[object, ...]] = []
    ngram = records.get("propose_ngram")
    if ngram:
        rows += [
            _timed(f"n-gram, {_text(c)}", c, c["ours_us"], c["read_floor_us"])
            for c in ngram["cases"]
        ]
        rows += [
            _timed(f"vLLM's n-gram, {_text(c)}", c, c["in_tree_us"], None)
            for c in ngram["cases"]
            if c.get("in_tree_us")
        ]
        rows += [
            _timed(f"n-gram, latest, {_text(c)}", c, c["latest_us"], c["read_floor_us"])
            for c in ngram["cases"]
            if "latest_us" in c
        ]
    suffix = records.get("suffix")
    if suffix:
        rows += [
            _timed(f"suffix with memory, {c['text']}", c, c["propose_us"], None)
            for c in suffix["cases"]
        ]
    if not rows:
        return "No kernel timing is recorded."
    head = ("drafter", "requests", "row", "p50 us", "p20", "p80", "of the floor")
    sources = [source(record) for record in (ngram, suffix) if record]
    return table(head, rows) + "\n\n" + "\n\n".join(sources)


def rivals_time(records: Records) -> str:
    """Time of a step beside other suffix drafters, by batch."""
    record = records.get("suffix_rivals")
    if record is None:
        return "`bench/bench_suffix_rivals.py` was not run yet."
    names = list(dict.fromkeys(n for c in record["cases"] for n in c["arms"]))
    rows = []
    for case in record["cases"]:
        cells = []
        for name in names:
            arm = case["arms"].get(name, {})
            time = arm.get("propose_us", {}).get("p50", arm.get("host_us"))
            cells.append(NOTHING if time is None else f"{time:.1f}")
        floor = case.get("read_floor_us")
        rows.append(
            (
                f"{case['num_reqs']} x {case['row_len']}",
                *cells,
                f"{floor:.1f}" if floor else NOTHING,
            )
        )
    head = ("requests x row", *(f"{name} us" for name in names), "reading rows us")
    return table(head, rows) + "\n\n" + source(record)


def trim_time(records: Records) -> str:
    """GPU time of trimming, counting and valuing, by batch."""
    record = records.get("trim")
    if record is None:
        return "`bench/bench_trim.py` was not run yet."
    names = list(dict.fromkeys(n for c in record["cases"] for n in c["p50_us"]))
    rows = []
    for case in record["cases"]:
        cells = []
        for name in names:
            time = case["p50_us"].get(name)
            floor = case.get("floor_us", {}).get(name)
            text = NOTHING if time is None else f"{time:.1f}"
            cells.append(f"{text} ({floor:.2f})" if floor else text)
        rows.append((case["num_reqs"], case["k"], *cells))
    head = ("requests", "k", *(f"{name} us (floor)" for name in names))
    return table(head, rows) + "\n\n" + source(record)


def _text(case: dict[str, Any]) -> str:
    return "many matches" if case["text"] == "dense" else "few matches"


def _timed(
    name: str, case: dict[str, Any], time: dict[str, float], floor: float | None
) -> tuple[object, ...]:
    return (
        name,
        case["num_reqs"],
        case["row_len"],
        *(f"{time[part]:.1f}" for part in ("p50", "p20", "p80")),
        f"{time['p50'] / floor:.1f}" if floor else NOTHING,
    )
