"""Recorded texts as forced trajectories: the grid's workloads.

Every trajectory of a workload has the same length, so that all requests of a round
decode together. A file with fewer texts than requests is used again with its tokens
renamed (one fixed permutation of the vocabulary a copy): a copy repeats itself exactly
as its original does, and shares nothing with it that a memory could draft from.
"""

import gzip
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SEED = 20261130
# A text that ends so repeats the last tokens of a shorter text over and over.
LOOP_TAIL = 96
LOOP_PERIOD = 48
MID_REPLACED = 24
# Of the recorded texts' tokenizer.
TEXT_VOCAB_SIZE = 49152
AGENTIC_WARM = 36
# Prompts of one `low` trajectory together.
LOW_PROMPT_TOKENS = 1200
# What a line of a recorded file has.
_TEXT = {"prompt_token_ids", "output_token_ids", "category"}


class DataMissing(RuntimeError):
    """A recorded file is not where it should be, or cut short; one line."""


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt and the output that is forced upon the model."""

    prompt: list[int]
    output: list[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run of a point does: rounds of requests that start together.

    The requests of ``warm`` run first and are not measured; ``stages`` holds the
    measured rounds, in stages that are reported apart (one, but for ``shift``).
    """

    warm: list[list[Item]]
    stages: list[list[list[Item]]]

    @property
    def rounds(self) -> list[list[Item]]:
        """All measured rounds in order."""
        return [one for stage in self.stages for one in stage]


def data_folder() -> Path:
    """Return the folder of recorded texts."""
    shared = os.environ.get("MRV2_SPEC_SHARED", ROOT.parent / "shared")
    return Path(shared) / "data"


def load(name: str) -> list[dict[str, Any]]:
    """Return one recorded file's lines."""
    path = data_folder() / f"{name}.jsonl.gz"
    if not path.is_file():
        raise DataMissing(f"no {path}; MRV2_SPEC_SHARED names the folder that has data")
    try:
        with gzip.open(path, "rt") as lines:
            texts = [json.loads(line) for line in lines]
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise DataMissing(f"{path} is cut short or damaged: {error}") from error
    if not texts or not all(isinstance(t, dict) and t.keys() >= _TEXT for t in texts):
        raise DataMissing(f"{path} holds no recorded texts")
    return texts


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Tell whether a reply ends in an exact loop (the last 96 tokens, period to 48)."""
    tail = list(tokens[-LOOP_TAIL:])
    return len(tail) == LOOP_TAIL and any(
        tail[period:] == tail[:-period] for period in range(1, LOOP_PERIOD + 1)
    )


def _recorded(name: str, length: int) -> list[Item]:
    return [
        Item(line["prompt_token_ids"], line["output_token_ids"][:length])
        for line in load(name)
        if len(line["output_token_ids"]) >= length
    ]


def low(length: int) -> list[Item]:
    """Spec-Bench reference answers, short ones joined with their prompts.

    Most answers are short: questions of one category are asked together and answered
    one after the other, until the answers have the length.
    """
    by_category = defaultdict(list)
    for line in load("reference_spec_bench"):
        by_category[line["category"]].append(line)
    items = []
    for lines in by_category.values():
        prompt: list[int] = []
        output: list[int] = []
        for line in lines:
            if len(prompt) + len(line["prompt_token_ids"]) > LOW_PROMPT_TOKENS:
                prompt, output = [], []
            prompt = prompt + line["prompt_token_ids"]
            output = output + line["output_token_ids"]
            if len(output) >= length:
                items.append(Item(prompt, output[:length]))
                prompt, output = [], []
    return items


def low_smollm2(length: int) -> list[Item]:
    """SmolLM2's own answers."""
    return _recorded("smollm2_spec_bench", length)


def low_smollm2_noloop(length: int) -> list[Item]:
    """SmolLM2's own answers, without those that end in a loop."""
    return [
        Item(line["prompt_token_ids"], line["output_token_ids"][:length])
        for line in load("smollm2_spec_bench")
        if len(line["output_token_ids"]) >= length
        and not ends_in_loop(line["output_token_ids"])
    ]


def mid(length: int) -> list[Item]:
    """Code excerpts copied with one token in 24 replaced at random."""
    rng = np.random.default_rng([SEED, 1])
    items = []
    for line in load("code_edit"):
        excerpt = line["output_token_ids"][:length]
        if len(excerpt) < length:
            continue
        replaced = rng.random(length) < 1 / MID_REPLACED
        random = rng.integers(3, TEXT_VOCAB_SIZE, size=length)
        copy = [
            int(new) if change else old
            for old, new, change in zip(excerpt, random, replaced, strict=True)
        ]
        items.append(Item(excerpt, copy))
    return items


def high(length: int) -> list[Item]:
    """Edited copies of code."""
    return _recorded("code_edit", length)


def agentic(length: int) -> list[Item]:
    """Function-call records and step logs."""
    return _recorded("agentic", length)


# name -> (its texts, output tokens of each)
WORKLOADS: dict[str, tuple[Callable[[int], list[Item]], int]] = {
    "low": (low, 128),
    "low-smollm2": (low_smollm2, 160),
    "low-smollm2-noloop": (low_smollm2_noloop, 160),
    "mid": (mid, 160),
    "high": (high, 192),
    "agentic": (agentic, 156),
    "agentic-cold": (agentic, 156),
}
SHIFT = "shift"
# Rounds of each stage of `shift`: prose, code edits, prose. Enough for more than 200
# steps even where each step brings eight tokens.
SHIFT_STAGES = (("low", 3), ("high", 12), ("low", 3))
NAMES = (*WORKLOADS, SHIFT)


def renamed(items: Sequence[Item], copy: int, vocab_size: int) -> list[Item]:
    """Return items with their tokens renamed by the copy's permutation; 0: as is.

    A vocabulary smaller than the texts' own (of a tiny model) folds them into it.
    """
    if copy == 0:
        permutation = np.arange(vocab_size)
    else:
        permutation = np.random.default_rng([SEED, 2, copy]).permutation(vocab_size)
    permutation = np.resize(permutation, max(vocab_size, TEXT_VOCAB_SIZE))
    return [
        Item(permutation[item.prompt].tolist(), permutation[item.output].tolist())
        for item in items
    ]


def _take(items: list[Item], number: int, vocab_size: int) -> list[Item]:
    copies = -(-number // len(items))
    taken = [
        item for copy in range(copies) for item in renamed(items, copy, vocab_size)
    ]
    return taken[:number]


def num_rounds(concurrency: int) -> int:
    """Return the rounds of a run: a few requests are too few texts for a mean."""
    return max(1, min(4, 8 // concurrency))


def make_plan(name: str, concurrency: int, vocab_size: int, length: int = 0) -> Plan:
    """Return what a run of a point does; the same in every process.

    Args:
        name: one of ``NAMES``.
        concurrency: requests of a round.
        vocab_size: the model's.
        length: output tokens of each request; 0 is the workload's own.

    Raises:
        DataMissing: the texts are not there, or none is so long.
    """
    if name == SHIFT:
        return _shift_plan(concurrency, vocab_size, length)
    # Some of the agentic texts teach the memory, the others are measured.
    num_lessons = AGENTIC_WARM if WORKLOADS[name][0] is agentic else 0
    items = _texts(name, length, num_lessons)
    lessons, items = items[:num_lessons], items[num_lessons:]
    rounds = num_rounds(concurrency)
    warm: list[list[Item]] = []
    if name == "agentic":
        # A copy of the measured ones needs a copy of the lessons.
        copies = -(-rounds * concurrency // len(items))
        warm = [renamed(lessons, copy, vocab_size) for copy in range(copies)]
    taken = _take(items, rounds * concurrency, vocab_size)
    return Plan(warm, [_split(taken, concurrency)])


def real_rounds(concurrency: int, rounds: int, length: int = 0) -> list[list[Item]]:
    """Return rounds of chat prompts for the model that once answered them.

    Only prompts whose recorded answer has the length: what a model says behind the end
    of its answer tells nothing.

    Args:
        concurrency: requests of a round.
        rounds: how many.
        length: output tokens of each request; 0 is the workload's own.
    """
    items = _shuffled(low_smollm2(length or WORKLOADS["low-smollm2"][1]))
    number = rounds * concurrency
    if len(items) < number:
        raise ValueError(f"{len(items)} prompts are too few for {number} requests")
    return _split(items[:number], concurrency)


def mixed_rounds(
    rounds: int, requests: int, vocab_size: int, length: int = 0
) -> list[list[Item]]:
    """Return rounds of requests of several workloads, side by side.

    Args:
        rounds: how many.
        requests: of a round.
        vocab_size: the model's.
        length: output tokens of each request; 0: each workload's own, so that requests
            end, and others begin, at different times.
    """
    names = ("low", "high", "agentic", "mid")
    share = -(-rounds * requests // len(names))
    taken = []
    for name in names:
        taken.append(_take(_texts(name, length), share, vocab_size))
    mixed = [item for items in zip(*taken, strict=True) for item in items]
    return _split(mixed[: rounds * requests], requests)


def _shift_plan(concurrency: int, vocab_size: int, length: int) -> Plan:
    stages = []
    # Where in its file each workload goes on: no text comes twice.
    used: dict[str, int] = defaultdict(int)
    for name, rounds in SHIFT_STAGES:
        items = _texts(name, length)
        start, end = used[name], used[name] + rounds * concurrency
        used[name] = end
        stages.append(_split(_take(items, end, vocab_size)[start:], concurrency))
    return Plan([], stages)


def _texts(name: str, length: int, more_than: int = 0) -> list[Item]:
    """Return a workload's texts, shuffled; more than so many."""
    make, own_length = WORKLOADS[name]
    items = _shuffled(make(length or own_length))
    if len(items) <= more_than:
        raise DataMissing(f"too few texts have {length or own_length} output tokens")
    return items


def _shuffled(items: list[Item]) -> list[Item]:
    order = np.random.default_rng([SEED, 3]).permutation(len(items))
    return [items[i] for i in order]


def _split(items: list[Item], size: int) -> list[list[Item]]:
    return [items[i : i + size] for i in range(0, len(items), size)]
