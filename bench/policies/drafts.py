"""What a drafter proposes at every position of recorded trajectories, found once.

A trajectory is forced, so a draft depends on the position alone (n-gram: exactly;
suffix: but for what others wrote meanwhile). A record holds, for each position, the
number of draft tokens, how many of its leading ones are right, where it was copied
from, how much of the text before agrees, and the drafter's own confidences.
"""

import hashlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .workloads import ROOT, Trajectory, load

sys.path.insert(0, str(ROOT))

from mrv2_spec.kernels.suffix_state import SuffixSettings
from tests.reference.suffix_learned import LearnedModel

try:
    from numba import njit
except ImportError:

    def njit(function: Callable[..., Any]) -> Callable[..., Any]:
        """Leave the function as it is."""
        return function


MAX_DRAFTS = 16
WINDOW = 32
MIN_N, MAX_N = 2, 4
# A draft that is right with less than one chance in twenty is not made.
LONG = 2**24 // 20
DRAFTERS = (
    "ngram-earliest",
    "ngram-latest",
    "suffix-own",
    "suffix-memory",
    "suffix-own-steered",
    "suffix-memory-steered",
)


@dataclass
class Drafts:
    """Records of all positions; those of trajectory t start at `first[t]`.

    Position p of a trajectory is the state in which p output tokens are known, so
    position 0 is never used and the first token comes from the prefill.
    """

    first: np.ndarray  # [trajectories]
    length: np.ndarray  # [trajectories] output tokens
    num: np.ndarray  # [positions] drafted tokens
    right: np.ndarray  # [positions] leading right ones
    source: np.ndarray  # [positions] index in the row where the copy starts, or -1
    match: np.ndarray  # [positions] match length, capped at MAX_N
    run: np.ndarray  # [positions] the same, capped at WINDOW
    again: np.ndarray  # [positions] what agrees behind the first difference
    confidence: np.ndarray  # [positions, MAX_DRAFTS] the drafter's own, or 0

    def limited(self, k: int) -> "Drafts":
        """Return the records of the same drafter with k drafts at most."""
        return Drafts(
            self.first,
            self.length,
            np.minimum(self.num, k),
            np.minimum(self.right, k),
            self.source,
            self.match,
            self.run,
            self.again,
            self.confidence[:, :k],
        )

    def save(self, path: Path) -> None:
        """Write the records."""
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **vars(self))


def read(path: Path) -> Drafts:
    """Read records."""
    with np.load(path) as found:
        return Drafts(**{name: found[name] for name in found.files})


def empty(trajectories: list[Trajectory]) -> Drafts:
    """Return records without drafts."""
    length = np.array([len(t.output) for t in trajectories])
    first = np.concatenate([[0], np.cumsum(length)[:-1]])
    total = int(length.sum())
    zeros = [np.zeros(total, np.int32) for _ in range(6)]
    zeros[2][:] = -1
    return Drafts(first, length, *zeros, np.zeros((total, MAX_DRAFTS), np.float32))


@njit
def _agreement(row: Any, a: int, b: int) -> Any:
    """Return how much agrees before a and b, and again behind the difference."""
    run = 0
    while run < WINDOW and a - run >= 0 and row[a - run] == row[b - run]:
        run += 1
    again = 0
    while (
        again < WINDOW
        and a - run - 1 - again >= 0
        and row[a - run - 1 - again] == row[b - run - 1 - again]
    ):
        again += 1
    return run, again


@njit
def _ngram_row(
    row: Any,
    prompt: int,
    min_n: int,
    max_n: int,
    latest: bool,
    k: int,
    num: Any,
    right: Any,
    source: Any,
    match: Any,
    run: Any,
    again: Any,
) -> None:
    for position in range(1, len(row) - prompt):
        total = prompt + position
        best = 0
        start = -1
        for end in range(total - 1):
            if row[end] != row[total - 1]:
                continue
            size = 1
            while (
                size < max_n
                and end - size >= 0
                and row[end - size] == row[total - 1 - size]
            ):
                size += 1
            if size >= min_n and (size > best or (latest and size == best)):
                best = size
                start = end + 1
        if best == 0:
            continue
        num[position] = min(k, total - start)
        source[position] = start
        match[position] = best
        run[position], again[position] = _agreement(row, start - 1, total - 1)
        good = 0
        while (
            good < num[position]
            and total + good < len(row)
            and row[start + good] == row[total + good]
        ):
            good += 1
        right[position] = good


def ngram(trajectories: list[Trajectory], latest: bool) -> Drafts:
    """Return what n-gram drafting proposes from each request's own text."""
    made = empty(trajectories)
    for t, first in zip(trajectories, made.first, strict=True):
        part = slice(first, first + len(t.output))
        _ngram_row(
            np.array([*t.prompt, *t.output]),
            len(t.prompt),
            MIN_N,
            MAX_N,
            latest,
            MAX_DRAFTS,
            *(
                values[part]
                for values in (
                    made.num,
                    made.right,
                    made.source,
                    made.match,
                    made.run,
                    made.again,
                )
            ),
        )
    return made


def suffix(
    rounds: Sequence[Sequence[Trajectory]], memory: bool, threshold: int | None = LONG
) -> Drafts:
    """Return what suffix drafting proposes, learning along the steps it would take.

    The requests of a round go on side by side, each step of them at once; one round
    follows the other. All share a memory if `memory`. Positions inside an accepted run
    are drafted too, without being learned from. A fixed `threshold` (Q24) replaces the
    steered one: a low one gives long drafts, for a policy to cut; None steers.
    """
    settings = SuffixSettings(
        num_speculative_tokens=MAX_DRAFTS, corpus_tokens=2**20, num_buckets=2**14
    )
    if threshold is not None:
        settings = SuffixSettings(
            num_speculative_tokens=MAX_DRAFTS,
            corpus_tokens=2**20,
            num_buckets=2**14,
            first_threshold=threshold,
            min_threshold=threshold,
            max_threshold=threshold,
        )
    model = LearnedModel(settings, max(map(len, rounds)))
    made = empty([t for one in rounds for t in one])
    uid = 0
    for one in rounds:
        for slot in range(len(one)):
            model.start(slot, uid + slot, flags=3 if memory else 0)
        _suffix_round(model, one, made.first[uid : uid + len(one)], made)
        uid += len(one)
        model.slots.length[:] = -1
    return made


def _suffix_round(
    model: LearnedModel, texts: Sequence[Trajectory], first: np.ndarray, made: Drafts
) -> None:
    rows = np.zeros(
        (len(texts), max(len(t.prompt) + len(t.output) for t in texts)), int
    )
    for row, t in zip(rows, texts, strict=True):
        row[: len(t.prompt) + len(t.output)] = [*t.prompt, *t.output]
    prompts = np.array([len(t.prompt) for t in texts])
    position = np.ones(len(texts), int)
    lengths = np.array([len(t.output) for t in texts])
    while (slots := np.flatnonzero(position < lengths)).size:
        totals = (prompts + position)[slots]
        model.update(slots, rows[slots], totals, prompts[slots])
        for slot, total in zip(slots.tolist(), totals.tolist(), strict=True):
            prompt, end = int(prompts[slot]), int(prompts[slot] + lengths[slot])
            row, at = rows[slot, :end], int(first[slot]) - prompt
            # The pending draft is what the next update learns from, so the step's own
            # draft is made again after those of the positions inside its run.
            drafted = model.draft(slot, row, total, prompt, MAX_DRAFTS)
            good = _record(made, at + total, row[total:], *drafted)
            for inner in range(total + 1, min(total + good + 1, end)):
                drafted = model.draft(slot, row, inner, prompt, MAX_DRAFTS)
                _record(made, at + inner, row[inner:], *drafted)
            if good:
                model.draft(slot, row, total, prompt, MAX_DRAFTS)
            position[slot] += good + 1


def find(workload: str, drafter: str, cache: Path | None = None) -> Drafts:
    """Return the records of a drafter on a workload, each request after the other."""
    return find_rounds([[t] for t in load(workload)], workload, drafter, cache)


def find_rounds(
    rounds: Sequence[Sequence[Trajectory]],
    name: str,
    drafter: str,
    cache: Path | None = None,
) -> Drafts:
    """Return the records of a drafter on rounds, from the cache if they are there."""
    digest = hashlib.sha256(repr((drafter, rounds)).encode())
    for source in (Path(__file__), ROOT / "tests/reference/suffix_learned.py"):
        digest.update(source.read_bytes())
    folder = cache or Path(tempfile.gettempdir()) / "mrv2_spec_drafts"
    path = folder / f"{name}-{drafter}-{digest.hexdigest()[:12]}.npz"
    if path.exists():
        return read(path)
    kind, option, *steered = drafter.split("-")
    if kind == "ngram":
        made = ngram([t for one in rounds for t in one], option == "latest")
    else:
        made = suffix(rounds, option == "memory", None if steered else LONG)
    made.save(path)
    return made


def _record(
    made: Drafts, at: int, truth: Any, tokens: list[int], chances: list[float]
) -> int:
    good = 0
    while good < min(len(tokens), len(truth)) and tokens[good] == truth[good]:
        good += 1
    made.num[at] = len(tokens)
    made.right[at] = good
    made.confidence[at, : len(tokens)] = chances
    return good
