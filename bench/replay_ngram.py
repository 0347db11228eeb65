"""Accepted tokens a step of n-gram drafting, by tie rule, on recorded texts.

    python bench/replay_ngram.py DATA_DIR [--out DIR]

Replays each text greedily: a step drafts from the tokens so far, accepts the longest
prefix that the text continues with, and emits one token more. Every 50th draft is
compared with the plain reference.
"""

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import RESULTS, machine, save

from mrv2_spec.kernels.propose_ngram import propose_ngram_ref

FILES = ("smollm2_spec_bench", "reference_spec_bench", "code_edit", "agentic")
MIN_N, MAX_N = 2, 4


class Index:
    """Where each n-gram of a growing text ended first, or last."""

    def __init__(self, tokens: list[int], latest: bool) -> None:
        self.tokens: list[int] = []
        self.latest = latest
        self.ends: dict[tuple[int, ...], int] = {}
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Add a token; an n-gram is found only once another token follows it."""
        end = len(self.tokens)
        for n in range(MIN_N, min(MAX_N, end) + 1):
            gram = tuple(self.tokens[end - n :])
            if self.latest or gram not in self.ends:
                self.ends[gram] = end
        self.tokens.append(token)

    def draft(self, k: int) -> list[int]:
        """Return at most k tokens that followed the longest earlier copy."""
        for n in range(MAX_N, MIN_N - 1, -1):
            end = self.ends.get(tuple(self.tokens[-n:]))
            if len(self.tokens) > n and end is not None:
                return self.tokens[end : end + k]
        return []


def load(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the recorded requests of a file."""
    with gzip.open(path, "rt") as file:
        yield from map(json.loads, file)


def replay(path: Path, k: int, latest: bool) -> dict[str, float]:
    """Replay one file and return its totals."""
    totals: Counter[str] = Counter()
    for request in load(path):
        output = request["output_token_ids"]
        index = Index([*request["prompt_token_ids"], output[0]], latest)
        emitted = 1
        while emitted < len(output):
            draft = index.draft(k)
            if totals["steps"] % 50 == 0:
                expected, _ = propose_ngram_ref(
                    index.tokens,
                    num_steps=k,
                    min_n=MIN_N,
                    max_n=MAX_N,
                    max_model_len=2**31,
                    latest=latest,
                )
                if draft != expected:
                    raise SystemExit(f"{path}: {draft} is not {expected}")
            rest = output[emitted:]
            accepted = 0
            while accepted < min(len(draft), len(rest)):
                if draft[accepted] != rest[accepted]:
                    break
                accepted += 1
            new = rest[: accepted + 1]
            for token in new:
                index.append(token)
            emitted += len(new)
            totals.update(
                steps=1,
                tokens=len(new),
                drafted=len(draft),
                accepted=accepted,
                drafting_steps=bool(draft),
            )
    return {
        **totals,
        "tokens_per_step": totals["tokens"] / totals["steps"],
        "coverage": totals["drafting_steps"] / totals["steps"],
    }


def main() -> None:
    """Replay every file and write ``replay_ngram.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    results = []
    print(f"{'file':24s}{'k':>4s}  {'tie':9s}{'tokens/step':>12s}{'drafted':>9s}")
    for k in (5, 16):
        for tie in ("earliest", "latest"):
            found = [
                {
                    "file": name,
                    **replay(args.data / f"{name}.jsonl.gz", k, tie == "latest"),
                }
                for name in FILES
            ]
            steps = sum(f["steps"] for f in found)
            drafted = sum(f["drafted"] for f in found)
            total = sum(f["tokens"] for f in found) / steps
            found.append(
                {
                    "file": "all",
                    "steps": steps,
                    "tokens_per_step": total,
                    "drafted": drafted,
                }
            )
            for f in found:
                print(
                    f"{f['file']:24s}{k:4d}  {tie:9s}{f['tokens_per_step']:12.3f}"
                    f"{f['drafted']:9d}",
                    flush=True,
                )
            results.append({"k": k, "tie": tie, "files": found})
    record = {**machine(), "min_n": MIN_N, "max_n": MAX_N, "results": results}
    print("saved", save("replay_ngram", record, args.out))


if __name__ == "__main__":
    main()
