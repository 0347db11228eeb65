"""One line in words, for the log."""

from mrv2_spec.counters import SOURCES, DraftCounts


def log_line(counts: DraftCounts) -> str:
    """Return what the counts say, without a division by nothing."""
    totals = counts.totals()
    line = (
        f"{totals.rounds} decode rounds, {totals.coverage:.1%} with a draft, mean "
        f"acceptance length {totals.mean_acceptance_length:.2f}, "
        f"{totals.fillers} fillers"
    )
    if not totals.proposed:
        return f"{line}; no drafts"
    memory = counts.totals(SOURCES.index("memory")).proposed / totals.proposed
    parts = [
        f"{line}; drafts: {totals.proposed} proposed",
        f"{memory:.1%} of them from the memory" if memory else "",
        f"{totals.invalid / totals.proposed:.1%} ruled out by a grammar",
        f"{totals.never_issued / totals.proposed:.1%} not issued",
        f"{totals.verified} verified",
        f"{totals.acceptance:.1%} of these accepted" if totals.verified else "",
        f"yield {totals.draft_yield:.1%}",
    ]
    return ", ".join(part for part in parts if part)
