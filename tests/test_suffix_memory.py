"""Namespaces, access, purging and capacity of the memory across requests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2_spec.config import Scoring
from mrv2_spec.corpus.namespaces import Namespace
from mrv2_spec.kernels import suffix_state as layout
from mrv2_spec.suffix_memory import (
    Learners,
    RequestAccess,
    SuffixMemory,
    settings_for,
)

SECRET = list(range(100, 164))
A: Namespace = ("adapter", "salt a", None)
B: Namespace = ("adapter", "salt b", None)
OPEN = RequestAccess()


class Engine:
    """A memory and one row a slot, on the CPU."""

    def __init__(
        self, scoring: Scoring = "learned", corpus_tokens: int = 4096, cached: int = 100
    ) -> None:
        self.k = 8
        self.confidences = torch.zeros(1, self.k)
        settings = settings_for(
            scoring,
            num_speculative_tokens=self.k,
            max_model_len=4096,
            corpus_tokens=corpus_tokens,
            max_cached_requests=cached,
        )
        self.memory = SuffixMemory(settings, 4, torch.device("cpu"), scoring)
        self.rows = torch.zeros(4, 4096, dtype=torch.int32)
        self.total = torch.zeros(4, dtype=torch.int32)
        self.prompt = torch.zeros(4, dtype=torch.int32)

    def start(self, slot: int, prompt: list[int], access: RequestAccess = OPEN) -> None:
        self.memory.add_request(slot, access)
        self.rows[slot, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        self.total[slot] = self.prompt[slot] = len(prompt)

    def emit(self, slot: int, tokens: list[int]) -> list[int]:
        """Append tokens, run a step for this slot alone, return its draft."""
        begin = int(self.total[slot])
        end = begin + len(tokens)
        self.rows[slot, begin:end] = torch.tensor(tokens, dtype=torch.int32)
        self.total[slot] = end
        one = torch.ones(1, dtype=torch.int32)
        inputs = (self.rows, torch.tensor([slot]), self.total, self.prompt, one)
        drafts = torch.zeros(1, self.k, dtype=torch.int64)
        num_drafts = torch.zeros(4, dtype=torch.int32)
        self.memory.update(*inputs)
        self.memory.draft(
            *inputs, drafts, num_drafts, self.confidences, num_steps=self.k
        )
        return drafts[0, : num_drafts[slot]].tolist()

    def finish(
        self,
        tokens: list[int],
        access: RequestAccess = OPEN,
        prompt: Sequence[int] = (7,),
    ) -> None:
        """Run a request in slot 3 to its end."""
        self.start(3, [*prompt], access)
        for begin in range(0, len(tokens), 16):
            self.emit(3, tokens[begin : begin + 16])

    def ask(self, access: RequestAccess = OPEN, prompt: int = 8) -> list[int]:
        """Return what a new request drafts after the secret's first tokens."""
        self.start(0, SECRET[: prompt - 1], access)
        return self.emit(0, [SECRET[prompt - 1]])


SCORINGS = pytest.mark.parametrize("scoring", ["learned", "reference"])


@SCORINGS
def test_responses_are_found_by_others(scoring: Scoring):
    engine = Engine(scoring)
    engine.finish(SECRET)
    found = engine.ask()
    assert found
    assert found == SECRET[8 : 8 + len(found)]


@SCORINGS
def test_a_response_is_found_while_it_is_generated(scoring: Scoring):
    engine = Engine(scoring)
    engine.start(1, [7])
    engine.emit(1, SECRET[:12])
    assert engine.ask()[:4] == SECRET[8:12]


@SCORINGS
def test_namespaces_never_meet(scoring: Scoring):
    engine = Engine(scoring)
    engine.finish(SECRET, RequestAccess(A))
    assert engine.ask(RequestAccess(B)) == []
    assert engine.ask() == []
    assert engine.ask(RequestAccess(A))


class Tenant:
    """Requests of one namespace with texts that its other requests know in part."""

    def __init__(self, rng: random.Random, access: RequestAccess, slot: int) -> None:
        self.rng = rng
        self.access, self.slot = access, slot
        self.pieces = [
            [rng.randrange(40) for _ in range(rng.randint(4, 40))] for _ in range(3)
        ]
        self.left: list[int] = []

    def step(self) -> tuple[list[int] | None, list[int]]:
        """Return the prompt of a new request, if one begins, and the new tokens."""
        rng, prompt = self.rng, None
        if not self.left:
            prompt = [rng.randrange(40) for _ in range(rng.randint(1, 6))]
            self.left = [t for _ in range(3) for t in rng.choice(self.pieces)]
        num = rng.choice([1, 2, 9])
        tokens, self.left = self.left[:num], self.left[num:]
        return prompt, tokens


def answers(
    scoring: Scoring, tenants: list[Tenant], order: list[int]
) -> list[tuple[list[int], list[float]]]:
    """Let tenants step in an order; return what tenant 0 was drafted, and how sure."""
    engine = Engine(scoring, corpus_tokens=2**16)
    result = []
    for which in order:
        tenant = tenants[which]
        prompt, tokens = tenant.step()
        if prompt is not None:
            engine.start(tenant.slot, prompt, tenant.access)
        draft = engine.emit(tenant.slot, tokens)
        if which == 0:
            result.append((draft, engine.confidences[0].tolist()))
    return result


@SCORINGS
@settings(max_examples=2)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_tenant_is_drafted_as_on_an_engine_of_its_own(scoring: Scoring, seed: int):
    """Another's traffic before and between changes no draft and no confidence."""
    rng = random.Random(seed)
    num = 40

    def run(strangers: Sequence[RequestAccess]) -> Any:
        mine = random.Random(seed)
        tenants = [Tenant(mine, RequestAccess(B), 0)]
        # Their texts are of the same pieces: what leaked would be found.
        for slot, access in enumerate(strangers, start=1):
            other = Tenant(random.Random(seed), access, slot)
            other.rng = random.Random(rng.getrandbits(32))
            tenants.append(other)
        order = [0] * num
        for which in range(1, len(tenants)):
            order = [which] * rng.randint(10, 30) + order
            for _ in range(num):
                order.insert(rng.randrange(len(order)), which)
        return answers(scoring, tenants, order)

    alone = run([])
    assert any(draft for draft, _ in alone)
    assert run([RequestAccess(A), OPEN]) == alone
    # The same traffic in one namespace does change them, so the test can fail.
    assert run([RequestAccess(B)]) != alone


def test_a_new_namespace_takes_the_row_used_longest_ago():
    learners = Learners(3)
    assert learners.take(0, 10) == (0, True)
    assert learners.take(1, 11) == (1, True)
    assert learners.take(0, 10) == (0, False)
    assert learners.take(2, 12) == (2, True)
    # Slots 0 and 2 still run 10 and 12; 11 was used before but its slot is taken over.
    assert learners.take(1, 13) == (1, True)
    assert learners.take(0, 14) == (0, True)
    assert learners.take(0, 14) == (0, False)
    assert learners.take(1, 11) == (1, True)


def test_what_a_namespace_learned_is_forgotten_with_its_row():
    engine = Engine()
    learned = engine.memory.state.learned
    prior = learned[0].clone()
    rows = learned.shape[0]
    engine.finish(SECRET + SECRET, RequestAccess(A))
    assert not torch.equal(learned[0], prior)
    for i in range(rows):
        engine.start(3, [7], RequestAccess((None, str(i), None)))
    engine.emit(3, [1, 2])
    assert torch.equal(learned[0], prior)


@SCORINGS
def test_readers_and_givers(scoring: Scoring):
    engine = Engine(scoring)
    engine.finish(SECRET, RequestAccess(contribute=False))
    assert engine.ask() == []
    engine.finish(SECRET)
    assert engine.ask(RequestAccess(read=False)) == []
    assert engine.ask()


@SCORINGS
def test_prompts_stay_out(scoring: Scoring):
    engine = Engine(scoring)
    engine.start(1, SECRET)
    engine.emit(1, [9, 9, 9])
    assert engine.ask() == []


@SCORINGS
def test_purge(scoring: Scoring):
    engine = Engine(scoring)
    a, b = RequestAccess(A), RequestAccess(B)
    for everything in (False, True):
        engine.finish(SECRET, a)
        engine.finish(SECRET, b)
        if everything:
            engine.memory.purge()
        else:
            engine.memory.purge(A)
        assert engine.ask(a) == []
        assert bool(engine.ask(b)) is not everything
    assert not torch.isin(engine.memory.state.tokens, torch.tensor(SECRET[20:])).any()
    engine.finish(SECRET, a)
    assert engine.ask(a)


@SCORINGS
def test_oldest_request_leaves_first(scoring: Scoring):
    engine = Engine(scoring, cached=3)
    engine.finish(SECRET)
    engine.finish([1, 2, 3])
    assert engine.ask()
    assert engine.ask() == []


def test_a_resumed_request_gives_nothing_twice():
    engine = Engine()
    engine.start(1, [7])
    engine.emit(1, SECRET[:20])
    pages = int(engine.memory.state.counters[layout.NEXT_PAGE])
    engine.memory.add_request(2, OPEN, already_committed=21)
    engine.rows[2] = engine.rows[1]
    engine.prompt[2] = 1
    engine.total[2] = 21
    engine.emit(2, [])
    assert int(engine.memory.state.counters[layout.NEXT_PAGE]) == pages


def test_a_reset_forgets_everything():
    engine = Engine()
    fresh = engine.memory.state.counters.clone()
    engine.finish(SECRET)
    assert engine.ask()
    engine.memory.reset()
    assert torch.equal(engine.memory.state.counters, fresh)
    assert engine.ask() == []


@pytest.mark.parametrize("capacity", [1, 23, 24, 25, 1000])
def test_any_capacity_holds_a_stream_of_documents(capacity: int, rng: random.Random):
    """Every match must verify against the tokens given last, `capacity` of them."""
    engine = Engine(corpus_tokens=capacity)
    memory, settings = engine.memory, engine.memory.settings
    size = memory.nbytes()
    given: list[int] = []
    for _ in range(40):
        length = rng.choice([1, 2, 30, rng.randint(1, 300)])
        document = [rng.randrange(3) for _ in range(length)]
        engine.finish(document, prompt=())
        given += document
        pages = memory.state.pages
        live = pages[:, layout.PAGE_SEQ] >= 0
        kept = pages[live].tolist()
        assert sum(page[layout.PAGE_LEN] for page in kept) <= capacity
        text = given[-capacity:]
        for page in kept:
            index = page[layout.PAGE_SEQ] % settings.num_pages
            tokens = memory.state.tokens[index, : page[layout.PAGE_LEN]].tolist()
            assert any(
                text[i : i + len(tokens)] == tokens
                for i in range(len(text) - len(tokens) + 1)
            )
        assert memory.nbytes() == size
    assert int(memory.state.counters[layout.NEXT_PAGE]) > settings.num_pages


@pytest.mark.parametrize("capacity", [1, 23, 24, 25, 1000])
def test_a_million_tokens_through_any_capacity(capacity: int, rng: random.Random):
    """Documents of 1 to 3000 tokens: bytes stay, only the newest tokens are found."""
    settings = replace(
        settings_for(
            "learned",
            num_speculative_tokens=8,
            max_model_len=4096,
            corpus_tokens=capacity,
            max_cached_requests=10000,
        ),
        max_new_tokens=3000,
    )
    memory = SuffixMemory(settings, 2, torch.device("cpu"))
    size = memory.nbytes()
    rows = torch.zeros(2, 4096, dtype=torch.int32)
    ints = torch.zeros(2, dtype=torch.int32)
    one = torch.ones(1, dtype=torch.int32)
    given = torch.empty(0, dtype=torch.int32)
    total = documents = 0
    while total < 10**6:
        length = rng.choice([1, 2, 3000, rng.randint(1, 3000)])
        seed = torch.Generator().manual_seed(rng.getrandbits(31))
        document = torch.randint(5, (length,), dtype=torch.int32, generator=seed)
        memory.add_request(0, OPEN)
        rows[0, :length] = document
        lengths = torch.tensor([length, 0], dtype=torch.int32)
        memory.update(rows, torch.tensor([0]), lengths, ints, one)
        given = torch.cat((given, document))[-capacity:]
        total += length
        documents += 1
        assert memory.nbytes() == size
        if documents % 40:
            continue
        # A stranger's drafts continue what is among the newest tokens.
        tail = given[: max(1, len(given) // 2)][-20:]
        memory.add_request(1, RequestAccess(contribute=False))
        rows[1, : len(tail)] = tail
        lengths = torch.tensor([length, len(tail)], dtype=torch.int32)
        drafts = torch.zeros(1, 8, dtype=torch.int64)
        num_drafts = torch.zeros(2, dtype=torch.int32)
        inputs = (rows, torch.tensor([1]), lengths, ints, one)
        memory.update(*inputs)
        memory.draft(*inputs, drafts, num_drafts, torch.zeros(1, 8), num_steps=8)
        seen = set(given.tolist()) | set(tail.tolist())
        assert set(drafts[0, : num_drafts[1]].tolist()) <= seen
        live = memory.state.pages[:, layout.PAGE_SEQ] >= 0
        kept = memory.state.pages[live]
        assert int(kept[:, layout.PAGE_LEN].sum()) <= capacity
        text = given.tolist()
        for page in kept.tolist():
            index = page[layout.PAGE_SEQ] % settings.num_pages
            tokens = memory.state.tokens[index, : page[layout.PAGE_LEN]].tolist()
            assert any(
                text[i : i + len(tokens)] == tokens
                for i in range(len(text) - len(tokens) + 1)
            )
