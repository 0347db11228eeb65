"""The report's sections on single engines: a real model, a step's time, two ranks."""

from typing import Any

from reporting.markdown import NOTHING, details, table

Records = dict[str, dict[str, Any]]


def real_model(records: Records) -> str:
    """What a real model says with each arm, and how fast."""
    record = records.get("smollm2_real")
    if record is None:
        return "`bench/smollm2_real.py` was not run yet."
    rows = []
    for one in sorted(record["points"], key=lambda one: one["c"]):
        different = NOTHING
        if "tokens" in one:
            different = f"{one['different_tokens']} of {one['tokens']}"
        rows.append(
            (
                one["label"],
                one["c"],
                f"{one['tpot_ms']:.3f}",
                f"{one['tok_s']:.0f}",
                f"{one['tokens_per_step']:.2f}",
                different,
            )
        )
    head = ("arm", "c", "TPOT ms", "tok/s", "tokens a step", "other tokens")
    mode = "with" if record["batch_invariant"] else "without"
    return (
        f"{table(head, rows)}\n\n{record['model']}, greedy, {mode} batch-invariant "
        f"mode, compared with {record['compared_with']}. {source(record)}"
    )


def profile(records: Records) -> str:
    """Where the time of a step goes, a folded table a point."""
    found = [r for name, r in records.items() if name.startswith("profile_step")]
    if not found:
        return "`bench/profile_step.py` was not run yet."
    # Only here: they bring torch along.
    from grid.plan import Point
    from profile_step import table as lines_of

    parts = []
    for record in found:
        columns: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for one in record["points"]:
            columns.setdefault((one["workload"], one["c"]), []).append(one)
        for (workload, c), here in columns.items():
            lines = lines_of(Point(workload, c), here)
            text = "\n".join(lines[1:])
            parts.append(details(lines[0].strip("= "), f"```\n{text}\n```"))
        parts.append(source(record))
    return "\n\n".join(parts)


def ranks(records: Records) -> str:
    """Whether two ranks of a tensor-parallel engine decide alike."""
    record = records.get("tp_ranks")
    if record is None:
        return "`bench/tp_ranks.py` was not run yet."
    from tp_ranks import verdict

    lines = [f"- {verdict(label, one)}" for label, one in record["arms"].items()]
    lines += [f"- failed: {text}" for text in record["failures"]]
    return "\n".join(lines) + "\n\n" + source(record)


def source(record: dict[str, Any]) -> str:
    """Return where a record comes from."""
    where = record["gpu"] or "CPU"
    return f"{where}, commit {record['commit']}: `{record['command']}`"
