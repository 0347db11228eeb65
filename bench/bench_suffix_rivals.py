"""Suffix drafting beside suffix-gpu and arctic-inference, on the same rows and memory.

    python bench/bench_suffix_rivals.py [--out DIR] [--commit HASH] [--memory TOKENS]
        [--cases REQUESTSxROW ...] [--tiny]

Ours: the whole propose step, memory update included. suffix-gpu: its draft alone, as
one CUDA graph; its ingestion and index rebuilds come on top and are given beside it.
arctic-inference: its loop on one CPU thread, adding and drafting, for the cases of
ARCTIC. The floor is the time of reading the rows once at the bandwidth of a large copy,
measured in the same run. With ``--tiny`` small cases run on the CPU.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import RESULTS, Floor, device, gpu_time_us, machine, save
from suffix_rivals import (
    ArcticRival,
    DeviceBatch,
    RivalUnavailable,
    SuffixGpuRival,
    documents_within,
)

from mrv2_spec.corpus.documents import make_documents
from mrv2_spec.corpus.namespaces import StoredNamespace
from mrv2_spec.corpus.packing import pack
from mrv2_spec.kernels import suffix_state as layout
from mrv2_spec.suffix_memory import RequestAccess, SuffixMemory, settings_for

SEED = 20261129
K = 16
DEPTH = 24
# suffix-gpu drafts only for rows that leave it room.
ROOM = 96
NUM_SETS = 4
STEPS = 24
CASES = (
    "256x4096", "1x4096", "16x4096", "64x4096", "512x4096", "1x32768", "64x32768",
    "256x32768",
)  # fmt: skip
TINY_CASES = ("2x256",)
# The others take it minutes of building trees, and cost each request the same.
ARCTIC = ((256, 4096), (1, 4096), (2, 256))
# Occurrences that suffix-gpu votes over: its default, and what its benchmarks use.
OCCURRENCES = (128, 32)
# An array of int32, which the others take as a sequence.
Row = Any


@dataclass(frozen=True)
class Case:
    """A batch of rows, and what the memory holds."""

    num_reqs: int
    width: int
    documents: Sequence[Row]
    memory_tokens: int

    @property
    def row_len(self) -> int:
        """Tokens of each row."""
        return self.width - ROOM


def make_text(rng: np.random.Generator, pieces: np.ndarray, length: int) -> Row:
    """Return a text that joins shared pieces, with one token in 16 replaced."""
    which = rng.integers(len(pieces), size=length // pieces.shape[1] + 1)
    text = pieces[which].reshape(-1)[:length].astype(np.int32)
    changed = rng.random(length) < 1 / 16
    text[changed] = rng.integers(49000, size=int(changed.sum()))
    return text


def time_ours(case: Case, row_sets: list[list[Row]]) -> dict[str, Any]:
    """Time our whole step; every launch appends one token a row anew."""
    num_reqs, row_len, place = case.num_reqs, case.row_len, device()
    memory = SuffixMemory(
        settings_for(
            "learned",
            num_speculative_tokens=K,
            max_model_len=case.width,
            corpus_tokens=case.memory_tokens,
            max_cached_requests=2**30,
        ),
        num_reqs,
        place,
    )
    everybody = StoredNamespace(None, None, None)
    kept = pack(
        memory.state,
        memory.settings,
        make_documents(list(case.documents), everybody),
        memory.namespaces.restore(b"0" * 32, [everybody]),
    )
    memory.next_uid = kept.num_documents
    for slot in range(num_reqs):
        memory.add_request(slot, RequestAccess(), already_committed=row_len - 1)
    memory.apply_staged()
    sets = [torch.from_numpy(np.stack(rows)).to(place) for rows in row_sets]
    mapping = torch.arange(num_reqs, device=place)
    ones = torch.ones(num_reqs, dtype=torch.int32, device=place)
    total, prompt = ones * row_len, ones * (row_len // 2)
    drafts = torch.zeros(num_reqs, K, dtype=torch.int64, device=place)
    num_drafts = torch.zeros(num_reqs, dtype=torch.int32, device=place)
    confidences = torch.zeros(num_reqs, K, device=place)
    back = torch.zeros(1, layout.NUM_SLOT_FIELDS, dtype=torch.int32, device=place)
    back[0, layout.COMMITTED] = back[0, layout.DRAFT_LEN] = 1

    def step(rows: torch.Tensor) -> None:
        # Makes the last token new again; a tiny launch that is counted in.
        memory.state.slots.sub_(back)
        inputs = (rows, mapping, total, prompt, ones)
        memory.update(*inputs)
        memory.draft(*inputs, drafts, num_drafts, confidences, num_steps=K)

    return {
        "propose_us": _timed([partial(step, rows) for rows in sets]),
        "drafted_per_row": float(num_drafts.float().mean()),
        "bytes": memory.nbytes(),
        "memory_tokens_kept": kept.num_tokens,
    }


def _timed(launches: list[Callable[[], None]]) -> dict[str, float]:
    return dict(zip(("p20", "p50", "p80"), gpu_time_us(launches), strict=True))


def time_suffix_gpu(
    case: Case, row_sets: list[list[Row]], occurrences: int
) -> dict[str, Any]:
    """Time suffix-gpu's draft, and its rebuild.

    Raises:
        RivalUnavailable: it is not installed.
    """
    on_gpu = torch.cuda.is_available()
    rival = SuffixGpuRival(
        row_sets[0],
        case.documents,
        k=K,
        depth=DEPTH,
        max_row_len=case.width,
        memory_tokens=case.memory_tokens,
        max_occurrences=occurrences,
        delta_capacity=2**16 if on_gpu else 2**8,
        device=device().type,
    )
    batches = [rival.place(rows) for rows in row_sets]

    def launch(batch: DeviceBatch) -> None:
        rival.launch(batch)

    found: dict[str, Any] = {
        "propose_us": _timed([partial(launch, batch) for batch in batches]),
        "bytes": rival.device_bytes(),
    }
    if on_gpu:
        rebuild = rival.rebuild_cost()
        found["rebuild_us"] = rebuild.gpu_us
        found["rebuild_host_us"] = rebuild.host_us
    return found


def time_arctic(
    case: Case, rows: list[Row], new: list[list[list[int]]]
) -> dict[str, Any]:
    """Time arctic-inference's loop over the requests.

    Raises:
        RivalUnavailable: it is not installed.
    """
    arctic = ArcticRival(
        rows,
        case.documents,
        k=K,
        depth=DEPTH,
        max_row_len=case.width,
        memory_tokens=case.memory_tokens,
    )
    loops = []
    for tokens in new:
        arctic.step(tokens)
        assert arctic.last is not None
        loops.append(arctic.last.host_us)
    return {"host_us": statistics.median(loops[len(loops) // 8 :])}


def time_case(
    case: Case, rng: np.random.Generator, pieces: np.ndarray, left_out: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Time everybody on a case; add who cannot run to `left_out`."""
    # The sets of long rows are large enough for two not to stay in the cache.
    num_sets = NUM_SETS if case.width <= 4096 else 2
    row_sets = [
        [make_text(rng, pieces, case.row_len) for _ in range(case.num_reqs)]
        for _ in range(num_sets)
    ]
    new = [
        [make_text(rng, pieces, 3).tolist() for _ in range(case.num_reqs)]
        for _ in range(STEPS)
    ]
    arms: dict[str, Callable[[], dict[str, Any]]] = {
        "mrv2-spec": lambda: time_ours(case, row_sets)
    }
    for occurrences in OCCURRENCES:
        arms[f"suffix-gpu, {occurrences} occurrences"] = partial(
            time_suffix_gpu, case, row_sets, occurrences
        )
    if (case.num_reqs, case.width) in ARCTIC:
        arms["arctic-inference"] = lambda: time_arctic(case, row_sets[0], new)
    found = {}
    for name, time in arms.items():
        try:
            found[name] = time()
        except RivalUnavailable as error:
            left_out[name] = str(error)
        except torch.cuda.OutOfMemoryError:
            left_out[f"{name}, {case.num_reqs} x {case.width}"] = "out of GPU memory"
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


def _parse(text: str) -> tuple[int, int]:
    requests, _, width = text.partition("x")
    if not (requests.isdigit() and width.isdigit() and int(width) > ROOM):
        raise SystemExit(f"--cases {text}: REQUESTSxROW, such as {CASES[0]}")
    return int(requests), int(width)


def main() -> None:
    """Time every case and write ``suffix_rivals.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    parser.add_argument("--memory", type=int, default=4 * 2**20)
    parser.add_argument("--cases", nargs="*", default=CASES)
    parser.add_argument("--tiny", action="store_true", help="small, on the CPU")
    args = parser.parse_args()
    if args.tiny:
        args.cases, args.memory = TINY_CASES, 2**12
    elif not torch.cuda.is_available():
        raise SystemExit("no GPU here: --tiny runs on the CPU")
    rng = np.random.default_rng(SEED)
    pieces = rng.integers(49000, size=(4096, 128))
    # Whole pages, so that every memory holds them all.
    lengths = 64 * rng.integers(4, 16, size=max(2, args.memory // 640))
    documents = documents_within(
        [make_text(rng, pieces, int(length)) for length in lengths], args.memory
    )
    floor = Floor()
    left_out: dict[str, str] = {}
    results = []
    for num_reqs, width in map(_parse, args.cases):
        case = Case(num_reqs, width, documents, args.memory)
        arms = time_case(case, rng, pieces, left_out)
        read_us = floor.us(num_reqs * case.row_len * 4)
        results.append(
            {
                "num_reqs": num_reqs,
                "row_len": case.row_len,
                "arms": arms,
                "read_floor_us": read_us,
            }
        )
        for name, arm in arms.items():
            time_us = arm.get("propose_us", {}).get("p50", arm.get("host_us"))
            print(
                f"{num_reqs:5d} x {width:6d}  {name:28s}{time_us:12.1f} us, floor "
                f"{read_us:.1f}",
                flush=True,
            )
    for name, why in left_out.items():
        print(f"left out {name}: {why}")
    record = {
        **machine(args.commit),
        "seed": SEED,
        "repeats": 50,
        "k": K,
        "depth": DEPTH,
        "memory_tokens": args.memory,
        "copy_bandwidth_gb_s": floor.bandwidth_gb_s,
        "left_out": left_out,
        "cases": results,
    }
    print("saved", save("suffix_rivals", record, args.out))


if __name__ == "__main__":
    main()
