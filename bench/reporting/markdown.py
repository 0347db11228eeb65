"""Markdown that the report's sections share."""

from collections.abc import Iterable, Sequence

NOTHING = "-"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; all columns but the first are aligned to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def details(summary: str, content: str) -> str:
    """Return content that is folded away."""
    return f"<details><summary>{summary}</summary>\n\n{content}\n\n</details>"


def listed(values: Iterable[object]) -> str:
    """Return values with commas, or a dash."""
    return ", ".join(map(str, values)) or NOTHING
