"""CUDA launchers of suffix decoding: compiled once at warm-up, then three a step.

`CudaSuffix` takes the place of `update_suffix` and `draft_suffix` on a GPU. Needs CuPy,
which compiles and launches; the sources also compile without a GPU (`sources`).
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from mrv2_spec.kernels.suffix_counts import CountRules
from mrv2_spec.kernels.suffix_state import SuffixSettings, SuffixState

KERNELS = ("suffix_learn", "suffix_plan", "suffix_write", "suffix_draft")
COUNT_KERNELS = ("suffix_count", "suffix_choose")


def source(name: str = "suffix.cu") -> str:
    """Return the text of a CUDA source beside this file."""
    return Path(str(resources.files("mrv2_spec.kernels") / name)).read_text()


def compile_options(settings: SuffixSettings) -> tuple[str, ...]:
    """Return the compiler's options: the settings as macros."""
    masks = ",".join(str(mask) for mask in (*settings.key_masks, 0))
    macros = {
        "K": settings.num_speculative_tokens,
        "MAX_MODEL_LEN": settings.max_model_len,
        "WINDOW": settings.window,
        "PAGE": settings.page_size,
        "NUM_PAGES": settings.num_pages,
        "MAX_PAGE_SEQ": settings.max_page_seq,
        "NUM_BUCKETS": settings.num_buckets,
        "WAYS": settings.ways,
        "NUM_KEYS": len(settings.key_masks),
        "KEY_MASKS": f"{{{masks}}}",
        "MAX_CACHED": settings.max_cached_requests,
        "PROMPT_TAIL": settings.prompt_tail,
        "MAX_NEW": settings.max_new_tokens,
        "OWN_GAP": settings.own_gap,
        "MEMORY_GAP": settings.memory_gap,
        "RESPONSE_WEIGHT": settings.response_weight,
        "OWN_WEIGHT": settings.own_weight,
        "THRESHOLD_SLOPE": settings.threshold_slope,
        "THRESHOLD_STEPS": settings.threshold_steps,
        "MIN_THRESHOLD": settings.min_threshold,
        "MAX_THRESHOLD": settings.max_threshold,
        "WASTE_BUDGET": settings.waste_budget,
        "WASTE_SLOPE": settings.waste_slope,
        "WASTE_SHIFT": settings.waste_shift,
        "MAX_OBSERVATIONS": settings.max_observations,
    }
    return ("--std=c++17", *(f"-D{name}={value}" for name, value in macros.items()))


def count_options(rules: CountRules) -> tuple[str, ...]:
    """Return the further options that the reference's scoring needs."""
    return (
        f"-DDEPTH={rules.max_tree_depth}",
        f"-DMAX_PLACES={rules.max_places}",
        f"-DMIN_PROB={rules.min_token_prob!r}",
    )


class Launcher(Protocol):
    """Launches compiled kernels by name."""

    def launch(
        self, name: str, grid: int, block: int, *args: torch.Tensor | np.int64 | int
    ) -> None:
        """Launch a kernel over `grid` blocks of `block` threads."""


class CudaModule:
    """A compiled source whose kernels launch on torch's current stream."""

    def __init__(
        self, text: str, options: tuple[str, ...], kernels: tuple[str, ...]
    ) -> None:
        import cupy

        self._cupy: Any = cupy
        module = cupy.RawModule(code=text, options=options, backend="nvrtc")
        self._kernels = {name: module.get_function(name) for name in kernels}

    def launch(
        self, name: str, grid: int, block: int, *args: torch.Tensor | np.int64 | int
    ) -> None:
        """Launch a kernel; a tensor goes as its address, a number as a C int.

        `np.int64` keeps its width.
        """
        stream = torch.cuda.current_stream().cuda_stream
        packed = tuple(
            np.uint64(a.data_ptr())
            if isinstance(a, torch.Tensor)
            else (a if isinstance(a, np.int64) else np.int32(a))
            for a in args
        )
        with self._cupy.cuda.ExternalStream(stream):
            self._kernels[name]((grid,), (block,), packed)


class CudaSuffix:
    """The learned scoring on a GPU.

    Args:
        settings: constants, compiled in.
        max_num_reqs: most requests of a batch.
        device: where the state lives.
        module: compiled kernels, where they are not to be compiled here.
    """

    def __init__(
        self,
        settings: SuffixSettings,
        max_num_reqs: int,
        device: torch.device,
        module: Launcher | None = None,
    ) -> None:
        settings.check()
        self.settings = settings
        if module is None:
            with torch.cuda.device(device):
                module = CudaModule(source(), compile_options(settings), KERNELS)
        self._module = module
        # [max_num_reqs, 8] start, number, old page, its room, new pages, the first,
        # draft positions seen
        self._growth = torch.zeros(max_num_reqs, 8, dtype=torch.int32, device=device)

    def update(
        self,
        state: SuffixState,
        token_ids: torch.Tensor,
        idx_mapping: torch.Tensor,
        total_len: torch.Tensor,
        prompt_len: torch.Tensor,
        num_sampled: torch.Tensor,
    ) -> None:
        """Do what `update_suffix` does, in three launches."""
        num_reqs = idx_mapping.shape[0]
        if num_reqs == 0:
            return
        assert token_ids.stride(1) == 1
        stride = np.int64(token_ids.stride(0))
        self._module.launch(
            "suffix_learn",
            (num_reqs + 3) // 4,
            128,
            token_ids,
            stride,
            idx_mapping,
            total_len,
            num_sampled,
            num_reqs,
            state.slots,
            state.pending_tokens,
            state.pending_predicted,
            state.pending_bins,
            state.learned,
            state.steering,
            self._growth,
        )
        self._module.launch(
            "suffix_plan",
            1,
            1024,
            idx_mapping,
            total_len,
            prompt_len,
            num_sampled,
            num_reqs,
            state.tokens,
            state.pages,
            state.table,
            state.counters,
            state.slots,
            self._growth,
            state.steering,
        )
        self._module.launch(
            "suffix_write",
            num_reqs,
            64,
            token_ids,
            stride,
            idx_mapping,
            self._growth,
            state.tokens,
            state.pages,
            state.table,
            state.counters,
            state.slots,
            state.links,
            state.pending_bins,
            state.learned,
        )

    def draft(
        self,
        state: SuffixState,
        token_ids: torch.Tensor,
        idx_mapping: torch.Tensor,
        total_len: torch.Tensor,
        prompt_len: torch.Tensor,
        num_sampled: torch.Tensor,
        placeholder_ids: torch.Tensor,
        drafts: torch.Tensor,
        num_drafts: torch.Tensor,
        confidences: torch.Tensor,
        *,
        num_steps: int,
    ) -> None:
        """Do what `draft_suffix` does, in one launch."""
        num_reqs = idx_mapping.shape[0]
        if num_reqs == 0:
            return
        assert token_ids.stride(1) == 1
        assert drafts.is_contiguous() and confidences.is_contiguous()
        self._module.launch(
            "suffix_draft",
            num_reqs,
            256,
            token_ids,
            np.int64(token_ids.stride(0)),
            idx_mapping,
            total_len,
            prompt_len,
            num_sampled,
            placeholder_ids,
            placeholder_ids.shape[0],
            num_steps,
            state.tokens,
            state.pages,
            state.table,
            state.counters,
            state.slots,
            state.pending_tokens,
            state.pending_predicted,
            state.pending_bins,
            state.links,
            state.learned,
            state.steering,
            drafts,
            num_drafts,
            confidences,
        )


class CudaCounts:
    """The reference's scoring on a GPU, `draft_by_counts`.

    Args:
        settings: constants of the memory, compiled in.
        rules: limits of a draft, compiled in.
        max_num_reqs: most requests of a batch.
        device: where the state lives.
        module: compiled kernels, where they are not to be compiled here.
    """

    def __init__(
        self,
        settings: SuffixSettings,
        rules: CountRules,
        max_num_reqs: int,
        device: torch.device,
        module: Launcher | None = None,
    ) -> None:
        if rules.max_tree_depth > 64:
            raise ValueError(f"max_tree_depth = {rules.max_tree_depth}: at most 64")
        k = settings.num_speculative_tokens
        text = source() + source("suffix_counts.cu")
        options = compile_options(settings) + count_options(rules)
        if module is None:
            with torch.cuda.device(device):
                module = CudaModule(text, options, COUNT_KERNELS)
        self._module = module
        blocks = 2 * max_num_reqs

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._places = zeros(3, blocks, rules.max_places)
        self._scores = zeros(blocks, dtype=torch.float32)
        self._tokens = zeros(blocks, k)
        self._chances = zeros(blocks, k, dtype=torch.float32)
        self._found = zeros(blocks)
        self._limits = torch.tensor(rules.limits(k), dtype=torch.int32, device=device)

    def draft(
        self,
        state: SuffixState,
        token_ids: torch.Tensor,
        idx_mapping: torch.Tensor,
        total_len: torch.Tensor,
        num_sampled: torch.Tensor,
        drafts: torch.Tensor,
        num_drafts: torch.Tensor,
        confidences: torch.Tensor,
        *,
        num_steps: int,
    ) -> None:
        """Do what `draft_by_counts` does, in two launches."""
        num_reqs = idx_mapping.shape[0]
        if num_reqs == 0:
            return
        assert token_ids.stride(1) == 1
        assert drafts.is_contiguous() and confidences.is_contiguous()
        stride = np.int64(token_ids.stride(0))
        self._module.launch(
            "suffix_count",
            2 * num_reqs,
            512,
            token_ids,
            stride,
            idx_mapping,
            total_len,
            num_sampled,
            self._limits,
            num_steps,
            state.tokens,
            state.pages,
            state.counters,
            state.slots,
            *self._places,
            self._scores,
            self._tokens,
            self._chances,
            self._found,
        )
        self._module.launch(
            "suffix_choose",
            (num_reqs + 3) // 4,
            128,
            token_ids,
            stride,
            idx_mapping,
            total_len,
            num_reqs,
            self._scores,
            self._tokens,
            self._chances,
            self._found,
            drafts,
            num_drafts,
            confidences,
        )
