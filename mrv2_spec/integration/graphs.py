"""Captures the decode graphs that trimmed batches need.

A graph plans its attention for the longest query that it admits, and pays for that
when every request has one token. vLLM captures the widest alone, and only up to 512
tokens; beside them are captured:

- one-query graphs, for steps that verify nothing;
- graphs whose queries fit one tile of FlashAttention 3 (64 rows: the query tokens times
  the query heads that share a key head), where that is not much less than k + 1;
- graphs of more tokens: steps beyond the captured ones are launched kernel by kernel,
  which takes the host longer than it takes the GPU to run them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from mrv2_spec.config import parse_settings
from mrv2_spec.integration.methods import served_method
from mrv2_spec.integration.patching import Patch
from mrv2_spec.integration.trimmable import why_never_trimmed

# Query rows of one attention tile.
_TILE_ROWS = 64
# Drafting fewer tokens than asked for is worth a tile only if it is not many fewer.
_LEAST_SHARE = 0.75
# Captured beyond vLLM's own sizes, up to the last one.
_MORE_SIZES = (*range(576, 1025, 64), *range(1152, 2049, 128))

# On a graph manager: its dispatch lists by the longest query of their graphs.
_CANDIDATES = "_mrv2_spec_candidates"


def drafting_query_len(vllm_config: Any) -> int:
    """Return the longest query of steps that verify drafts, at most k + 1."""
    widest: int = vllm_config.num_speculative_tokens + 1
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    num_heads = model.get_num_attention_heads(parallel)
    num_kv_heads = max(model.get_num_kv_heads(parallel), 1)
    in_a_tile = _TILE_ROWS // max(num_heads // num_kv_heads, 1)
    return in_a_tile if _LEAST_SHARE * widest <= in_a_tile < widest else widest


def _may_be_trimmed(vllm_config: Any) -> bool:
    settings = parse_settings(vllm_config.additional_config)
    return (
        served_method(vllm_config) is not None
        and why_never_trimmed(vllm_config, settings) is None
    )


def _wrap_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    def _set_cudagraph_sizes(self: Any) -> None:
        compilation = self.compilation_config
        chosen_by_user = (
            compilation.max_cudagraph_capture_size is not None
            or compilation.cudagraph_capture_sizes is not None
        )
        original(self)
        sizes = compilation.cudagraph_capture_sizes
        if chosen_by_user or not sizes or not _may_be_trimmed(self):
            return
        scheduler = self.scheduler_config
        most = min(
            scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs * (self.num_speculative_tokens + 1),
        )
        sizes += [size for size in _MORE_SIZES if sizes[-1] < size <= most]
        compilation.max_cudagraph_capture_size = sizes[-1]

    return _set_cudagraph_sizes


def _narrower(desc: Any, max_num_reqs: int, widths: tuple[int, ...]) -> list[Any]:
    """Return the graphs of a widest one's size that take shorter queries only."""
    if desc.max_query_len is None:
        return []
    return [
        replace(desc, max_query_len=width)
        for width in widths
        if width < desc.max_query_len and desc.num_tokens <= width * max_num_reqs
    ]


def _wrap_init_candidates(original: Callable[..., Any]) -> Callable[..., Any]:
    def _init_candidates(self: Any) -> None:
        original(self)
        if not self.varlen_decode or served_method(self.vllm_config) is None:
            return
        widths = (1, drafting_query_len(self.vllm_config))
        for descs in self._capture_descs.values():
            descs[:] = [
                one
                for desc in descs
                for one in (desc, *_narrower(desc, self.max_num_reqs, widths))
            ]
        by_width = {}
        for least in (1, 2):
            # Narrow ones first: a step takes the first that it fits.
            by_width[least] = {
                key: [
                    one
                    for desc in descs
                    for one in (*_narrower(desc, self.max_num_reqs, widths), desc)
                    if one.max_query_len is None or one.max_query_len >= least
                ]
                for key, descs in self._candidates.items()
            }
        setattr(self, _CANDIDATES, by_width)
        self._candidates = by_width[1]

    return _init_candidates


@contextmanager
def no_one_query_graphs(graph_manager: Any) -> Iterator[None]:
    """Let every step replay a graph that admits drafts, for as long as this lasts."""
    candidates = graph_manager._candidates
    by_width = getattr(graph_manager, _CANDIDATES, None)
    if by_width is not None:
        graph_manager._candidates = by_width[2]
    try:
        yield
    finally:
        graph_manager._candidates = candidates


CONFIG_PATCHES = (Patch("VllmConfig._set_cudagraph_sizes", (("self",),), _wrap_sizes),)

PATCHES = (
    Patch("CudaGraphManager._init_candidates", (("self",),), _wrap_init_candidates),
)
