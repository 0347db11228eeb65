"""Suffix drafting beside suffix-gpu and arctic-inference, on the same rows and memory.

    python bench/bench_suffix_rivals.py [--out DIR] [--commit HASH] [--memory TOKENS]

Ours: the whole propose step, memory update included. suffix-gpu: its draft alone, as
one CUDA graph; its ingestion and index rebuilds come on top and are given beside it.
arctic-inference: its loop on one CPU thread, adding and drafting.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import RESULTS, gpu_time_us, machine, save
from suffix_rivals import (
    ArcticRival,
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
WIDTH = 4096
# suffix-gpu drafts only for rows that leave it room.
ROW_LEN = 4000
NUM_SETS = 4
STEPS = 24
CUDA = torch.device("cuda:0")


def make_text(rng: np.random.Generator, pieces: np.ndarray, length: int) -> list[int]:
    """Return a text that joins shared pieces, with one token in 16 replaced."""
    which = rng.integers(len(pieces), size=length // pieces.shape[1] + 1)
    text = pieces[which].reshape(-1)[:length].copy()
    changed = rng.random(length) < 1 / 16
    text[changed] = rng.integers(49000, size=int(changed.sum()))
    return [int(token) for token in text]


def time_ours(
    row_sets: list[list[list[int]]], documents: list[list[int]], memory_tokens: int
) -> dict[str, Any]:
    """Time our whole step; every launch appends one token a row anew."""
    num_reqs = len(row_sets[0])
    memory = SuffixMemory(
        settings_for(
            "learned",
            num_speculative_tokens=K,
            max_model_len=WIDTH,
            corpus_tokens=memory_tokens,
            max_cached_requests=2**30,
        ),
        num_reqs,
        CUDA,
    )
    everybody = StoredNamespace(None, None, None)
    kept = pack(
        memory.state,
        memory.settings,
        make_documents([np.array(d, dtype=np.int32) for d in documents], everybody),
        memory.namespaces.restore(b"0" * 32, [everybody]),
    )
    memory.next_uid = kept.num_documents
    for slot in range(num_reqs):
        memory.add_request(slot, RequestAccess(), already_committed=ROW_LEN - 1)
    memory.apply_staged()
    sets = [torch.tensor(rows, dtype=torch.int32, device=CUDA) for rows in row_sets]
    mapping = torch.arange(num_reqs, device=CUDA)
    ones = torch.ones(num_reqs, dtype=torch.int32, device=CUDA)
    total, prompt = ones * ROW_LEN, ones * (ROW_LEN // 2)
    drafts = torch.zeros(num_reqs, K, dtype=torch.int64, device=CUDA)
    num_drafts = torch.zeros(num_reqs, dtype=torch.int32, device=CUDA)
    confidences = torch.zeros(num_reqs, K, device=CUDA)
    back = torch.zeros(1, layout.NUM_SLOT_FIELDS, dtype=torch.int32, device=CUDA)
    back[0, layout.COMMITTED] = back[0, layout.DRAFT_LEN] = 1

    def step(rows: torch.Tensor) -> None:
        # Makes the last token new again; a tiny launch that is counted in.
        memory.state.slots.sub_(back)
        inputs = (rows, mapping, total, prompt, ones)
        memory.update(*inputs)
        memory.draft(*inputs, drafts, num_drafts, confidences, num_steps=K)

    p20, p50, p80 = gpu_time_us([partial(step, rows) for rows in sets])
    return {
        "propose_us": {"p20": p20, "p50": p50, "p80": p80},
        "drafted_per_row": float(num_drafts.float().mean()),
        "bytes": memory.nbytes(),
        "memory_tokens_kept": kept.num_tokens,
    }


def time_rivals(
    row_sets: list[list[list[int]]],
    documents: list[list[int]],
    new: list[list[list[int]]],
    memory_tokens: int,
) -> dict[str, Any]:
    """Time both others; one that is not installed is named and left out."""
    options: dict[str, Any] = {
        "k": K,
        "depth": DEPTH,
        "max_row_len": WIDTH,
        "memory_tokens": memory_tokens,
    }
    result: dict[str, Any] = {}
    # Its default, and what its own benchmarks use.
    for occurrences in (128, 32):
        try:
            rival = SuffixGpuRival(
                row_sets[0], documents, max_occurrences=occurrences, **options
            )
        except RivalUnavailable as error:
            print(error)
            break
        batches = [rival.place(rows) for rows in row_sets]
        p20, p50, p80 = gpu_time_us([partial(rival.launch, batch) for batch in batches])
        rebuild = rival.rebuild_cost()
        result[f"suffix-gpu, {occurrences} occurrences"] = {
            "propose_us": {"p20": p20, "p50": p50, "p80": p80},
            "rebuild_us": rebuild.gpu_us,
            "rebuild_host_us": rebuild.host_us,
            "bytes": rival.device_bytes(),
        }
        del rival, batches
        torch.cuda.empty_cache()
    try:
        arctic = ArcticRival(row_sets[0], documents, **options)
    except RivalUnavailable as error:
        print(error)
        return result
    loops = []
    for tokens in new:
        arctic.step(tokens)
        assert arctic.last is not None
        loops.append(arctic.last.host_us)
    result["arctic-inference"] = {"host_us": statistics.median(loops[3:])}
    return result


def main() -> None:
    """Time every batch size and write ``suffix_rivals.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    parser.add_argument("--memory", type=int, default=4 * 2**20)
    args = parser.parse_args()
    rng = np.random.default_rng(SEED)
    pieces = rng.integers(49000, size=(4096, 128))
    # Whole pages, so that every memory holds them all.
    lengths = 64 * rng.integers(4, 16, size=args.memory // 640)
    documents = documents_within(
        [make_text(rng, pieces, int(length)) for length in lengths], args.memory
    )
    results = []
    for num_reqs in (256, 1):
        rows = [
            [make_text(rng, pieces, ROW_LEN) for _ in range(num_reqs)]
            for _ in range(NUM_SETS)
        ]
        new = [
            [make_text(rng, pieces, 3) for _ in range(num_reqs)] for _ in range(STEPS)
        ]
        arms = {"mrv2-spec": time_ours(rows, list(documents), args.memory)}
        arms.update(time_rivals(rows, list(documents), new, args.memory))
        results.append({"num_reqs": num_reqs, "row_len": ROW_LEN, "arms": arms})
        for name, arm in arms.items():
            time_us = arm.get("propose_us", {}).get("p50", arm.get("host_us"))
            print(f"{num_reqs:5d} requests  {name:28s}{time_us:12.1f} us", flush=True)
    record = {
        **machine(args.commit),
        "seed": SEED,
        "k": K,
        "depth": DEPTH,
        "memory_tokens": args.memory,
        "cases": results,
    }
    print("saved", save("suffix_rivals", record, args.out))


if __name__ == "__main__":
    main()
