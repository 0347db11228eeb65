"""The CUDA sources, run on the host, against the tensor version."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mrv2_spec.kernels.suffix_counts import CountRules
from mrv2_spec.kernels.suffix_cuda import (
    COUNT_KERNELS,
    KERNELS,
    CudaCounts,
    CudaSuffix,
    compile_options,
    count_options,
    source,
)
from mrv2_spec.kernels.suffix_state import MEMORY, OWN, SuffixSettings
from tests.kernels.cuda_host import HostModule, has_compiler
from tests.kernels.suffix_batch import Traffic, random_settings
from tests.kernels.suffix_sides import Sides

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
CPU = torch.device("cpu")


def build(
    settings: SuffixSettings, rules: CountRules, reqs: int, folder: Path, seed: int
) -> tuple[CudaSuffix, CudaCounts]:
    text = source() + source("suffix_counts.cu")
    options = compile_options(settings) + count_options(rules)
    module = HostModule(text, options, KERNELS + COUNT_KERNELS, folder, seed)
    return (
        CudaSuffix(settings, reqs, CPU, module),
        CudaCounts(settings, rules, reqs, CPU, module),
    )


@pytest.mark.parametrize("case", range(6))
def test_random_traffic(rng: random.Random, tmp_path: Path, case: int):
    settings = random_settings(rng)
    rules = CountRules(
        max_tree_depth=rng.choice([3, 24]),
        max_spec_factor=rng.choice([1.0, 2.0]),
        min_token_prob=rng.choice([0.0, 0.1]),
        max_places=rng.choice([8, 8192]),
    )
    reqs = rng.choice([1, 4])
    cuda, counts = build(settings, rules, reqs, tmp_path, rng.getrandbits(31))
    traffic = Traffic(
        rng, settings, reqs, alphabet=rng.choice([2, 5, 1000]), namespaces=2
    )
    placeholders = (1,) if case % 3 == 0 else ()
    sides = Sides(traffic, cuda, "cpu", counts, rules, placeholders)
    drafted = sum(sides.step(rng.choice([64, 64, 2, 0])) for _ in range(12))
    assert drafted >= 0


def test_both_sources(rng: random.Random, tmp_path: Path):
    """Traffic whose texts share motifs drafts from both, with either scoring."""
    settings = SuffixSettings(
        num_speculative_tokens=4,
        max_model_len=128,
        corpus_tokens=4096,
        num_buckets=64,
        page_tokens=4,
    )
    rules = CountRules()
    cuda, counts = build(settings, rules, 4, tmp_path, rng.getrandbits(31))
    traffic = Traffic(rng, settings, 4, alphabet=1000)
    sides = Sides(traffic, cuda, "cpu", counts, rules)
    for _ in range(100):
        sides.step(4)
        found = (sides.sources, sides.count_sources)
        if all(one[source] > 4 for one in found for source in (OWN, MEMORY)):
            return
    raise AssertionError(found)


def test_bins_that_were_never_wrong_draft(rng: random.Random, tmp_path: Path):
    settings = SuffixSettings(
        num_speculative_tokens=4, max_model_len=60, corpus_tokens=5000, num_buckets=64
    )
    cuda, _ = build(settings, CountRules(), 4, tmp_path, rng.getrandbits(31))
    sides = Sides(Traffic(rng, settings, 4, alphabet=3), cuda)
    for state in (sides.plain, sides.other):
        state.learned[..., 0] = state.learned[..., 1]
    drafted = 0
    for _ in range(4):
        drafted += sides.step(4)
        sure = sides.outputs[1].confidences == 1.0
        if sure.any():
            break
    assert sure.any()
    assert drafted > 0


def test_long_rows(rng: random.Random, tmp_path: Path):
    """More places than are kept, rows longer than a chunk."""
    settings = SuffixSettings(
        max_model_len=5000, corpus_tokens=4096, num_buckets=64, max_new_tokens=64
    )
    cuda, _ = build(settings, CountRules(), 2, tmp_path, rng.getrandbits(31))
    traffic = Traffic(rng, settings, 2, alphabet=3, max_prompt=4900, max_output=90)
    sides = Sides(traffic, cuda)
    assert sum(sides.step(16) for _ in range(8)) > 0


def test_page_numbers_start_afresh_at_their_limit(rng: random.Random, tmp_path: Path):
    settings = replace(random_settings(rng, k=4), corpus_tokens=100, page_tokens=4)
    cuda, _ = build(settings, CountRules(), 3, tmp_path, rng.getrandbits(31))
    sides = Sides(Traffic(rng, settings, 3, alphabet=3), cuda)
    near = settings.max_page_seq - 6
    for state in (sides.plain, sides.other):
        state.counters[0] = near
    for _ in range(10):
        sides.step(4)
    assert int(sides.other.counters[0]) < near
