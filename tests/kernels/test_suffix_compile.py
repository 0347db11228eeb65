"""The CUDA sources compile for Hopper without a GPU."""

from __future__ import annotations

import pytest

from mrv2_spec.kernels.suffix_counts import CountRules
from mrv2_spec.kernels.suffix_cuda import (
    COUNT_KERNELS,
    KERNELS,
    compile_options,
    count_options,
    source,
)
from mrv2_spec.kernels.suffix_state import SuffixSettings
from tests.kernels.nvrtc import compile_source, find_nvrtc

LIBRARY = find_nvrtc()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no NVRTC library")


@pytest.mark.parametrize(
    "settings",
    [
        SuffixSettings(),
        SuffixSettings(
            num_speculative_tokens=1, corpus_tokens=1, max_cached_requests=1
        ),
        SuffixSettings(num_speculative_tokens=48, key_masks=(0b1,), ways=1),
        SuffixSettings(key_masks=(), ways=1, num_buckets=1, prompt_tail=0),
    ],
    ids=["default", "smallest", "widest", "no keys"],
)
def test_sources_compile(settings: SuffixSettings):
    assert LIBRARY is not None
    options = compile_options(settings) + count_options(CountRules())
    text = source() + source("suffix_counts.cu")
    log = compile_source(text, (*options, "--ptxas-options=-v"), LIBRARY)
    for kernel in KERNELS + COUNT_KERNELS:
        assert f"'{kernel}'" in log
    assert "error" not in log


def test_an_error_is_reported():
    assert LIBRARY is not None
    with pytest.raises(ValueError, match="error"):
        compile_source("__global__ void f() { undefined; }", (), LIBRARY)
