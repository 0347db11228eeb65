"""The CUDA kernels of suffix drafting on a GPU, against the tensor version."""

import os
import random
import sys
import time
from dataclasses import replace

import pytest
import torch

from mrv2_spec.kernels import suffix_state as layout
from mrv2_spec.kernels.suffix_counts import CountRules
from mrv2_spec.kernels.suffix_state import SuffixSettings, make_state
from tests.kernels.suffix_batch import Traffic, random_settings, start_slots
from tests.kernels.suffix_sides import Outputs, Sides, same_state

pytest.importorskip("cupy")
from mrv2_spec.kernels.suffix_cuda import CudaCounts, CudaSuffix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda:0")
# Rows of the large comparison. Below 10,000 it is meant for compute-sanitizer, which
# slows every kernel down: then the tensor version runs on the CPU.
NUM_ROWS = int(os.environ.get("MRV2_SPEC_SUFFIX_ROWS", "1000000"))
FEW = NUM_ROWS < 10000


@pytest.fixture
def seed() -> int:
    """A fresh seed, or MRV2_SPEC_TEST_SEED; printed either way."""
    given = os.environ.get("MRV2_SPEC_TEST_SEED")
    value = int.from_bytes(os.urandom(4), "little") if given is None else int(given)
    sys.stderr.write(f"seed {value}\n")
    return value


def sides(
    rng: random.Random,
    settings: SuffixSettings,
    reqs: int,
    counts: bool,
    **traffic: int,
) -> Sides:
    """Return both versions, the tensor version on the GPU too."""
    rules = CountRules(
        max_tree_depth=rng.choice([3, 24]),
        max_spec_factor=rng.choice([1.0, 2.0]),
        min_token_prob=rng.choice([0.0, 0.1]),
        max_places=rng.choice([8, 8192]),
    )
    return Sides(
        Traffic(rng, settings, reqs, rng.choice([2, 4, 1000]), namespaces=2, **traffic),
        CudaSuffix(settings, reqs, CUDA),
        CUDA,
        CudaCounts(settings, rules, reqs, CUDA) if counts else None,
        rules,
        (1,) if rng.random() < 0.3 else (),
        "cpu" if counts or FEW else CUDA,
    )


def test_random_rows(seed: int):
    """Both versions draft the same for NUM_ROWS rows, a new random set-up now and then.

    The seed is of all of it; each set-up is printed as it begins.
    """
    rng = random.Random(seed)
    rows = drafted = 0
    began = time.monotonic()
    while rows < NUM_ROWS:
        reqs = 60 if FEW else min(4096, NUM_ROWS)
        settings = random_settings(rng)
        if rng.random() < 0.5:
            settings = replace(settings, corpus_tokens=2**17, num_buckets=4096)
        pair = sides(rng, settings, reqs, counts=False)
        for _ in range(20 if FEW else 40):
            drafted += pair.step(rng.choice([64, 64, 2, 0]))
            if rows + pair.rows >= NUM_ROWS:
                break
        rows += pair.rows
        sys.stderr.write(
            f"seed {seed}: {rows} rows, {drafted} tokens drafted, "
            f"{time.monotonic() - began:.0f} s; last: {settings}\n"
        )
    assert drafted > 0


@pytest.mark.parametrize("case", range(20))
def test_small_batches_and_the_reference_scoring(seed: int, case: int):
    rng = random.Random(seed)
    pair = sides(rng, random_settings(rng), rng.choice([1, 6]), counts=True)
    for _ in range(20):
        pair.step(rng.choice([64, 64, 2, 0]))


def test_long_rows(seed: int):
    rng = random.Random(seed)
    settings = SuffixSettings(max_model_len=12000, corpus_tokens=2**16)
    pair = sides(rng, settings, 4, counts=False, max_prompt=11800, max_output=190)
    assert sum(pair.step(16) for _ in range(40)) > 0


def test_no_sync_no_allocation_and_graph_replay(seed: int):
    rng = random.Random(seed)
    settings = SuffixSettings(max_model_len=200, corpus_tokens=2**16)
    reqs = 32
    cuda = CudaSuffix(settings, reqs, CUDA)
    traffic = Traffic(rng, settings, reqs, alphabet=4)
    traffic.step()
    eager, replayed = (make_state(settings, reqs, CUDA) for _ in range(2))
    first, second = (
        Outputs.make(reqs, settings.num_speculative_tokens, CUDA) for _ in range(2)
    )
    ids = torch.empty(0, dtype=torch.int32, device=CUDA)
    rows, total, prompt = (
        x.to(CUDA) for x in (traffic.rows, traffic.total, traffic.prompt)
    )
    mapping = torch.arange(reqs, device=CUDA)
    sampled = torch.zeros(reqs, dtype=torch.int32, device=CUDA)
    inputs = (rows, mapping, total, prompt, sampled)

    def run(state: layout.SuffixState, outputs: Outputs) -> None:
        cuda.update(state, *inputs)
        cuda.draft(state, *inputs, ids, *outputs.all(), num_steps=16)

    run(replayed, second)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(replayed, second)
    graph.replay()
    drafted = 0
    for _ in range(30):
        idx_mapping, num_sampled = traffic.step()
        for state in (eager, replayed):
            start_slots(state, traffic)
        # Batch order and the rest of the batch change under the same graph.
        rest = [s for s in range(reqs) if s not in traffic.texts]
        mapping.copy_(torch.cat((idx_mapping, torch.tensor(rest, dtype=torch.int64))))
        sampled.zero_()
        sampled[: len(num_sampled)] = num_sampled.to(CUDA)
        rows.copy_(traffic.rows)
        total.copy_(traffic.total)
        prompt.copy_(traffic.prompt)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(eager, first)
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_allocated() == before
        torch.cuda.synchronize()
        for a, b in zip(first.all(), second.all(), strict=True):
            assert torch.equal(a, b)
        same_state(settings, eager, replayed, pending=True)
        drafted += int(first.num_drafts[idx_mapping.to(CUDA)].sum())
    assert drafted > 0


def test_default_bytes():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    state = make_state(SuffixSettings(), 256, CUDA)
    assert torch.cuda.memory_allocated() - before <= 160 * 2**20
    assert state.nbytes() <= 160 * 2**20


def test_rows_past_two_to_the_31(seed: int):
    """Offsets into the rows need 64 bits."""
    width, reqs = 2**20, 2100
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of GPU memory")
    settings = SuffixSettings(max_model_len=width, corpus_tokens=2**16)
    cuda = CudaSuffix(settings, reqs, CUDA)
    state = make_state(settings, reqs, CUDA)
    rows = torch.zeros(reqs, width, dtype=torch.int32, device=CUDA)
    slot = reqs - 1
    text = [5, 6, 7, 8, 9, 5, 6, 7]
    rows[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
    total = torch.zeros(reqs, dtype=torch.int32, device=CUDA)
    total[slot] = len(text)
    prompt = torch.full_like(total, 1)
    one = torch.ones(1, dtype=torch.int32, device=CUDA)
    mapping = torch.tensor([slot], device=CUDA)
    out = Outputs.make(reqs, 16, CUDA)
    ids = torch.empty(0, dtype=torch.int32, device=CUDA)
    inputs = (rows, mapping, total, prompt, one)
    cuda.update(state, *inputs)
    cuda.draft(state, *inputs, ids, *out.all(), num_steps=16)
    num = int(out.num_drafts[slot])
    assert num >= 2
    assert out.drafts[0, :2].tolist() == [8, 9]
