"""Captures decode graphs of several widths, so that narrow steps replay narrow ones.

A graph that admits queries of up to K + 1 tokens plans its attention for that many,
and pays for them when every request has one. vLLM captures the widest alone; the
narrower ones captured beside it come first wherever a step fits both.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mrv2_spec.integration.methods import served_method
from mrv2_spec.integration.patching import Patch

# Places on a graph manager: its dispatch lists with the widest graphs alone.
_WIDE_CANDIDATES = "_mrv2_spec_wide_candidates"


def widths_below(max_query_len: int) -> tuple[int, ...]:
    """Return the query lengths to capture beside the widest, ascending."""
    return (1,) if max_query_len > 1 else ()


def _narrower(desc: Any, max_num_reqs: int) -> list[Any]:
    """Return the graphs of a widest one's size that take shorter queries only."""
    if desc.max_query_len is None:
        return []
    return [
        replace(desc, max_query_len=width)
        for width in widths_below(desc.max_query_len)
        if desc.num_tokens <= width * max_num_reqs
    ]


def _wrap_init_candidates(original: Callable[..., Any]) -> Callable[..., Any]:
    def _init_candidates(self: Any) -> None:
        original(self)
        if not self.varlen_decode or served_method(self.vllm_config) is None:
            return
        for descs in self._capture_descs.values():
            descs[:] = [
                one
                for desc in descs
                for one in (desc, *_narrower(desc, self.max_num_reqs))
            ]
        setattr(self, _WIDE_CANDIDATES, dict(self._candidates))
        for key, descs in self._candidates.items():
            self._candidates[key] = [
                one
                for desc in descs
                for one in (*_narrower(desc, self.max_num_reqs), desc)
            ]

    return _init_candidates


class widest_only:
    """Within this block a graph manager replays its widest decode graphs alone."""

    def __init__(self, graph_manager: Any) -> None:
        self._graph_manager = graph_manager
        self._candidates = graph_manager._candidates

    def __enter__(self) -> None:
        wide = getattr(self._graph_manager, _WIDE_CANDIDATES, self._candidates)
        self._graph_manager._candidates = wide

    def __exit__(self, *exc: object) -> None:
        self._graph_manager._candidates = self._candidates


def captured_sizes(graph_manager: Any, max_query_len: int) -> Sequence[int]:
    """Return the ascending token counts of the full graphs that admit such queries."""
    return sorted(
        {
            desc.num_tokens
            for desc in graph_manager.graphs
            if desc.num_active_loras == 0
            and (desc.max_query_len or max_query_len) >= max_query_len
        }
    )


PATCHES = (
    Patch("CudaGraphManager._init_candidates", (("self",),), _wrap_init_candidates),
)
