"""The drafters that `replay.py` replays, behind one interface.

Ours run as their plain models, which the tests hold equal to the kernels, or on a GPU
as the kernels themselves; the others are the packages that vLLM or their authors offer.
One that cannot run here raises `RivalUnavailable`, whose message is one line.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from replay_suffix import LearnedDrafter, Request
from suffix_rivals import RivalUnavailable

from mrv2_spec.kernels.propose_ngram import (
    NUM_CLASSES,
    propose_ngram,
    propose_ngram_ref,
)
from mrv2_spec.kernels.suffix_state import SuffixSettings
from mrv2_spec.suffix_memory import RequestAccess, SuffixMemory

MIN_N, MAX_N = 2, 4
DEPTH = 24
MIN_TOKEN_PROB = 0.1
CHECK_EVERY = 50
CPU = torch.device("cpu")
Drafted = Iterator[tuple[int, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a drafter is made for.

    Attributes:
        k: drafts a request at most.
        in_flight: request slots.
        width: longest row.
        factor: drafts of the suffix packages per matched token.
        device: where kernels run.
    """

    k: int
    in_flight: int
    width: int
    factor: float = 2.0
    device: torch.device = CPU


class Drafter(Protocol):
    """Drafts for the requests in its slots."""

    def start(self, slot: int, request: Request) -> None:
        """Put a request into a slot."""

    def step(self, active: dict[int, Request]) -> Drafted:
        """Take in what the rows gained, and yield a draft for each unfinished one."""

    def stop(self, slot: int) -> None:
        """Free a slot."""


class NgramIndex:
    """Where each n-gram of a growing text ended first, or last."""

    def __init__(self, tokens: Sequence[int], latest: bool) -> None:
        self.tokens: list[int] = []
        self.latest = latest
        self.ends: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens; an n-gram is found only once another token follows it."""
        for token in tokens:
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


class NgramModel:
    """Our n-gram rule on an index; every 50th draft is compared with the reference."""

    def __init__(self, setup: Setup, latest: bool) -> None:
        self.k, self.latest = setup.k, latest
        self.index: dict[int, NgramIndex] = {}
        self.steps = 0

    def start(self, slot: int, request: Request) -> None:
        self.index[slot] = NgramIndex(
            request.row[: request.prompt].tolist(), self.latest
        )

    def step(self, active: dict[int, Request]) -> Drafted:
        for slot, request in active.items():
            index = self.index[slot]
            index.extend(request.row[len(index.tokens) : request.total].tolist())
            if request.done:
                continue
            draft = index.draft(self.k)
            if self.steps % CHECK_EVERY == 0:
                self._check(index.tokens, draft)
            self.steps += 1
            yield slot, draft

    def stop(self, slot: int) -> None:
        del self.index[slot]

    def _check(self, tokens: list[int], draft: list[int]) -> None:
        expected, _ = propose_ngram_ref(
            tokens,
            num_steps=self.k,
            min_n=MIN_N,
            max_n=MAX_N,
            max_model_len=2**31,
            latest=self.latest,
        )
        if draft != expected:
            raise SystemExit(f"n-gram drafts {draft}, the reference {expected}")


class DeviceRows:
    """Token rows on a device, and the time of the kernels that read them.

    Attributes:
        gpu_us: time of each step's kernels, where they ran on a GPU.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup, self.device = setup, setup.device
        shape = (setup.in_flight, setup.width)
        self.token_ids = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.total = torch.zeros(setup.in_flight, dtype=torch.int32, device=self.device)
        self.prompt = torch.zeros_like(self.total)
        self.known = [0] * setup.in_flight
        self.gpu_us: list[float] = []

    def start(self, slot: int, request: Request) -> None:
        self.known[slot] = 0

    def place(self, active: dict[int, Request]) -> tuple[torch.Tensor, torch.Tensor]:
        """Write what the rows gained; return the slots and their new tokens."""
        sampled = []
        for slot, request in active.items():
            begin, end = self.known[slot], request.total
            new = torch.from_numpy(request.row[begin:end].astype(np.int32))
            self.token_ids[slot, begin:end] = new.to(self.device)
            sampled.append(end - max(begin, request.prompt))
            self.known[slot] = end
        slots = torch.tensor(list(active), device=self.device)
        for tensor, values in (
            (self.total, [r.total for r in active.values()]),
            (self.prompt, [r.prompt for r in active.values()]),
        ):
            tensor[slots] = torch.tensor(values, dtype=torch.int32).to(self.device)
        return slots, torch.tensor(sampled, dtype=torch.int32, device=self.device)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time the kernels launched within."""
        if self.device.type != "cuda":
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        end.synchronize()
        self.gpu_us.append(begin.elapsed_time(end) * 1000)

    def stop(self, slot: int) -> None:
        self.known[slot] = 0


class NgramKernel(DeviceRows):
    """Our n-gram kernel."""

    def __init__(self, setup: Setup, latest: bool) -> None:
        super().__init__(setup)
        self.latest = latest
        num, k, device = setup.in_flight, setup.k, self.device
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.no_ids = torch.empty(0, **ints)
        self.prior = torch.full((NUM_CLASSES, k), 0.5, device=device)
        self.best = torch.zeros(num, dtype=torch.int64, device=device)
        self.arrivals, self.num_drafts, self.classes = (
            torch.zeros(num, **ints) for _ in range(3)
        )
        self.drafts = torch.zeros(num, k, dtype=torch.int64, device=device)
        self.confidences = torch.zeros(num, k, device=device)

    def step(self, active: dict[int, Request]) -> Drafted:
        slots, sampled = self.place(active)
        with self.timed():
            propose_ngram(
                self.token_ids,
                slots,
                self.total,
                sampled,
                self.no_ids,
                self.prior,
                self.best,
                self.arrivals,
                self.drafts,
                self.num_drafts,
                self.confidences,
                self.classes,
                max_total_len=max(r.total for r in active.values()),
                max_model_len=2**30,
                num_steps=self.setup.k,
                min_n=MIN_N,
                max_n=MAX_N,
                latest=self.latest,
            )
        yield from _leading(active, self.drafts, self.num_drafts)


class SuffixKernel(DeviceRows):
    """Our suffix drafting with its memory: CUDA on a GPU, else the tensor version."""

    def __init__(self, setup: Setup, local: bool) -> None:
        super().__init__(setup)
        self.access = RequestAccess(read=not local, contribute=not local)
        self.memory = SuffixMemory(
            _learned_settings(setup), setup.in_flight, self.device
        )
        num, k, device = setup.in_flight, setup.k, self.device
        self.drafts = torch.zeros(num, k, dtype=torch.int64, device=device)
        self.num_drafts = torch.zeros(num, dtype=torch.int32, device=device)
        self.confidences = torch.zeros(num, k, device=device)

    def start(self, slot: int, request: Request) -> None:
        super().start(slot, request)
        self.memory.add_request(slot, self.access)

    def step(self, active: dict[int, Request]) -> Drafted:
        slots, sampled = self.place(active)
        self.memory.apply_staged()
        inputs = (self.token_ids, slots, self.total, self.prompt, sampled)
        with self.timed():
            self.memory.update(*inputs)
            self.memory.draft(
                *inputs,
                self.drafts,
                self.num_drafts,
                self.confidences,
                num_steps=self.setup.k,
            )
        yield from _leading(active, self.drafts, self.num_drafts)


class VllmNgram:
    """vLLM's n-gram proposer for the CPU, compiled by Numba."""

    def __init__(self, setup: Setup) -> None:
        module = _need("vllm.v1.spec_decode.ngram_proposer", "vLLM with numba")
        self.k = setup.k
        self.proposer = module.NgramProposer(
            SimpleNamespace(
                speculative_config=SimpleNamespace(
                    prompt_lookup_min=MIN_N,
                    prompt_lookup_max=MAX_N,
                    num_speculative_tokens=setup.k,
                ),
                # More than any row, so that it never ends a draft.
                model_config=SimpleNamespace(max_model_len=setup.width + setup.k),
                scheduler_config=SimpleNamespace(max_num_seqs=setup.in_flight),
                parallel_config=SimpleNamespace(tensor_parallel_size=1),
            )
        )
        self.rows = np.zeros((setup.in_flight, setup.width + setup.k), np.int32)

    def start(self, slot: int, request: Request) -> None:
        self.rows[slot, : len(request.row)] = request.row

    def step(self, active: dict[int, Request]) -> Drafted:
        lens = np.zeros(len(self.rows), np.int32)
        sampled: list[list[int]] = [[] for _ in self.rows]
        for slot, request in active.items():
            if not request.done:
                lens[slot], sampled[slot] = request.total, [1]
        drafts = self.proposer.propose(self.k, sampled, lens, self.rows)
        for slot, request in active.items():
            if not request.done:
                yield slot, drafts[slot]

    def stop(self, slot: int) -> None:
        """Leave the row: the next request writes over it."""


class Arctic:
    """arctic-inference's trees, as vLLM's V1 proposer drives them."""

    def __init__(self, setup: Setup, local: bool) -> None:
        package = _need("arctic_inference.suffix_decoding", "arctic-inference")
        self.setup = setup
        self.cache = package.SuffixDecodingCache(
            max_tree_depth=DEPTH, max_cached_requests=0 if local else 10000
        )
        self.name: dict[int, int] = {}
        self.known: dict[int, int] = {}
        self.started = 0

    def start(self, slot: int, request: Request) -> None:
        self.name[slot], self.started = self.started, self.started + 1
        self.known[slot] = request.prompt
        prompt = request.row[: request.prompt].astype(np.int32)
        self.cache.start_request(self.name[slot], prompt)

    def step(self, active: dict[int, Request]) -> Drafted:
        for slot, request in active.items():
            name = self.name[slot]
            new = request.row[self.known[slot] : request.total].astype(np.int32)
            self.known[slot] = request.total
            self.cache.add_active_response(name, new)
            if request.done:
                continue
            context = request.row[: request.total][-DEPTH:].astype(np.int32)
            draft = self.cache.speculate(
                name,
                context,
                max_spec_tokens=self.setup.k,
                max_spec_factor=self.setup.factor,
                min_token_prob=MIN_TOKEN_PROB,
            )
            yield slot, draft.token_ids

    def stop(self, slot: int) -> None:
        self.cache.stop_request(self.name.pop(slot))


class SuffixGpu(DeviceRows):
    """suffix-gpu: its own history, and finished and running responses in chunks."""

    def __init__(self, setup: Setup, local: bool) -> None:
        package = _need("suffix_gpu", "suffix-gpu")
        super().__init__(setup)
        on_gpu = self.device.type == "cuda"
        self.drafter = package.SuffixGPUDrafter(
            k=setup.k,
            device=self.device,
            max_pattern_len=DEPTH,
            enable_global=not local,
            global_capacity=2**20,
            rebuild_stream=torch.cuda.Stream() if on_gpu and not local else None,
            max_spec_factor=setup.factor,
            min_token_prob=MIN_TOKEN_PROB,
        )
        self.requests: dict[int, Request] = {}

    def start(self, slot: int, request: Request) -> None:
        super().start(slot, request)
        self.requests[slot] = request

    def step(self, active: dict[int, Request]) -> Drafted:
        self.place(active)
        drafting = [slot in active and not active[slot].done for slot in self._slots()]
        mask = torch.tensor(drafting, device=self.device)
        self.drafter.poll()
        with self.timed():
            drafts, num = self.drafter.propose(self.total, self.token_ids, mask)
        self._ingest(list(active), final=False)
        lists, counts = drafts.tolist(), num.tolist()
        for slot, request in active.items():
            if not request.done:
                yield slot, lists[slot][: counts[slot]]

    def stop(self, slot: int) -> None:
        self._ingest([slot], final=True)
        super().stop(slot)

    def _slots(self) -> range:
        return range(self.setup.in_flight)

    def _ingest(self, slots: list[int], final: bool) -> None:
        ends = [(self.requests[slot].prompt, self.known[slot]) for slot in slots]
        self.drafter.ingest_active(
            slots,
            [self.token_ids[s, a:b] for s, (a, b) in zip(slots, ends, strict=True)],
            [b - a for a, b in ends],
            final=final,
        )


def _learned_settings(setup: Setup) -> SuffixSettings:
    return SuffixSettings(
        num_speculative_tokens=setup.k, corpus_tokens=2**20, num_buckets=2**14
    )


def _leading(
    active: dict[int, Request], drafts: torch.Tensor, num_drafts: torch.Tensor
) -> Drafted:
    lists, counts = drafts.tolist(), num_drafts.tolist()
    for place, (slot, request) in enumerate(active.items()):
        if not request.done:
            yield slot, lists[place][: counts[slot]]


def _need(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise RivalUnavailable(f"{package} does not import ({reason})") from error


def _ngram(latest: bool) -> Callable[[Setup], Drafter]:
    def make(setup: Setup) -> Drafter:
        on_gpu = setup.device.type == "cuda"
        return NgramKernel(setup, latest) if on_gpu else NgramModel(setup, latest)

    return make


def _suffix(local: bool) -> Callable[[Setup], Drafter]:
    def make(setup: Setup) -> Drafter:
        if setup.device.type == "cuda":
            return SuffixKernel(setup, local)
        model: Drafter = LearnedDrafter(
            _learned_settings(setup), setup.in_flight, local
        )
        return model

    return make


def _suffix_gpu(local: bool) -> Callable[[Setup], Drafter]:
    def make(setup: Setup) -> Drafter:
        if setup.device.type != "cuda":
            raise RivalUnavailable("it drafts on a GPU, and there is none")
        return SuffixGpu(setup, local)

    return make


DRAFTERS: dict[str, Callable[[Setup], Drafter]] = {
    "ngram-earliest": _ngram(latest=False),
    "ngram-latest": _ngram(latest=True),
    "suffix-local": _suffix(local=True),
    "suffix-global": _suffix(local=False),
    "vllm-ngram": VllmNgram,
    "arctic-local": lambda setup: Arctic(setup, local=True),
    "arctic-global": lambda setup: Arctic(setup, local=False),
    "suffix-gpu-local": _suffix_gpu(local=True),
    "suffix-gpu-global": _suffix_gpu(local=False),
}
