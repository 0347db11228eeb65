"""What a drafter proposes at every position of recorded trajectories, found once.

A trajectory is forced, so a draft depends on the position alone (n-gram: exactly;
suffix: but for what others wrote meanwhile). A record holds, for each position, the
number of draft tokens, how many of its leading ones are right, where it was copied
from, how much of the text before agrees, and the drafter's own confidences.
"""

import hashlib
import sys
import tempfile
from collections.abc import Callable
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
    trajectories: list[Trajectory], memory: bool, threshold: int | None = LONG
) -> Drafts:
    """Return what suffix drafting proposes, learning along the steps it would take.

    One request after the other shares a memory if `memory`. Positions inside an
    accepted run are drafted too, without being learned from. A fixed `threshold` (Q24)
    replaces the steered one: a low one gives long drafts, for a policy to cut; None
    steers.
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
    model = LearnedModel(settings, 1)
    made = empty(trajectories)
    slots = np.zeros(1, np.int64)
    for uid, t in enumerate(trajectories):
        row = np.array([*t.prompt, *t.output])
        prompt = len(t.prompt)
        model.start(0, uid, flags=3 if memory else 0)
        position = 1
        while position < len(t.output):
            total = prompt + position
            model.update(slots, row[None], np.array([total]), np.array([prompt]))
            # The pending draft is what the next update learns from, so the step's own
            # draft is made again after those of the positions inside its run.
            drafted = model.draft(0, row, total, prompt, MAX_DRAFTS)
            good = _record(made, made.first[uid] + position, row[total:], *drafted)
            for inner in range(position + 1, min(position + good + 1, len(t.output))):
                at = prompt + inner
                drafted = model.draft(0, row, at, prompt, MAX_DRAFTS)
                _record(made, made.first[uid] + inner, row[at:], *drafted)
            if good:
                model.draft(0, row, total, prompt, MAX_DRAFTS)
            position += good + 1
        model.slots.length[0] = -1
    return made


def find(workload: str, drafter: str, cache: Path | None = None) -> Drafts:
    """Return the records of a drafter on a workload, from the cache if there."""
    trajectories = load(workload)
    digest = hashlib.sha256(repr((drafter, trajectories)).encode())
    for source in (Path(__file__), ROOT / "tests/reference/suffix_learned.py"):
        digest.update(source.read_bytes())
    folder = cache or Path(tempfile.gettempdir()) / "mrv2_spec_drafts"
    path = folder / f"{workload}-{drafter}-{digest.hexdigest()[:12]}.npz"
    if path.exists():
        return read(path)
    kind, option, *steered = drafter.split("-")
    if kind == "ngram":
        made = ngram(trajectories, option == "latest")
    else:
        made = suffix(trajectories, option == "memory", None if steered else LONG)
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
