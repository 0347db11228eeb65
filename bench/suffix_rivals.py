"""Two other suffix drafters behind one interface, to be timed beside this project's.

`SuffixGpuRival` drives suffix-gpu 0.1.3 (suffix arrays on the GPU), `ArcticRival` the
CPU trees of arctic-inference 0.1.1. Both take the same rows and the same documents, and
`step` appends each request's new tokens and returns the drafts that follow them.
Neither package is a dependency: put them on PYTHONPATH. One that is missing raises
`RivalUnavailable`, whose message is one line.
"""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

Tokens = Sequence[int]


class RivalUnavailable(RuntimeError):
    """A rival cannot run here; the message says what is missing, in one line."""


@dataclass(frozen=True)
class StepTime:
    """What the last step took, in microseconds; the GPU's share where there is one.

    `update_gpu_us` is measured between events around work that the host launches piece
    by piece, so it holds the host's gaps too: an upper bound. `propose_gpu_us` is one
    graph replay and holds none.
    """

    host_us: float
    propose_gpu_us: float | None = None
    update_gpu_us: float | None = None


class Rival(Protocol):
    """What a benchmark needs of a rival."""

    name: str
    last: StepTime | None

    def step(self, new_tokens: Sequence[Tokens]) -> list[list[int]]:
        """Append the new tokens of each request and return each one's draft."""


def documents_within(documents: Sequence[Tokens], tokens: int) -> Sequence[Tokens]:
    """Return the newest documents that fit, a separator after each counted."""
    room = tokens
    for index in range(len(documents) - 1, -1, -1):
        room -= len(documents[index]) + 1
        if room < 0:
            return documents[index + 1 :]
    return documents


def _module(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise RivalUnavailable(
            f"{package} does not import ({reason}): put it on PYTHONPATH"
        ) from error


def _check_rows(rows: Sequence[Tokens], max_row_len: int) -> None:
    for index, row in enumerate(rows):
        if not 1 <= len(row) < max_row_len:
            raise ValueError(
                f"row {index} has {len(row)} tokens: 1 to {max_row_len - 1} leave room "
                f"for a draft in rows of {max_row_len}"
            )


def _check_new(
    new_tokens: Sequence[Tokens], lens: Sequence[int], max_row_len: int, k: int
) -> None:
    for row, (tokens, length) in enumerate(zip(new_tokens, lens, strict=True)):
        if len(tokens) > k + 1:
            raise ValueError(f"row {row}: {len(tokens)} new tokens, at most k + 1")
        if length + len(tokens) > max_row_len:
            raise ValueError(f"row {row} grows beyond {max_row_len} tokens")


@dataclass(frozen=True)
class DeviceBatch:
    """The tensors that one propose step of suffix-gpu reads."""

    token_ids: torch.Tensor  # [num_reqs, max_row_len] int32, written in place
    num_tokens: torch.Tensor  # [num_reqs] int32, before `sampled`
    sampled: torch.Tensor  # [num_reqs, k + 1] int32, -1 behind the last


@dataclass(frozen=True)
class RebuildCost:
    """One rebuild of the suffix array over the memory as it is."""

    gpu_us: float
    host_us: float
    peak_bytes: int


class SuffixGpuRival:
    """suffix-gpu as its README and its own benchmarks use it, in a CUDA graph.

    A propose step is `propose_with_update`: scatter the sampled tokens into the rows,
    match each row against itself, against the suffix array and against the delta (the
    tokens not yet in the array, searched in full), vote, choose. It has static shapes
    and never waits for the host; here it is captured once, with the copy of the new
    counts, and replayed. Its cost follows the width of the rows and of the delta, not
    how much of them is filled.

    The memory update is host work between the steps: `poll` before a step swaps in a
    finished suffix array (copies of corpus and array, in place), and `ingest_active`
    after it copies responses that grew by `ingest_chunk` tokens, with an overlap of
    depth + k, into the delta: some small kernels a response. So a token becomes visible
    to other requests up to `ingest_chunk - 1` tokens late. Once the delta holds
    `delta_capacity / 2` tokens (32768 by default) a suffix array of the whole memory is
    built on a side stream: about log2(tokens) sorts of 64-bit keys. The steps go on
    meanwhile and share the GPU with it; launching it holds up the host, as
    `torch.unique` waits for its result. If the delta fills up before the build is over,
    the oldest documents in it are dropped.

    `launch` is the propose step alone, for timing: it leaves the counts as they are, so
    that each replay does the same work, and it leaves out the memory update, which
    favours this rival. `step` is everything; `rebuild_cost` is the background part.

    Occurrences and backoff are the package's defaults, which its README recommends; its
    own benchmarks use 32 occurrences. The device "cpu" runs its plain torch code, for
    tests of this class.
    """

    name = "suffix-gpu"

    def __init__(
        self,
        rows: Sequence[Tokens],
        documents: Sequence[Tokens] = (),
        *,
        k: int = 16,
        depth: int = 24,
        max_row_len: int = 4096,
        memory_tokens: int = 4 * 2**20,
        spec_factor: float = 2.0,
        min_token_prob: float = 0.1,
        max_occurrences: int = 128,
        num_backoff: int = 8,
        delta_capacity: int = 2**16,
        ingest_chunk: int = 64,
        device: str = "cuda",
    ) -> None:
        package = _module("suffix_gpu", "suffix-gpu")
        if device == "cuda" and not torch.cuda.is_available():
            raise RivalUnavailable("suffix-gpu's graph mode needs a CUDA device")
        _check_rows(rows, max_row_len)
        self.on_gpu = device == "cuda"
        self.device = torch.device(
            f"cuda:{torch.cuda.current_device()}" if self.on_gpu else device
        )
        self.k, self.max_row_len, self.ingest_chunk = k, max_row_len, ingest_chunk
        self.last: StepTime | None = None
        self.rebuild_stream = torch.cuda.Stream(self.device) if self.on_gpu else None
        self.drafter = package.SuffixGPUDrafter(
            k=k,
            device=self.device,
            max_pattern_len=depth,
            max_occurrences=max_occurrences,
            enable_global=True,
            global_capacity=memory_tokens,
            delta_capacity=delta_capacity,
            rebuild_stream=self.rebuild_stream,
            max_spec_factor=spec_factor,
            min_token_prob=min_token_prob,
            num_backoff=num_backoff,
        )
        self.index = self.drafter.global_index
        self._preload(documents_within(documents, memory_tokens))
        self.prompt_lens = [len(row) for row in rows]
        self.lens = list(self.prompt_lens)
        self.ingested = [0] * len(rows)
        self.batch = self.place(rows)
        # The rows whole, for `step`; `place` holds the last token back.
        self.batch.num_tokens.add_(1)
        self.batch.sampled.fill_(-1)
        self.staged = torch.full_like(self.batch.sampled, -1, device="cpu")
        if self.on_gpu:
            self.staged = self.staged.pin_memory()
        self.graph_bytes = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        if self.on_gpu:
            self._capture()

    def place(self, rows: Sequence[Tokens]) -> DeviceBatch:
        """Put rows on the device for `launch`, the last token of each as sampled."""
        _check_rows(rows, self.max_row_len)
        token_ids = np.zeros((len(rows), self.max_row_len), np.int32)
        sampled = np.full((len(rows), self.k + 1), -1, np.int32)
        for index, row in enumerate(rows):
            token_ids[index, : len(row)] = row
            sampled[index, 0] = row[-1]
        num_tokens = np.array([len(row) - 1 for row in rows], np.int32)
        return DeviceBatch(
            *(
                torch.from_numpy(array).to(self.device)
                for array in (token_ids, num_tokens, sampled)
            )
        )

    def launch(self, batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Propose on a placed batch: [num_reqs, k] drafts, [num_reqs] counts.

        Call it once before capturing: that compiles its kernels.
        """
        drafts, num_drafts, _ = self.drafter.propose_with_update(
            batch.num_tokens, batch.token_ids, batch.sampled
        )
        return drafts, num_drafts

    def step(self, new_tokens: Sequence[Tokens]) -> list[list[int]]:
        """Append, poll, propose, ingest; and keep the times in `last`."""
        _check_new(new_tokens, self.lens, self.max_row_len, self.k)
        staged = self.staged.numpy()
        staged.fill(-1)
        for row, tokens in enumerate(new_tokens):
            staged[row, : len(tokens)] = tokens
        self.batch.sampled.copy_(self.staged)
        marks = [self._mark()]
        started = time.perf_counter()
        self.drafter.poll()
        marks.append(self._mark())
        if self.graph is None:
            self._propose()
        else:
            self.graph.replay()
        marks.append(self._mark())
        self.lens = [
            before + len(tokens)
            for before, tokens in zip(self.lens, new_tokens, strict=True)
        ]
        self._ingest()
        marks.append(self._mark())
        drafts, counts = self.drafts.tolist(), self.num_drafts.tolist()
        host_us = (time.perf_counter() - started) * 1e6
        self.last = StepTime(host_us)
        if self.on_gpu:
            torch.cuda.synchronize()
            poll, propose, ingest = (
                begin.elapsed_time(end) * 1000
                for begin, end in itertools.pairwise(marks)
            )
            self.last = StepTime(host_us, propose, poll + ingest)
        return [draft[:count] for draft, count in zip(drafts, counts, strict=True)]

    @property
    def rebuilds(self) -> int:
        """Suffix arrays swapped in so far, those of the preload included."""
        epoch: int = self.index.active_epoch
        return epoch

    @property
    def rebuilding(self) -> bool:
        """Whether a suffix array is being built or waits to be swapped in."""
        return self.index.pending_epoch is not None

    def settle(self) -> None:
        """Wait until no rebuild is under way."""
        while self.rebuilding:
            time.sleep(0.001)
            self.drafter.poll()
        if self.on_gpu:
            torch.cuda.synchronize()

    def device_bytes(self) -> dict[str, int]:
        """Return persistent device bytes: the memory, the rows, the graph's pool.

        A rebuild takes more for its time: `rebuild_cost`.
        """
        tensors = [t for t in vars(self.index).values() if isinstance(t, torch.Tensor)]
        return {
            "memory": sum(t.numel() * t.element_size() for t in tensors),
            "rows": self.batch.token_ids.numel() * 4,
            "graph": self.graph_bytes,
        }

    def rebuild_cost(self) -> RebuildCost:
        """Rebuild once with nothing else on the GPU, and say what it takes."""
        if self.rebuild_stream is None:
            raise RivalUnavailable("a rebuild in the background needs a CUDA device")
        self.settle()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        started = time.perf_counter()
        self._append([[0, 1, 2, 3]])
        host_us = (time.perf_counter() - started) * 1e6
        end.record(self.rebuild_stream)
        self.settle()
        peak = torch.cuda.max_memory_allocated() - before
        return RebuildCost(begin.elapsed_time(end) * 1000, host_us, peak)

    def _propose(self) -> None:
        batch = self.batch
        self.drafts, self.num_drafts, counts = self.drafter.propose_with_update(
            batch.num_tokens, batch.token_ids, batch.sampled
        )
        batch.num_tokens.copy_(counts)

    def _capture(self) -> None:
        # Nothing is sampled yet, so the warm-up changes no row.
        for _ in range(3):
            self._propose()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._propose()
        self.graph_bytes = torch.cuda.memory_reserved() - before

    def _mark(self) -> Any:
        if not self.on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ingest(self) -> None:
        lens = [
            end - begin for begin, end in zip(self.prompt_lens, self.lens, strict=True)
        ]
        # `ingest_active` passes over the others; so does this, without slicing them.
        due = [
            row
            for row, length in enumerate(lens)
            if length - self.ingested[row] >= self.ingest_chunk
        ]
        if not due:
            return
        token_ids = self.batch.token_ids
        self.drafter.ingest_active(
            due,
            [token_ids[row, self.prompt_lens[row] : self.lens[row]] for row in due],
            [lens[row] for row in due],
            chunk=self.ingest_chunk,
        )
        for row in due:
            self.ingested[row] = lens[row]

    def _append(self, documents: Sequence[Tokens]) -> None:
        """Append documents to the delta and rebuild at once, whatever its filling."""
        threshold, self.index.rebuild_threshold = self.index.rebuild_threshold, 1
        tensors = [torch.tensor(d, dtype=torch.int32) for d in documents]
        self.drafter.harvest_rows(tensors, [len(d) for d in documents])
        self.index.rebuild_threshold = threshold

    def _preload(self, documents: Sequence[Tokens]) -> None:
        """Load a delta of documents at a time: more would be dropped, not queued."""
        part: list[Tokens] = []
        size = 0
        for document in documents:
            if part and size + len(document) + 1 > self.index.delta_capacity:
                self._append(part)
                self.settle()
                part, size = [], 0
            part.append(document)
            size += len(document) + 1
        if part:
            self._append(part)
            self.settle()


class ArcticRival:
    """arctic-inference's trees on the CPU, as vLLM's V1 proposer drives them.

    A step is one loop over the requests: `add_active_response` (own tree and shared
    tree; visible to the next request at once), then `speculate` with the last `depth`
    tokens. It runs on one thread and holds no device memory; copying the sampled tokens
    to the host and the drafts back is not in its time. The documents become responses
    of finished requests; nothing is evicted.
    """

    name = "arctic-inference"

    def __init__(
        self,
        rows: Sequence[Tokens],
        documents: Sequence[Tokens] = (),
        *,
        k: int = 16,
        depth: int = 24,
        max_row_len: int = 4096,
        memory_tokens: int = 4 * 2**20,
        spec_factor: float = 2.0,
        min_token_prob: float = 0.1,
    ) -> None:
        package = _module("arctic_inference.suffix_decoding", "arctic-inference")
        _check_rows(rows, max_row_len)
        self.k, self.depth = k, depth
        self.spec_factor, self.min_token_prob = spec_factor, min_token_prob
        self.last: StepTime | None = None
        self.cache = package.SuffixDecodingCache(max_tree_depth=depth)
        for index, document in enumerate(documents_within(documents, memory_tokens)):
            name = f"document {index}"
            self.cache.start_request(name, [])
            self.cache.add_active_response(name, np.array(document, np.int32))
            self.cache.stop_request(name)
        self.token_ids = np.zeros((len(rows), max_row_len), np.int32)
        self.lens = [len(row) for row in rows]
        for index, row in enumerate(rows):
            self.token_ids[index, : len(row)] = row
            self.cache.start_request(index, self.token_ids[index, : len(row)])

    def step(self, new_tokens: Sequence[Tokens]) -> list[list[int]]:
        """Append and draft, request by request; and keep the time in `last`."""
        _check_new(new_tokens, self.lens, self.token_ids.shape[1], self.k)
        for row, tokens in enumerate(new_tokens):
            end = self.lens[row] + len(tokens)
            self.token_ids[row, self.lens[row] : end] = tokens
            self.lens[row] = end
        drafts = []
        started = time.perf_counter()
        for row, tokens in enumerate(new_tokens):
            if tokens:
                self.cache.add_active_response(row, tokens)
            end = self.lens[row]
            context = self.token_ids[row, max(0, end - self.depth) : end]
            draft = self.cache.speculate(
                row,
                context,
                max_spec_tokens=self.k,
                max_spec_factor=self.spec_factor,
                min_token_prob=self.min_token_prob,
            )
            drafts.append(draft.token_ids)
        self.last = StepTime((time.perf_counter() - started) * 1e6)
        return drafts
