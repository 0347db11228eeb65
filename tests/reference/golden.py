"""Replays the recorded streams of the CPU suffix cache through the count model."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.reference.suffix import Draft, Rules, SuffixModel


def golden_path() -> Path:
    """Return the recorded streams; `MRV2_SPEC_SHARED` names another data folder."""
    root = Path(__file__).resolve().parents[2]
    shared = Path(os.environ.get("MRV2_SPEC_SHARED", root.parent / "shared"))
    return shared / "golden" / "suffix_arctic.jsonl.gz"


def load_runs() -> dict[str, list[dict[str, Any]]]:
    """Return the requests of each run, in order of arrival."""
    runs: dict[str, list[dict[str, Any]]] = {}
    with gzip.open(golden_path(), "rt") as lines:
        for line in lines:
            rec = json.loads(line)
            name = rec.get("run") or f"local_{rec['stream']}"
            runs.setdefault(name, []).append(rec)
    return runs


def calls(run: list[dict[str, Any]]) -> Iterator[tuple[str, int, int]]:
    """Yield the recorded calls: ("start" | "add" | "draft" | "stop", request, step)."""
    schedule = run[0].get("schedule", "sequential")
    lengths = [len(rec["output_token_ids"]) for rec in run]
    if schedule == "sequential":
        for r, num in enumerate(lengths):
            yield "start", r, 0
            for s in range(num):
                yield "add", r, s
                if s < num - 1:
                    yield "draft", r, s
            yield "stop", r, 0
        return
    waiting = list(range(len(run)))
    active: list[int] = []
    done = Counter[int]()
    while waiting or active:
        while waiting and len(active) < 8:
            active.append(waiting.pop(0))
        drafts = []
        for r in active:
            if done[r] == 0:
                yield "start", r, 0
            yield "add", r, done[r]
            if done[r] < lengths[r] - 1:
                drafts.append(("draft", r, done[r]))
                if schedule == "interleaved":
                    yield drafts.pop()
            done[r] += 1
        yield from drafts
        finished = [r for r in active if done[r] == lengths[r]]
        for r in finished:
            yield "stop", r, 0
        active = [r for r in active if r not in finished]


def matches(got: Draft, rec: dict[str, Any], step: int) -> bool:
    """Tell whether a draft equals the recorded one."""
    tokens = tuple(rec["draft"][step])
    if got.tokens != tokens:
        return False
    if not tokens:
        return True
    near = abs(got.score - rec["score"][step]) < 1e-4 and all(
        abs(a - b) < 1e-4 for a, b in zip(got.probs, rec["probs"][step], strict=True)
    )
    source = rec["src"][step] if "src" in rec else got.source
    return near and got.match_len == rec["match_len"][step] and got.source == source


def replay(run: list[dict[str, Any]], every: int = 1) -> Counter[str]:
    """Count exact, allowed and wrong steps of one run, checking one step in `every`."""
    rules = Rules(
        max_tree_depth=run[0]["max_tree_depth"],
        max_spec_tokens=run[0]["max_spec_tokens"],
        min_token_prob=run[0]["min_token_prob"],
    )
    model = SuffixModel(rules, run[0]["max_cached_requests"])
    texts = [list(rec["prompt_token_ids"]) for rec in run]
    result = Counter[str]()
    for call, r, step in calls(run):
        rec = run[r]
        if call == "start":
            model.start(r, rec["prompt_token_ids"])
        elif call == "stop":
            model.stop(r)
        elif call == "add":
            tok = rec["output_token_ids"][step]
            model.add(r, [tok])
            texts[r].append(tok)
        elif (step + r) % every == 0:
            context = texts[r][-rules.max_tree_depth :]
            for factor in ("1.0", "2.0"):
                want = rec["steps"][factor]
                model.rules = replace(rules, max_spec_factor=float(factor))
                result["steps"] += 1
                if want["ambiguous"][step] == 0:
                    ok = matches(model.draft(r, context), want, step)
                    result["exact" if ok else "wrong"] += 1
                else:
                    allowed = model.allowed(r, context)
                    ok = any(matches(d, want, step) for d in allowed)
                    result["allowed" if ok else "wrong"] += 1
    return result
