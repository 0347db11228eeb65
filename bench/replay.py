"""Replay recorded texts through any drafter: accepted tokens a step, and at what.

    python bench/replay.py [FILE ...] [--drafter NAME ...] [--k K ...]
        [--in-flight N] [--device cuda] [--limit N] [--out DIR]

A step drafts from the tokens so far, accepts the longest prefix that the text goes on
with and emits one token more. Requests run in file order, `--in-flight` at a time; a
step takes in the tokens of all, then drafts for all. FILE is a recorded file's name or
the path of any file like it: a JSON object a line, with prompt_token_ids,
output_token_ids and category. A file in which replies end in an exact loop is replayed
once more without them. On a GPU ours run as kernels, else as their plain models, whose
time says nothing about the kernels. A drafter that cannot run here is left out and
named, and so is a file that is missing or damaged.
"""

import argparse
import gzip
import json
import statistics
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from grid.workloads import DataMissing
from harness import RESULTS, machine, save
from replay_drafters import DRAFTERS, MAX_N, MIN_N, Drafter, Setup
from replay_suffix import FILES, SHARED, Request, make_request, readable, without_loops
from suffix_rivals import RivalUnavailable


@dataclass
class Tally:
    """Totals of a replay.

    Attributes:
        drafted_at: [k] steps that drafted a token there.
        accepted_at: [k] steps whose token there was accepted.
    """

    k: int
    requests: int = 0
    steps: int = 0
    drafting_steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin at nothing."""
        self.drafted_at, self.accepted_at = [0] * self.k, [0] * self.k

    def add(self, drafted: int, accepted: int, emitted: int) -> None:
        """Take in a step of a request."""
        self.steps += 1
        self.drafting_steps += drafted > 0
        self.tokens += emitted
        self.drafted += drafted
        self.accepted += accepted
        for position in range(drafted):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < accepted

    def figures(self) -> dict[str, Any]:
        """Return the totals and what follows from them."""
        steps = max(1, self.steps)
        return {
            **vars(self),
            "tokens_per_step": self.tokens / steps,
            "coverage": self.drafting_steps / steps,
        }


def load(name: str, limit: int) -> list[Request]:
    """Read a recorded file by name, or any file like it by path.

    Raises:
        DataMissing: it is not there, or not whole.
    """
    path = Path(name)
    if not path.is_file():
        path = SHARED / "data" / f"{name}.jsonl.gz"
    if not path.is_file():
        raise DataMissing(
            f"no file {name} and no {path}; MRV2_SPEC_SHARED names the folder with data"
        )
    requests: list[Request] = []
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for line in lines:
                requests.append(make_request(json.loads(line)))
    except (EOFError, OSError, zlib.error) as error:
        raise DataMissing(f"{path} is cut short or damaged: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        number = len(requests) + 1
        raise DataMissing(
            f"{path}:{number} is no recorded request ({error!r})"
        ) from error
    return requests[:limit] if limit else requests


def replay(
    requests: list[Request], drafter: Drafter, in_flight: int, k: int
) -> tuple[dict[str, Tally], list[float]]:
    """Replay requests; return totals by category and `ALL`, and each step's time.

    Args:
        requests: in the order in which they come; they stay as they are.
        drafter: has seen nothing.
        in_flight: requests at a time.
        k: drafts a request at most.

    Returns:
        The totals, and the host's microseconds of each step of all requests in flight.
    """
    result = {"ALL": Tally(k)}
    waiting = [replace(r) for r in reversed(requests)]
    active: dict[int, Request] = {}
    times = []
    while waiting or active:
        for slot in range(in_flight):
            if slot not in active and waiting:
                active[slot] = waiting.pop()
                drafter.start(slot, active[slot])
                for name in ("ALL", active[slot].category):
                    result.setdefault(name, Tally(k)).requests += 1
        begun = time.perf_counter()
        drafts = list(drafter.step(active))
        times.append((time.perf_counter() - begun) * 1e6)
        emitted = {}
        for slot, draft in drafts:
            request = active[slot]
            rest = request.row[request.total : request.total + len(draft)].tolist()
            right = 0
            while right < len(rest) and rest[right] == draft[right]:
                right += 1
            emitted[slot] = min(right + 1, len(request.row) - request.total)
            for name in ("ALL", request.category):
                result[name].add(len(draft), right, emitted[slot])
        for slot in list(active):
            if slot in emitted:
                active[slot].total += emitted[slot]
            else:
                drafter.stop(slot)
                del active[slot]
    return result, times


def run(
    args: argparse.Namespace, texts: dict[str, list[Request]], name: str, k: int
) -> Iterator[dict[str, Any]]:
    """Replay one drafter over all files; yield the figures, the total first.

    Raises:
        RivalUnavailable: it cannot run here.
    """
    for file, requests in texts.items():
        few = without_loops(requests)
        for loops in (True, False) if len(few) < len(requests) else (True,):
            chosen = requests if loops else few
            setup = Setup(
                k,
                args.in_flight,
                max((len(r.row) for r in chosen), default=1) + k,
                args.factor,
                torch.device(args.device),
            )
            drafter = DRAFTERS[name](setup)
            result, times = replay(chosen, drafter, args.in_flight, k)
            gpu_us = getattr(drafter, "gpu_us", [])
            for category, tally in result.items():
                found: dict[str, Any] = {
                    "drafter": name,
                    "file": Path(file).name.removesuffix(".gz").removesuffix(".jsonl"),
                    "loops": loops,
                    "category": category,
                    **tally.figures(),
                }
                if category == "ALL":
                    found["host_us"] = statistics.median(times or [0.0])
                    found["gpu_us"] = statistics.median(gpu_us) if gpu_us else None
                else:
                    del found["drafted_at"], found["accepted_at"]
                yield found


def packages() -> dict[str, str]:
    """Return the versions of the other drafters' packages that are here."""
    found = {}
    for name in ("arctic-inference", "suffix-gpu"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def line(found: dict[str, Any]) -> str:
    """Return the printed line of a file or category."""
    label = f"  {found['category']}"
    if found["category"] == "ALL":
        label = found["file"] + ("" if found["loops"] else ", no loops")
    text = (
        f"{found['drafter']:18}{found['k']:3} {label:32}{found['tokens_per_step']:8.3f}"
        f"{found['coverage']:9.3f}{found['drafted']:9}{found['accepted']:9}"
    )
    if found["category"] == "ALL":
        text += f"{found['host_us']:10.1f}"
        text += "" if found["gpu_us"] is None else f"{found['gpu_us']:9.1f}"
    return text


def main() -> None:
    """Replay and write ``replay.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", default=list(FILES))
    parser.add_argument("--drafter", nargs="*", choices=DRAFTERS, default=[*DRAFTERS])
    parser.add_argument("--k", nargs="*", type=int, default=[5, 16])
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--factor", type=float, default=2.0, help="of suffix packages")
    parser.add_argument("--limit", type=int, default=0, help="first requests alone")
    parser.add_argument("--categories", action="store_true", help="print them too")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--name", default="replay", help="of the result")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    args = parser.parse_args()
    texts, left_out = readable(args.files, lambda name: load(name, args.limit))
    results = []
    print(
        f"{'drafter':18}{'k':>3} {'file / category':32}{'tok/step':>8}{'coverage':>9}"
        f"{'drafted':>9}{'accepted':>9}{'host_us':>10}{'gpu_us':>9}"
    )
    for name in args.drafter:
        for k in args.k:
            try:
                for found in run(args, texts, name, k):
                    results.append(found)
                    if args.categories or found["category"] == "ALL":
                        print(line(found), flush=True)
            except RivalUnavailable as error:
                left_out[name] = str(error)
        if name in left_out:
            print(f"left out {name}: {left_out[name]}", flush=True)
    record = {
        **machine(args.commit),
        "device": args.device,
        "in_flight": args.in_flight,
        "factor": args.factor,
        "limit": args.limit,
        "min_n": MIN_N,
        "max_n": MAX_N,
        "packages": packages(),
        "left_out": left_out,
        "results": results,
    }
    print("saved", save(args.name, record, args.out))


if __name__ == "__main__":
    main()
