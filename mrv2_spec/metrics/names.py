"""The names under which the counters are published."""

from dataclasses import dataclass

PREFIX = "mrv2_spec:"


@dataclass(frozen=True, slots=True)
class Counter:
    """One Prometheus counter; its samples end in ``_total``.

    Args:
        name: without `PREFIX`.
        text: what it counts.
        label: a label beside model, engine and method, or None.
    """

    name: str
    text: str
    label: str | None = None

    @property
    def full_name(self) -> str:
        """The counter's name as Prometheus knows it."""
        return PREFIX + self.name

    @property
    def sample_name(self) -> str:
        """The name of its samples in a scrape."""
        return f"{PREFIX}{self.name}_total"


ROUNDS = Counter("rounds", "Decode rounds: steps of requests past their prefill.")
FILLERS = Counter("fillers", "Places verified without a real draft in them.")
ROUNDS_WITH_DRAFT = Counter(
    "rounds_with_draft", "Decode rounds with a real draft.", "source"
)
PROPOSED = Counter("proposed_drafts", "Real draft tokens proposed.", "source")
INVALID = Counter(
    "invalid_drafts", "Draft tokens from the first illegal one on.", "source"
)
NEVER_ISSUED = Counter(
    "never_issued_drafts",
    "Draft tokens trimmed, not scheduled, or whose request ended.",
    "source",
)
VERIFIED = Counter(
    "verified_drafts", "Draft tokens that the target verified.", "source"
)
ACCEPTED = Counter(
    "accepted_drafts", "Draft tokens that the target accepted.", "source"
)
VERIFIED_AT = Counter(
    "verified_drafts_per_position", "Draft tokens verified at a position.", "position"
)
ACCEPTED_AT = Counter(
    "accepted_drafts_per_position", "Draft tokens accepted at a position.", "position"
)
LENGTHS = Counter(
    "rounds_by_accepted_length", "Decode rounds by drafts accepted.", "length"
)

COUNTERS = (
    ROUNDS,
    FILLERS,
    ROUNDS_WITH_DRAFT,
    PROPOSED,
    INVALID,
    NEVER_ISSUED,
    VERIFIED,
    ACCEPTED,
    VERIFIED_AT,
    ACCEPTED_AT,
    LENGTHS,
)
# counter -> the field of Totals that it publishes, for each source.
BY_SOURCE = {
    ROUNDS_WITH_DRAFT: "rounds_with_draft",
    PROPOSED: "proposed",
    INVALID: "invalid",
    NEVER_ISSUED: "never_issued",
    VERIFIED: "verified",
    ACCEPTED: "accepted",
}
