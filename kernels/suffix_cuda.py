"""CUDA launchers of suffix decoding: compiled once at warm-up, then three a step.

`CudaSuffix` takes the place of `update_suffix` and `draft_suffix` on a GPU. Needs CuPy,
which compiles and launches; the sources also compile without a GPU (`sources`).
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mrv2_spec.kernels.suffix_state import SuffixSettings, SuffixState

KERNELS = ("suffix_learn", "suffix_plan", "suffix_write", "suffix_draft")


def source(name: str = "suffix.cu") -> str:
    """Return the text of a CUDA source beside this file."""
    return Path(str(resources.files("mrv2_spec.kernels") / name)).read_text()


def compile_options(settings: SuffixSettings) -> tuple[str, ...]:
    """Return the compiler's options: the settings as macros."""
    masks = ",".join(str(mask) for mask in settings.key_masks)
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
        self, name: str, grid: int, block: int, *args: torch.Tensor | int
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
    """

    def __init__(
        self, settings: SuffixSettings, max_num_reqs: int, device: torch.device
    ) -> None:
        settings.check()
        self.settings = settings
        with torch.cuda.device(device):
            self._module = CudaModule(source(), compile_options(settings), KERNELS)
        # [max_num_reqs, 8] start, number, old page, its room, new pages, the first
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
            state.counters,
            state.slots,
            state.pending_tokens,
            state.pending_predicted,
            state.pending_bins,
            state.accepted,
            state.observed,
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
            state.accepted,
            state.observed,
        )
        self._module.launch(
            "suffix_write",
            num_reqs,
            64,
            token_ids,
            stride,
            idx_mapping,
            prompt_len,
            self._growth,
            state.tokens,
            state.pages,
            state.table,
            state.slots,
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
            state.accepted,
            state.observed,
            drafts,
            num_drafts,
            confidences,
        )
