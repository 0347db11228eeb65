"""What became of the drafts, in numbers that add up.

Of a decode round's real drafts (R), those from the first one on that a grammar rules
out are invalid (I); of the rest, those that the step did not verify were never issued
(N); of the verified ones (D = R - I - N), the target accepted a leading part (A).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

# Where a draft was copied from, by the number that a drafter publishes.
SOURCES = ("own", "memory")
# What a draft can be cut to: each length is at most the one before.
KINDS = ("proposed", "legal", "verified", "accepted")
PROPOSED, LEGAL, VERIFIED, ACCEPTED = range(len(KINDS))


@dataclass(frozen=True, slots=True)
class Totals:
    """Monotonic totals, in drafts unless said otherwise.

    ``proposed == verified + invalid + never_issued`` at any moment: a draft is booked
    when it is settled what became of it.
    """

    proposed: int = 0
    """Real drafts that the drafter proposed."""
    verified: int = 0
    """Real drafts that the target verified."""
    accepted: int = 0
    """Verified drafts that the target accepted."""
    never_issued: int = 0
    """Real drafts that were trimmed, not scheduled, or whose request ended."""
    invalid: int = 0
    """Real drafts that a grammar ruled out."""
    fillers: int = 0
    """Places verified without a real draft in them."""
    rounds: int = 0
    """Decode rounds: steps of a request past its prefill."""
    rounds_with_draft: int = 0
    """Decode rounds that had at least one real draft."""

    @property
    def coverage(self) -> float:
        """Share of the decode rounds that had a real draft; 0 without rounds."""
        return ratio(self.rounds_with_draft, self.rounds)

    @property
    def grammar_survival(self) -> float:
        """Share of the drafts that no grammar ruled out; 0 without drafts."""
        return ratio(self.proposed - self.invalid, self.proposed)

    @property
    def acceptance(self) -> float:
        """Accepted share of the verified drafts; 0 without any."""
        return ratio(self.accepted, self.verified)

    @property
    def draft_yield(self) -> float:
        """Accepted share of all drafts; 0 without any."""
        return ratio(self.accepted, self.proposed)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a decode round: one and the accepted drafts; 0 without rounds."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 0.0


def ratio(part: float, whole: float) -> float:
    """Return a share, 0 of nothing."""
    return part / whole if whole else 0.0


class DraftCounts:
    """Every counter of an engine or a request as one vector, so that they just add up.

    The vector holds, for each of `KINDS`, each of `SOURCES` and each length up to K,
    how many decode rounds cut their draft to that length; then the fillers, and for
    each source the drafts that were lost outside a round.

    Args:
        num_drafts: K, the most drafts a round.
        values: [size] int64, zeros if not given.
    """

    def __init__(self, num_drafts: int, values: Int64Array | None = None) -> None:
        self.num_drafts = num_drafts
        size = vector_size(num_drafts)
        self.values = np.zeros(size, dtype=np.int64) if values is None else values
        assert self.values.shape == (size,)

    @classmethod
    def from_list(cls, values: Sequence[int]) -> DraftCounts:
        """Return counts from a list of `to_list`."""
        num_drafts = (len(values) - 1 - len(SOURCES)) // (len(KINDS) * len(SOURCES)) - 1
        return cls(num_drafts, np.array(values, dtype=np.int64))

    def to_list(self) -> list[int]:
        """Return the vector as plain numbers."""
        numbers: list[int] = self.values.tolist()
        return numbers

    def __add__(self, other: DraftCounts) -> DraftCounts:
        """Return the sum."""
        return DraftCounts(self.num_drafts, self.values + other.values)

    def __sub__(self, other: DraftCounts) -> DraftCounts:
        """Return the difference."""
        return DraftCounts(self.num_drafts, self.values - other.values)

    def __eq__(self, other: object) -> bool:
        """Tell whether all counters are equal."""
        return isinstance(other, DraftCounts) and np.array_equal(
            self.values, other.values
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def lengths(self) -> Int64Array:
        """[kinds, sources, K + 1], rounds by what their draft was cut to."""
        shape = (len(KINDS), len(SOURCES), self.num_drafts + 1)
        return self.values[: np.prod(shape)].reshape(shape)

    @property
    def lost(self) -> Int64Array:
        """[sources], drafts whose request ended or was preempted before a round."""
        return self.values[-len(SOURCES) :]

    @property
    def fillers(self) -> int:
        """Places verified without a real draft in them."""
        return int(self.values[-len(SOURCES) - 1])

    def at(self, kind: int) -> Int64Array:
        """Return [sources, K], drafts of a kind at each position."""
        longer = self.lengths[kind][:, :0:-1].cumsum(axis=1)
        positions: Int64Array = longer[:, ::-1]
        return positions

    def accepted_lengths(self) -> list[int]:
        """Return [K + 1], rounds by how many drafts were accepted."""
        numbers: list[int] = self.lengths[ACCEPTED].sum(axis=0).tolist()
        return numbers

    def totals(self, source: int | None = None) -> Totals:
        """Return the totals, all or those of one source.

        Rounds without a draft and fillers have no source: with one given, the rounds
        are those with a draft of it, and there are no fillers.
        """
        which = slice(None) if source is None else slice(source, source + 1)
        lengths = self.lengths[:, which].sum(axis=1)
        lost = int(self.lost[which].sum())
        drafts = lengths @ np.arange(self.num_drafts + 1)
        proposed, legal, verified, accepted = drafts.tolist()
        with_draft = int(lengths[PROPOSED, 1:].sum())
        rounds = int(lengths[PROPOSED].sum())
        return Totals(
            proposed=proposed + lost,
            verified=verified,
            accepted=accepted,
            never_issued=legal - verified + lost,
            invalid=proposed - legal,
            fillers=self.fillers if source is None else 0,
            rounds=rounds if source is None else with_draft,
            rounds_with_draft=with_draft,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return what a request or an engine reports, as plain data."""
        totals = self.totals()
        return {
            **{name: getattr(totals, name) for name in Totals.__slots__},
            "by_source": {
                name: {
                    key: getattr(self.totals(i), key)
                    for key in ("proposed", "invalid", "never_issued", "verified")
                }
                | {"accepted": self.totals(i).accepted}
                for i, name in enumerate(SOURCES)
            },
            "verified_per_position": self.at(VERIFIED).sum(axis=0).tolist(),
            "accepted_per_position": self.at(ACCEPTED).sum(axis=0).tolist(),
            "accepted_lengths": self.accepted_lengths(),
        }


def vector_size(num_drafts: int) -> int:
    """Return the length of a counter vector for at most that many drafts."""
    return len(KINDS) * len(SOURCES) * (num_drafts + 1) + 1 + len(SOURCES)


def add_up(counts: Iterable[DraftCounts], num_drafts: int) -> DraftCounts:
    """Return the sum, zeros of nothing."""
    return sum(counts, DraftCounts(num_drafts))
