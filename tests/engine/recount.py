"""What every step did, counted again and compared with the engine's counters."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Whether a text is the beginning of one that a grammar lets pass.
Begins = Callable[[list[int]], bool]


class Recount:
    """The same counters, by comparing each step's tokens with what was drafted.

    Nothing of this looks at the counters' own inputs but the widths verified: a draft
    counts as accepted when the tokens that came back start with it.
    """

    def __init__(self, num_drafts: int) -> None:
        self.counts: dict[str, Any] = dict.fromkeys(
            ("proposed", "verified", "accepted", "never_issued", "invalid", "fillers",
             "rounds", "rounds_with_draft"), 0,
        )  # fmt: skip
        self.verified_at = [0] * num_drafts
        self.accepted_at = [0] * num_drafts
        self.lengths = [0] * (num_drafts + 1)

    def lose(self, draft: list[int]) -> None:
        """Count a draft that no round used."""
        self.counts["proposed"] += len(draft)
        self.counts["never_issued"] += len(draft)

    def round(self, draft: list[int], legal: int, entry: dict[str, Any]) -> None:
        """Count a round of a draft of which a grammar lets the first ones pass."""
        tried = draft[:legal][: entry["width"]]
        accepted = 0
        for drafted, emitted in zip(tried, entry["emitted"][:-1], strict=False):
            if drafted != emitted:
                break
            accepted += 1
        for name, number in (
            ("proposed", len(draft)),
            ("verified", len(tried)),
            ("accepted", accepted),
            ("invalid", len(draft) - legal),
            ("never_issued", legal - len(tried)),
            ("fillers", max(0, entry["width"] - len(draft))),
            ("rounds", 1),
            ("rounds_with_draft", bool(draft)),
        ):
            self.counts[name] += number
        for i in range(len(tried)):
            self.verified_at[i] += 1
        for i in range(accepted):
            self.accepted_at[i] += 1
        self.lengths[accepted] += 1

    def as_dict(self) -> dict[str, Any]:
        """Return it as the engine reports its own."""
        return {
            **self.counts,
            "verified_per_position": self.verified_at,
            "accepted_per_position": self.accepted_at,
            "accepted_lengths": self.lengths,
        }


def num_legal(text: list[int], draft: list[int], begins: Begins | None) -> int:
    """Return how many leading drafts a request's grammar lets pass after its text."""
    if begins is None:
        return len(draft)
    return next(
        (i for i in range(len(draft)) if not begins(text + draft[: i + 1])), len(draft)
    )


def recount(
    result: dict[str, Any],
    num_drafts: int,
    names: Sequence[str],
    grammars: Mapping[str, Begins],
) -> dict[str, Recount]:
    """Count again, by request; ``names`` are those of the result's requests."""
    delivered = {
        name: len(request["token_ids"])
        for name, request in zip(names, result["requests"], strict=True)
    }
    counts = {name: Recount(num_drafts) for name in names}
    pending: dict[str, list[int]] = {}
    texts: dict[str, list[int]] = {name: [] for name in names}
    for step in result["records"]:
        for entry in step:
            name = entry["id"]
            text = texts[name]
            draft = pending.get(name, [])
            pending[name] = entry["drafts"]
            if entry["first_token"] or not entry["emitted"]:
                # Its prefill, or another one after a preemption.
                counts[name].lose(draft)
            elif len(text) >= delivered[name]:
                # It had ended, and the engine was a step ahead.
                counts[name].lose(draft)
            else:
                legal = num_legal(text, draft, grammars.get(name))
                counts[name].round(draft, legal, entry)
            text += entry["emitted"]
    for name, draft in pending.items():
        counts[name].lose(draft)
    return counts


def check(
    result: dict[str, Any],
    num_drafts: int,
    names: Sequence[str],
    grammars: Mapping[str, Begins] | None = None,
) -> dict[str, Any]:
    """Check the engine's counters and each request's; return the engine's.

    Args:
        result: of a job with ``record``.
        num_drafts: K.
        names: of the requests, in the order in which they were added.
        grammars: of the requests that have one, whether a text is the beginning of one
            that it lets pass.
    """
    want = recount(result, num_drafts, names, grammars or {})
    found = dict(result["request_counts"])
    assert sorted(found) == sorted(names)
    for name in names:
        got = {key: value for key, value in found[name].items() if key != "by_source"}
        assert got == want[name].as_dict(), name
    total = result["counts"]
    for key, value in total.items():
        parts = [found[name][key] for name in names]
        if isinstance(value, int):
            assert value == sum(parts), key
        elif isinstance(value, list):
            assert value == [sum(numbers) for numbers in zip(*parts, strict=True)], key
        else:
            for source, numbers in value.items():
                for field, number in numbers.items():
                    assert number == sum(part[source][field] for part in parts)
    by_source = total["by_source"].values()
    for field in ("proposed", "verified", "accepted", "never_issued", "invalid"):
        assert total[field] == sum(numbers[field] for numbers in by_source), field
    return total
