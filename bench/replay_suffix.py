"""Replay recorded replies through suffix drafting: accepted tokens a step, and at what.

    python bench/replay_suffix.py [--k K] [--local] [--in-flight N] [--reference]
        [--categories] [--out DIR]
    python bench/replay_suffix.py --variants [--out DIR]

Each step drafts from the tokens so far, accepts the longest prefix that equals the
recorded reply and emits one token more. Requests run in file order, `--in-flight` at a
time, and share one memory; a step first commits for all, then drafts for all. The
learned scoring runs as its plain model, which Numba compiles and the tests hold equal
to the device versions; `--reference` runs the plain model of the reference scoring.
A file in which replies end in an exact loop is replayed once more without them. The
figures of arctic-inference, recorded one request at a time, stand beside ours.
A file that is missing or damaged is left out and named.
`--variants` changes one setting at a time and saves the totals of each file.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from grid.workloads import DataMissing, ends_in_loop
from grid.workloads import load as read
from harness import RESULTS, machine, save

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mrv2_spec.kernels.suffix_state import SuffixSettings  # noqa: E402
from tests.reference.suffix import Rules, SuffixModel  # noqa: E402
from tests.reference.suffix_learned import LearnedModel  # noqa: E402

SHARED = Path(os.environ.get("MRV2_SPEC_SHARED", ROOT.parent / "shared"))
FILES = ("smollm2_spec_bench", "reference_spec_bench", "code_edit", "agentic")
METHOD = "arctic {scope} factor={factor:.1f} k={k}"

T = TypeVar("T")
RECORDED = ("steps", "tokens", "tokens_per_step", "coverage", "drafted", "accepted")
# What each setting is worth: the default with one thing changed.
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "no credit behind a difference": {"own_gap": 99, "memory_gap": 99},
    "keys 1, 2, 4 tokens, no gaps": {"key_masks": (0b1, 0b11, 0b1111)},
    "keys of 2 tokens and more": {"key_masks": (0b11, 0b1101, 0b111001)},
    "8 ways": {"ways": 8},
    "no prompt tokens ahead": {"prompt_tail": 0},
    "prompt and response votes alike": {"response_weight": 1},
    "own row and memory alike": {"own_weight": 1},
    "threshold does not rise": {"threshold_slope": 0},
    "waste budget 2": {"waste_budget": 32},
    "waste budget 4": {"waste_budget": 64},
    "bins halved above 1000": {"max_observations": 1000 * 16},
}


@dataclass
class Tally:
    """Totals of a replay."""

    requests: int = 0
    steps: int = 0
    drafting_steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted a step, the first of each reply left out."""
        return self.tokens / max(1, self.steps)

    def figures(self) -> dict[str, float]:
        """Return the totals and what follows from them."""
        return {
            **vars(self),
            "tokens_per_step": self.tokens_per_step,
            "coverage": self.drafting_steps / max(1, self.steps),
        }


@dataclass
class Request:
    """One recorded reply, and how far it is."""

    row: np.ndarray
    prompt: int
    total: int
    category: str

    @property
    def done(self) -> bool:
        return self.total >= len(self.row)


def make_request(record: dict[str, Any]) -> Request:
    """Return a recorded line as a request."""
    prompt, output = record["prompt_token_ids"], record["output_token_ids"]
    row = np.array([*prompt, *output], np.int64)
    return Request(row, len(prompt), len(prompt) + 1, record["category"])


def without_loops(requests: Sequence[Request]) -> list[Request]:
    """Return the requests whose replies do not end in an exact loop."""
    return [r for r in requests if not ends_in_loop(r.row[r.prompt :].tolist())]


def readable(
    names: Sequence[str], read: Callable[[str], T]
) -> tuple[dict[str, T], dict[str, str]]:
    """Return what is read of each file, and why others are left out; name those.

    Raises:
        SystemExit: none can be read.
    """
    found, left_out = {}, {}
    for name in names:
        try:
            found[name] = read(name)
        except DataMissing as error:
            left_out[name] = str(error)
            print(f"left out {name}: {error}", flush=True)
    if not found:
        raise SystemExit("no file to replay")
    return found, left_out


def golden_figures() -> dict[str, Any]:
    """Return the recorded figures.

    Raises:
        SystemExit: they are not there, or not whole.
    """
    path = SHARED / "golden" / "replay_tokens_per_step.json"
    try:
        figures: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} cannot be read: {error}") from None
    return figures


class LearnedDrafter:
    """The learned scoring, through its plain model."""

    def __init__(self, settings: SuffixSettings, in_flight: int, local: bool) -> None:
        self.flags = 0 if local else 3
        self.model = LearnedModel(settings, in_flight)
        self.uid = 0

    def start(self, slot: int, request: Request) -> None:
        self.model.start(slot, self.uid, flags=self.flags)
        self.uid += 1

    def step(self, active: dict[int, Request]) -> Iterator[tuple[int, list[int]]]:
        width = max(len(r.row) for r in active.values())
        rows = np.zeros((len(active), width), np.int64)
        for i, r in enumerate(active.values()):
            rows[i, : r.total] = r.row[: r.total]
        slots = np.array(list(active), np.int64)
        totals = np.array([r.total for r in active.values()], np.int64)
        prompts = np.array([r.prompt for r in active.values()], np.int64)
        self.model.update(slots, rows, totals, prompts)
        for i, (slot, r) in enumerate(active.items()):
            if not r.done:
                yield slot, self.model.draft(slot, rows[i], r.total, r.prompt, 64)[0]

    def stop(self, slot: int) -> None:
        self.model.slots.length[slot] = -1


class ReferenceDrafter:
    """The reference scoring, through its plain model."""

    def __init__(self, rules: Rules, max_cached_requests: int) -> None:
        self.rules = rules
        self.model = SuffixModel(rules, max_cached_requests)
        self.names: dict[int, int] = {}
        self.seen: dict[int, int] = {}
        self.next = 0

    def start(self, slot: int, request: Request) -> None:
        self.names[slot] = self.next
        self.seen[slot] = request.prompt
        self.model.start(self.next, request.row[: request.prompt].tolist())
        self.next += 1

    def step(self, active: dict[int, Request]) -> Iterator[tuple[int, list[int]]]:
        for slot, r in active.items():
            new = r.row[self.seen[slot] : r.total].tolist()
            self.model.add(self.names[slot], new)
            self.seen[slot] = r.total
        for slot, r in active.items():
            if not r.done:
                context = r.row[: r.total][-self.rules.max_tree_depth :].tolist()
                yield slot, list(self.model.draft(self.names[slot], context).tokens)

    def stop(self, slot: int) -> None:
        self.model.stop(self.names[slot])


def replay(requests: list[Request], drafter: Any, in_flight: int) -> dict[str, Tally]:
    """Replay all requests; return totals by category and `ALL`."""
    result = {"ALL": Tally()}
    waiting = [replace(r) for r in requests]
    active: dict[int, Request] = {}
    while waiting or active:
        for slot in range(in_flight):
            if slot not in active and waiting:
                active[slot] = waiting.pop(0)
                drafter.start(slot, active[slot])
                for name in ("ALL", active[slot].category):
                    result.setdefault(name, Tally()).requests += 1
        emitted = {}
        for slot, tokens in drafter.step(active):
            r = active[slot]
            right = 0
            for token in tokens:
                if r.total + right >= len(r.row) or r.row[r.total + right] != token:
                    break
                right += 1
            num = min(right + 1, len(r.row) - r.total)
            emitted[slot] = num
            for name in ("ALL", r.category):
                tally = result[name]
                tally.steps += 1
                tally.drafting_steps += bool(tokens)
                tally.tokens += num
                tally.drafted += len(tokens)
                tally.accepted += right
        for slot in list(active):
            if slot not in emitted:
                drafter.stop(slot)
                del active[slot]
            else:
                active[slot].total += emitted[slot]
    return result


def make_drafter(args: argparse.Namespace, changed: dict[str, Any]) -> Any:
    """Return a drafter that has seen nothing."""
    if args.reference:
        rules = Rules(max_spec_tokens=args.k, max_spec_factor=args.factor)
        return ReferenceDrafter(rules, 0 if args.local else 10000)
    settings = SuffixSettings(
        num_speculative_tokens=args.k, corpus_tokens=2**20, num_buckets=2**14
    )
    return LearnedDrafter(replace(settings, **changed), args.in_flight, args.local)


def run(
    args: argparse.Namespace,
    texts: dict[str, list[Request]],
    changed: dict[str, Any],
    recorded: dict[str, Any],
    shorter: bool = True,
) -> Iterator[dict[str, Any]]:
    """Replay each file; yield and print its figures, the total first.

    `recorded` are the reference's figures by file and category.
    """
    for name, requests in texts.items():
        few = without_loops(requests)
        for loops in (True, False) if shorter and len(few) < len(requests) else (True,):
            drafter = make_drafter(args, changed)
            result = replay(requests if loops else few, drafter, args.in_flight)
            for category, tally in result.items():
                was = recorded[name].get(category) if loops else None
                found = {
                    "file": name,
                    "loops": loops,
                    "category": category,
                    **tally.figures(),
                    "recorded": was and {key: was[key] for key in RECORDED},
                }
                if args.categories or category == "ALL":
                    print(line(found), flush=True)
                yield found


def line(found: dict[str, Any]) -> str:
    """Return the printed line of one file or category."""
    label = f"  {found['category']}"
    if found["category"] == "ALL":
        label = found["file"] + ("" if found["loops"] else ", no loops")
    text = f"{label:32}{found['tokens_per_step']:12.3f}"
    was = found["recorded"]
    if was is None:
        return f"{text}{'':24}{found['drafted']:12}{'':12}{found['accepted']:12}"
    gain = 100 * (found["tokens_per_step"] / was["tokens_per_step"] - 1)
    text += f"{was['tokens_per_step']:12.3f}{gain:12.2f}"
    return f"{text}{found['drafted']:12}{was['drafted']:12}{found['accepted']:12}"


def main() -> None:
    """Replay and write ``replay_suffix_*.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--files", nargs="*", default=FILES)
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--local", action="store_true", help="own history alone")
    parser.add_argument("--categories", action="store_true", help="print them too")
    parser.add_argument("--variants", action="store_true", help="see VARIANTS")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="fields of SuffixSettings, such as own_gap=99 or key_masks=(1,3); "
        "nothing is saved then",
    )
    args = parser.parse_args()
    if args.reference and (args.variants or args.set):
        parser.error("--variants and --set change the learned scoring")
    golden = golden_figures()
    texts, absent = readable(
        args.files, lambda name: [make_request(line) for line in read(name)]
    )
    scope = "local" if args.local else "local+global"
    against = METHOD.format(scope=scope, factor=args.factor, k=args.k)
    recorded = {name: golden["results"].get(name, {}) for name in texts}
    recorded = {name: found.get(against, {}) for name, found in recorded.items()}
    scoring = "reference" if args.reference else "learned"
    print(
        f"k={args.k}, {args.in_flight} in flight, {scoring} scoring; recorded: "
        f"{against}, one request at a time"
    )
    head = ("tokens/step", "recorded", "gain_%", "drafted", "recorded", "accepted")
    print(f"{'file / category':32}" + "".join(f"{h:>12}" for h in head))
    record = {
        **machine(),
        "scoring": scoring,
        "scope": scope,
        "k": args.k,
        "in_flight": args.in_flight,
        "left_out": absent,
        "recorded": {
            "version": golden["settings"]["arctic"]["version"],
            "method": against,
            "in_flight": 1,
        },
    }
    name = f"replay_suffix_{scoring}_{scope.split('+')[-1]}_k{args.k}"
    if args.in_flight > 1:
        name += f"_{args.in_flight}_in_flight"
    if args.variants:
        name = "replay_suffix_variants"
        record["variants"] = []
        for variant, changed in VARIANTS.items():
            print(variant)
            found = run(args, texts, changed, recorded, shorter=False)
            totals = [total for total in found if total["category"] == "ALL"]
            record["variants"].append(
                {"variant": variant, "changed": changed, "results": totals}
            )
    else:
        pairs = (item.split("=", 1) for item in args.set)
        changed = {key: ast.literal_eval(value) for key, value in pairs}
        record["results"] = list(run(args, texts, changed, recorded))
    if not args.set:
        print("saved", save(name, record, args.out))


if __name__ == "__main__":
    main()
