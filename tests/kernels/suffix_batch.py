"""Random traffic for suffix drafting: requests come, grow, stop and reuse slots."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from mrv2_spec.kernels import suffix_state as layout
from mrv2_spec.kernels.suffix_state import SuffixSettings
from mrv2_spec.kernels.suffix_update import oldest_seq, read_key

POISON = 0x7FFFFFFF


@dataclass
class Traffic:
    """Rows of `max_num_reqs` slots whose texts share motifs, one step at a time."""

    rng: random.Random
    settings: SuffixSettings
    max_num_reqs: int
    alphabet: int
    max_prompt: int = 40
    max_output: int = 60
    namespaces: int = 1
    uid: int = 0
    texts: dict[int, list[int]] = field(default_factory=dict)
    # Slot and fields of the requests that began this step, and how many had before.
    started: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        width = self.settings.max_model_len
        self.rows = torch.full((self.max_num_reqs, width), POISON, dtype=torch.int32)
        self.total = torch.zeros(self.max_num_reqs, dtype=torch.int32)
        self.prompt = torch.zeros(self.max_num_reqs, dtype=torch.int32)
        # The same memory: single elements are faster to reach so.
        self._rows, self._total = self.rows.numpy(), self.total.numpy()
        self.motifs = [
            [self.rng.randrange(self.alphabet) for _ in range(self.rng.randint(3, 30))]
            for _ in range(4)
        ]

    def text(self, length: int) -> list[int]:
        """Return tokens made of motifs with now and then a token changed."""
        result: list[int] = []
        while len(result) < length:
            motif = self.rng.choice(self.motifs)
            begin = self.rng.randrange(len(motif))
            result += motif[begin:]
        for i in range(length):
            if self.rng.random() < 0.08:
                result[i] = self.rng.randrange(self.alphabet)
        return result[:length]

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Start, grow and stop requests; return (idx_mapping, num_sampled)."""
        rng = self.rng
        self.started = []
        for slot in range(self.max_num_reqs):
            if slot in self.texts:
                if self._total[slot] >= len(self.texts[slot]) or rng.random() < 0.02:
                    del self.texts[slot]
                    self._rows[slot] = POISON
                continue
            if rng.random() < 0.5:
                width = self.settings.max_model_len
                prompt = rng.randint(1, min(self.max_prompt, width - 2))
                length = min(width, prompt + rng.randint(1, self.max_output))
                self.texts[slot] = self.text(length)
                self.prompt[slot] = self.total[slot] = prompt
                self._rows[slot, :prompt] = self.texts[slot][:prompt]
                namespace = rng.randrange(self.namespaces)
                flags = rng.choice([3, 3, 3, 1, 2])
                number = self.numbers.get(namespace, 0)
                self.numbers[namespace] = number + 1
                fields = (self.uid, namespace, flags, number, namespace)
                self.started.append((slot, fields))
                self.uid += 1
        slots = rng.sample(sorted(self.texts), len(self.texts))
        sampled = []
        for slot in slots:
            if rng.random() < 0.1:
                sampled.append(0)
                continue
            most = min(rng.choice([1, 1, 2, 5, 17]), len(self.texts[slot]))
            begin = int(self._total[slot])
            end = min(len(self.texts[slot]), begin + most)
            self._rows[slot, begin:end] = self.texts[slot][begin:end]
            self._total[slot] = end
            sampled.append(end - begin)
        return torch.tensor(slots, dtype=torch.int64), torch.tensor(
            sampled, dtype=torch.int32
        )


def start_slots(state: layout.SuffixState, traffic: Traffic) -> None:
    """Write the slots of the requests that began this step."""
    if traffic.started:
        device = state.slots.device
        slots = torch.tensor([slot for slot, _ in traffic.started])
        rows = [layout.new_slot(*fields) for _, fields in traffic.started]
        values = torch.tensor(rows, dtype=torch.int32)
        state.slots[slots.to(device)] = values.to(device)


def random_settings(rng: random.Random, k: int | None = None) -> SuffixSettings:
    """Return settings small enough that rings and buckets overflow."""
    capacity = rng.choice([1, 7, 23, 24, 25, 100, 1000, 5000])
    ways = rng.choice([1, 4, 32])
    # Long chains, but not so long that the walks take all the time.
    fewest = 1 << (capacity // (16 * ways)).bit_length() if capacity > 100 else 1
    return SuffixSettings(
        num_speculative_tokens=k or rng.choice([1, 3, 8, 16]),
        max_model_len=rng.choice([16, 60, 128]),
        corpus_tokens=capacity,
        max_cached_requests=rng.choice([1, 3, 10000]),
        page_tokens=rng.choice([4, 16, 64]),
        key_masks=rng.choice([(0b1, 0b11, 0b1101, 0b111001), (0b1,), (0b11, 0b10101)]),
        ways=ways,
        num_buckets=max(fewest, rng.choice([1, 4, 256])),
        prompt_tail=rng.choice([0, 4]),
        max_new_tokens=rng.choice([8, 64]),
        max_observations=rng.choice([200 * 16, 128]),
        first_threshold=rng.choice([2**16, 2**20]),
    )


def entries(state: layout.SuffixState, settings: SuffixSettings) -> torch.Tensor:
    """Return (key, chain, seq) of all places that can still be found, sorted."""
    found = []
    oldest = oldest_seq(state, settings)
    for key, mask in enumerate(settings.key_masks):
        here = state.table[key].flatten().long()
        links = state.links[key].flatten()
        chain = torch.arange(here.shape[0], device=here.device)
        while True:
            there = here >= oldest
            here, chain = here[there], chain[there]
            if here.numel() == 0:
                break
            readable = read_key(state, settings, here, mask)[1]
            rows = (torch.full_like(here, key), chain, here)
            found.append(torch.stack(rows, 1)[readable])
            here = links[here % links.shape[0]].long()
    if not found:
        return torch.zeros(0, 3, dtype=torch.int64, device=state.table.device)
    return torch.cat(found).unique(dim=0)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor as int64 numbers."""
    return tensor.cpu().numpy().astype(np.int64)
