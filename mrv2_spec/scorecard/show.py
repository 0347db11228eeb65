"""The scorecard as tables."""

from rich.markup import escape
from rich.table import Table

from mrv2_spec.counters import Totals
from mrv2_spec.scorecard.score import Scorecard


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def ratio_table(card: Scorecard) -> Table:
    """Return the ratios, each with what it is a ratio of."""
    totals = card.totals
    table = Table(title=escape(", ".join((*card.models, *card.methods))))
    table.add_column("ratio")
    table.add_column("value", justify="right")
    table.add_column("of")
    survived = totals.proposed - totals.invalid
    table.add_row(
        "grammar survival",
        _percent(survived, totals.proposed),
        f"{survived} of {totals.proposed} drafts",
    )
    table.add_row(
        "conditional acceptance",
        _percent(totals.accepted, totals.verified),
        f"{totals.accepted} of {totals.verified} verified",
    )
    table.add_row(
        "yield",
        _percent(totals.accepted, totals.proposed),
        f"{totals.accepted} of {totals.proposed} drafts",
    )
    table.add_row(
        "coverage",
        _percent(totals.rounds_with_draft, totals.rounds),
        f"{totals.rounds_with_draft} of {totals.rounds} rounds",
    )
    table.add_row(
        "mean acceptance length",
        f"{totals.mean_acceptance_length:.3f}",
        "tokens a round: 1 + accepted drafts",
    )
    delivered = card.delivered_per_round
    table.add_row(
        "tokens per step",
        "-" if delivered is None else f"{delivered:.3f}",
        "delivered to clients, a request and round",
    )
    return table


def count_table(card: Scorecard) -> Table:
    """Return the counters, all and by source."""
    table = Table(title="Counters")
    table.add_column("drafts")
    columns: dict[str, Totals] = {"all": card.totals}
    if len(card.by_source) > 1:
        columns |= card.by_source
    for name in columns:
        table.add_column(name, justify="right")
    for field in ("proposed", "invalid", "never_issued", "verified", "accepted"):
        table.add_row(
            field.replace("_", " "),
            *(str(getattr(one, field)) for one in columns.values()),
        )
    table.add_row("fillers", str(card.totals.fillers))
    return table


def position_table(card: Scorecard) -> Table:
    """Return what became of the drafts at each position."""
    table = Table(title="By position")
    for name in ("position", "verified", "accepted", "share"):
        table.add_column(name, justify="right")
    for one in card.positions:
        table.add_row(
            str(one.position),
            str(one.verified),
            str(one.accepted),
            _percent(one.accepted, one.verified),
        )
    return table
