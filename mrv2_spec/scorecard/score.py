"""The ratios that a scrape's counters give, and what they mean in words."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mrv2_spec.counters import SOURCES, Totals, ratio
from mrv2_spec.errors import UserError
from mrv2_spec.metrics import names
from mrv2_spec.metrics.names import Counter
from mrv2_spec.scorecard.scrape import Sample

_LABELS = {counter.sample_name: counter.label for counter in names.COUNTERS}
# Counters that have a sample for each value of the same label, or one without any.
_ALIKE = [
    [counter for counter in names.COUNTERS if counter.label == label]
    for label in dict.fromkeys(_LABELS.values())
]


@dataclass(frozen=True, slots=True)
class Position:
    """What became of the drafts at one position, from 1 on."""

    position: int
    verified: int
    accepted: int

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the drafts verified here, None of nothing."""
        return self.accepted / self.verified if self.verified else None


@dataclass(frozen=True, slots=True)
class Scorecard:
    """The counters of some engines, added up.

    Args:
        models: served models.
        engines: engine numbers.
        methods: speculative methods.
        totals: all counters.
        by_source: those with a source.
        positions: what became of the drafts by position.
        accepted_lengths: rounds by number of drafts accepted, from 0 on.
        delivered_per_round: tokens that clients got per decode round, first tokens
            aside, or None where the scrape lacks vLLM's own counters.
    """

    models: tuple[str, ...]
    engines: tuple[str, ...]
    methods: tuple[str, ...]
    totals: Totals
    by_source: dict[str, Totals]
    positions: tuple[Position, ...]
    accepted_lengths: tuple[int, ...]
    delivered_per_round: float | None

    @property
    def verdict(self) -> str:
        """What speculation brings, in one line."""
        return verdict(self.totals, self.delivered_per_round)

    def as_dict(self) -> dict[str, Any]:
        """Return the scorecard as plain data; a ratio of nothing is None."""
        totals = self.totals
        return {
            "models": list(self.models),
            "engines": list(self.engines),
            "methods": list(self.methods),
            "counters": asdict(totals),
            "grammar_survival": totals.grammar_survival if totals.proposed else None,
            "conditional_acceptance": totals.acceptance if totals.verified else None,
            "yield": totals.draft_yield if totals.proposed else None,
            "coverage": totals.coverage,
            "mean_acceptance_length": totals.mean_acceptance_length,
            "tokens_per_step": self.delivered_per_round,
            "by_source": {name: asdict(one) for name, one in self.by_source.items()},
            "positions": [
                {**asdict(one), "acceptance": one.acceptance} for one in self.positions
            ],
            "accepted_lengths": list(self.accepted_lengths),
            "verdict": self.verdict,
        }


def score(
    samples: Sequence[Sample], model: str | None = None, engine: str | None = None
) -> Scorecard:
    """Add up the samples of all engines, or of those asked for.

    Args:
        samples: a scrape.
        model: only this served model.
        engine: only this engine number.

    Raises:
        UserError: there are no such counters or not all of them, or nothing was counted
            yet.
    """
    ours = [s for s in samples if s.name.startswith(names.PREFIX)]
    if not ours:
        raise UserError(
            "the scrape has no mrv2_spec counters; is the plugin active in that "
            "server (mrv2-spec doctor tells), with VLLM_USE_V2_MODEL_RUNNER=1 and one "
            "of its methods?"
        )

    def wanted(sample: Sample) -> bool:
        return (model is None or sample.labels.get("model_name") == model) and (
            engine is None or sample.labels.get("engine") == engine
        )

    chosen = [s for s in ours if wanted(s)]
    if not chosen:
        models, engines = _values(ours, "model_name"), _values(ours, "engine")
        given = (("model", model), ("engine", engine))
        asked = [f"{name} {value}" for name, value in given if value is not None]
        raise UserError(
            f"no mrv2_spec counters of {' and '.join(asked)}; the scrape has models "
            f"{', '.join(models)} and engines {', '.join(engines)}"
        )
    _check_that_all_is_there(chosen)
    read = _reader(chosen)
    if read(names.ROUNDS) == 0:
        raise UserError(
            "no decode round was counted yet; send the server some requests first"
        )
    by_source = {name: _of_source(read, name) for name in SOURCES}
    return Scorecard(
        models=_values(chosen, "model_name"),
        engines=_values(chosen, "engine"),
        methods=_values(chosen, "method"),
        totals=_totals(read),
        by_source={name: one for name, one in by_source.items() if one.proposed},
        positions=tuple(
            Position(
                int(at) + 1, read(names.VERIFIED_AT, at), read(names.ACCEPTED_AT, at)
            )
            for at in sorted(_values(chosen, "position"), key=int)
        ),
        accepted_lengths=tuple(
            read(names.LENGTHS, length)
            for length in sorted(_values(chosen, "length"), key=int)
        ),
        delivered_per_round=_delivered(
            [s for s in samples if wanted(s)], read(names.ROUNDS)
        ),
    )


def _check_that_all_is_there(samples: Sequence[Sample]) -> None:
    """Refuse counters that lack some: what is missing would be taken for zero.

    An engine publishes all of them from its start, each with the same sources, and
    with the same positions.

    Raises:
        UserError: something is missing.
    """
    labels: dict[tuple[str, str], dict[str, set[str | None]]] = {}
    for s in samples:
        whose = (s.labels.get("model_name", ""), s.labels.get("engine", ""))
        found = labels.setdefault(whose, {})
        label = _LABELS.get(s.name)
        found.setdefault(s.name, set()).add(s.labels.get(label) if label else None)
    for (_, engine), found in labels.items():
        for alike in _ALIKE:
            complete = set().union(*(found.get(c.sample_name, set()) for c in alike))
            for counter in alike:
                if not complete or found.get(counter.sample_name) != complete:
                    raise UserError(
                        f"the scrape is cut short: {counter.sample_name} of engine "
                        f"{engine} is not all there; save it again"
                    )


def _values(samples: Sequence[Sample], label: str) -> tuple[str, ...]:
    return tuple(sorted({s.labels[label] for s in samples if label in s.labels}))


def _reader(samples: Sequence[Sample]) -> Callable[..., int]:
    def read(counter: Counter, value: str | None = None) -> int:
        return round(
            sum(
                s.value
                for s in samples
                if s.name == counter.sample_name
                and (value is None or s.labels.get(counter.label or "") == value)
            )
        )

    return read


def _totals(read: Callable[..., int]) -> Totals:
    fields = {field: read(counter) for counter, field in names.BY_SOURCE.items()}
    return Totals(**fields, rounds=read(names.ROUNDS), fillers=read(names.FILLERS))


def _of_source(read: Callable[..., int], source: str) -> Totals:
    totals = _totals(lambda counter: read(counter, source))
    # Rounds without a draft have no source.
    return replace(totals, rounds=totals.rounds_with_draft)


def _delivered(samples: Sequence[Sample], rounds: int) -> float | None:
    found = {}
    for name in (
        "vllm:generation_tokens_total",
        # One first token a request: it came from the prefill, not from a round.
        "vllm:time_to_first_token_seconds_count",
    ):
        values = [s.value for s in samples if s.name == name]
        if not values:
            return None
        found[name] = sum(values)
    generated, first = found.values()
    return (generated - first) / rounds


def verdict(totals: Totals, delivered_per_round: float | None = None) -> str:
    """Say in one line what speculation brings, and where most drafts are lost.

    Args:
        totals: all counters.
        delivered_per_round: as in `Scorecard`. Accepted drafts past the end of a
            request were not delivered.
    """
    if not totals.proposed:
        return (
            f"No draft in {totals.rounds} decode rounds: this text does not repeat "
            "itself or what is remembered, and speculation brings nothing here."
        )
    per_round = delivered_per_round or totals.mean_acceptance_length
    saved = 1 - 1 / per_round
    gain = f"{per_round:.2f} tokens a decode round: "
    if saved < 0.05:
        gain += "speculation saves next to nothing."
    else:
        gain += f"{saved:.0%} of the rounds are saved."
    rejected = totals.verified - totals.accepted
    losses = {
        "a grammar rules them out (look at what the prompt shows of other formats)":
            totals.invalid,
        "they are not issued (the trimmer, the token budget, or the request's end)":
            totals.never_issued,
        "the target rejects them (longer matches or fewer drafts would waste less)":
            rejected,
    }  # fmt: skip
    reason, lost = max(losses.items(), key=lambda item: item[1])
    share = ratio(lost, totals.proposed)
    if share < 0.1:
        return f"{gain} Few drafts are lost: {totals.draft_yield:.0%} are accepted."
    why = f"{gain} {share:.0%} of the drafts are lost because {reason}."
    if totals.coverage < 0.2:
        return f"{why} Only {totals.coverage:.0%} of the rounds have a draft at all."
    return why
