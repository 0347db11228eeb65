"""From what each engine step brought to the figures of a point. Pure functions."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from grid.steps_seen import PARTS

# Steps of each stage of `shift` that are left out: drafters are still learning.
LEARNING_STEPS = 200
# What a point is recorded with of what was in force in its engine.
IN_FORCE = ("async_scheduling", "cudagraph_mode")


@dataclass(slots=True)
class Round:
    """One round's steps, as the engine's process timed them.

    Attributes:
        released: when the requests, all queued, were let go (``time.monotonic``).
        prompt_tokens: of all requests.
        steps: each step's time and, by request, its new tokens.
        draft_tokens: drafts scheduled, of vLLM's metrics.
        accepted_tokens: drafts accepted, of vLLM's metrics.
    """

    released: float
    prompt_tokens: int = 0
    steps: list[tuple[float, dict[int, int]]] = field(default_factory=list)
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """What a round amounts to.

    Attributes:
        tpot_ms: each request's, first to last token.
        tokens: output tokens.
        seconds: from release to the last token.
        prompt_tokens: of all requests.
        prefill_seconds: from release until every request had its first token.
        together: whether all requests got their first token in the same step, so that
            no prefill falls between their tokens.
        decode_tokens: tokens after each request's first.
        decode_rounds: steps of a request that brought those.
    """

    tpot_ms: list[float]
    tokens: int
    seconds: float
    prompt_tokens: int
    prefill_seconds: float
    together: bool
    decode_tokens: int
    decode_rounds: int


def round_figures(one: Round) -> RoundFigures:
    """Sum a round up."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    tokens: dict[int, int] = {}
    rounds = dict[int, int]()
    decode_tokens = 0
    for time, new in one.steps:
        for request, number in new.items():
            if request in first:
                rounds[request] = rounds.get(request, 0) + 1
                decode_tokens += number
            first.setdefault(request, time)
            last[request] = time
            tokens[request] = tokens.get(request, 0) + number
    tpot = [
        (last[request] - first[request]) / (number - 1) * 1000
        for request, number in sorted(tokens.items())
        if number > 1
    ]
    return RoundFigures(
        tpot_ms=tpot,
        tokens=sum(tokens.values()),
        seconds=max(last.values()) - one.released,
        prompt_tokens=one.prompt_tokens,
        prefill_seconds=max(first.values()) - one.released,
        together=len(set(first.values())) == 1,
        decode_tokens=decode_tokens,
        decode_rounds=sum(rounds.values()),
    )


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a point: its rounds, and the counters that grew meanwhile."""

    cold: bool
    rounds: list[RoundFigures]
    counters: dict[str, int]

    @property
    def together(self) -> bool:
        """Whether every round's requests decoded together."""
        return all(one.together for one in self.rounds)

    @property
    def tpot_ms(self) -> float:
        """The mean over all requests."""
        return fmean(value for one in self.rounds for value in one.tpot_ms)


def point_figures(runs: Sequence[Run], prefill_between: bool = False) -> dict[str, Any]:
    """Return the figures of a point.

    TPOT comes from the runs whose requests decode together: the first run finds no
    prefix cache, and where its prompts do not fit one step, prefills fall between the
    tokens of those that came first. That first run tells the throughput with prefill,
    and that of the prefills, beside which requests that came first already decode.

    Args:
        runs: all runs of the point, one of them cold.
        prefill_between: take runs with prefills in between too.

    Raises:
        ValueError: no run can be timed.
    """
    timed = [run for run in runs if run.together or prefill_between]
    if not timed:
        raise ValueError("in no run did all requests get their first token together")
    means = [run.tpot_ms for run in timed]
    every = [v for run in timed for one in run.rounds for v in one.tpot_ms]
    cold = next(run for run in runs if run.cold)
    prefill_s = sum(one.prefill_seconds for one in cold.rounds)
    rounds = _sum(one.decode_rounds for run in timed for one in run.rounds)
    tokens = _sum(one.decode_tokens for run in timed for one in run.rounds)
    return {
        "tpot_ms": fmean(means),
        "tpot_runs_ms": means,
        "tpot_spread": (max(means) - min(means)) / fmean(means),
        "tpot_p99_ms": float(np.percentile(every, 99)),
        "repeats": len(timed),
        "tok_s": _sum(one.tokens for one in cold.rounds)
        / sum(one.seconds for one in cold.rounds),
        "prefill_tok_s": _sum(one.prompt_tokens for one in cold.rounds) / prefill_s,
        "prefill_s": prefill_s,
        "tokens_per_step": tokens / rounds,
        "output_tokens": _sum(one.tokens for one in cold.rounds),
        "together_cold": cold.together,
        **_counter_figures([run.counters for run in timed]),
    }


def _sum(values: Iterable[int]) -> int:
    return sum(values)


def _counter_figures(counters: Sequence[dict[str, int]]) -> dict[str, Any]:
    """Drafts: what was verified where that is counted, else what was scheduled."""
    total = {name: sum(c.get(name, 0) for c in counters) for name in counters[0]}
    figures: dict[str, Any] = dict.fromkeys(
        (
            "coverage", "drafted", "accepted", "fillers", "proposed",
            "asleep", "awake_without", "mean_budget", "expected_accepted",
            "clock_drafts", "clock_host", "reckoned_ms", "took_ms",
        )
    )  # fmt: skip
    with_drafts = total.get("steps_with", 0)
    without, asleep = total.get("steps_without", 0), total.get("steps_asleep", 0)
    steps = with_drafts + without + asleep
    if steps:
        # Shares of the steps, and the draft places of those that verified any.
        figures["asleep"] = asleep / steps
        figures["awake_without"] = without / steps
    if with_drafts:
        figures["mean_budget"] = total["budget"] / with_drafts
        figures["expected_accepted"] = total["expected"] / with_drafts / PARTS
        for name in ("clock_drafts", "clock_host"):
            figures[name] = total[name] / with_drafts / PARTS
    if timed := total.get("steps_timed", 0):
        figures["reckoned_ms"] = total["reckoned_us"] / timed / 1000
        figures["took_ms"] = total["took_us"] / timed / 1000
    if "verified" in total:
        figures["drafted"] = total["verified"]
        figures["coverage"] = (
            total["rounds_with_draft"] / total["rounds"] if total["rounds"] else 0.0
        )
        for name in ("accepted", "fillers", "proposed"):
            figures[name] = total.get(name)
    elif "draft_tokens" in total:
        figures["drafted"] = total["draft_tokens"]
        figures["accepted"] = total["accepted_tokens"]
    return figures


def stage_tpot_ms(stage: Sequence[Round], concurrency: int) -> float | None:
    """Return a stage's TPOT after its first 200 steps, or None if it is shorter.

    Only steps count that bring tokens to all requests of a round, and whose previous
    step did too: no prefill, no round that runs out.
    """
    seconds, tokens, seen = 0.0, 0, 0
    for one in stage:
        previous: float | None = None
        for time, new in one.steps:
            seen += 1
            full = len(new) == concurrency
            if full and previous is not None and seen > LEARNING_STEPS:
                seconds += time - previous
                tokens += sum(new.values())
            previous = time if full else None
    return seconds * 1000 / (tokens / concurrency) if tokens else None


def encode_run(run: Run) -> dict[str, Any]:
    """Return a run as JSON takes it."""
    return asdict(run)


def decode_run(text: dict[str, Any]) -> Run:
    """Return the run that was encoded."""
    rounds = [RoundFigures(**one) for one in text["rounds"]]
    return Run(text["cold"], rounds, text["counters"])
