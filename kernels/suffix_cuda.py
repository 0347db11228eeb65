"""CUDA launchers of suffix decoding: compiled once at warm-up, then four a step.

`CudaSuffix` takes the place of `update_suffix` and `draft_suffix` on a GPU. Needs CuPy,
which compiles; the sources also compile without a GPU (`source`).
"""

from __future__ import annotations

import ctypes
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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

    def launch(self, name: str, grid: int, block: int, args: tuple[int, ...]) -> None:
        """Launch a kernel over `grid` blocks of `block` threads.

        Args:
            name: which kernel.
            grid: blocks.
            block: threads of a block.
            args: addresses and numbers, none below 0, as the kernel declares them.
        """


class CudaModule:
    """A compiled source whose kernels launch on torch's current stream.

    CuPy compiles and loads; launches go to the driver, because four of them a step
    through CuPy cost the host as much as a small model's whole forward pass.
    """

    def __init__(
        self, text: str, options: tuple[str, ...], kernels: tuple[str, ...]
    ) -> None:
        import cupy

        # Kept: what the kernels belong to is unloaded with it.
        self._module: Any = cupy.RawModule(code=text, options=options, backend="nvrtc")
        self._device = torch.cuda.current_device()
        driver = ctypes.CDLL("libcuda.so.1")
        self._launch: Any = driver.cuLaunchKernel
        self._launch.argtypes = (
            [ctypes.c_void_p]
            + [ctypes.c_uint] * 7
            + [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        )
        self._kernels = {
            name: _Kernel(self._module.get_function(name).kernel.ptr)
            for name in kernels
        }

    def launch(self, name: str, grid: int, block: int, args: tuple[int, ...]) -> None:
        """Launch a kernel."""
        kernel = self._kernels[name]
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        pointers = kernel.put(args)
        error = self._launch(
            kernel.handle, grid, 1, 1, block, 1, 1, 0, stream, pointers, None
        )
        if error:
            raise RuntimeError(f"cuLaunchKernel of {name}: CUDA driver error {error}")


class _Kernel:
    """A kernel's handle and the places that its arguments are passed in.

    A place has 8 bytes; the driver copies as many of them as the kernel declares, the
    low ones first, while it launches.
    """

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self._values: Any = None
        self._pointers: Any = None
        self._address = 0

    def put(self, args: tuple[int, ...]) -> int:
        """Write the arguments; return the address of their addresses."""
        if self._values is None:
            num = len(args)
            self._values = (ctypes.c_uint64 * num)()
            base = ctypes.addressof(self._values)
            self._pointers = (ctypes.c_void_p * num)(
                *(base + 8 * i for i in range(num))
            )
            self._address = ctypes.addressof(self._pointers)
        self._values[:] = args
        return self._address


class _Addresses:
    """The addresses of a state's tensors, by their names."""

    def __init__(self, state: SuffixState) -> None:
        self.__dict__.update(
            {f.name: getattr(state, f.name).data_ptr() for f in fields(state)}
        )

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...


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
        self._growth_at = self._growth.data_ptr()
        self._state: SuffixState | None = None
        self._state_at: _Addresses | None = None

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
        stride, row_stride = token_ids.stride()[::-1]
        assert stride == 1
        launch, at, growth = (
            self._module.launch,
            self._addresses(state),
            self._growth_at,
        )
        rows, mapping = token_ids.data_ptr(), idx_mapping.data_ptr()
        total, sampled = total_len.data_ptr(), num_sampled.data_ptr()
        launch(
            "suffix_learn",
            (num_reqs + 3) // 4,
            128,
            (
                rows,
                row_stride,
                mapping,
                total,
                sampled,
                num_reqs,
                at.slots,
                at.pending_tokens,
                at.pending_predicted,
                at.pending_bins,
                at.learned,
                at.steering,
                growth,
            ),
        )
        launch(
            "suffix_plan",
            1,
            1024,
            (
                mapping,
                total,
                prompt_len.data_ptr(),
                sampled,
                num_reqs,
                at.tokens,
                at.pages,
                at.table,
                at.counters,
                at.slots,
                growth,
                at.steering,
            ),
        )
        launch(
            "suffix_write",
            num_reqs,
            64,
            (
                rows,
                row_stride,
                mapping,
                growth,
                at.tokens,
                at.pages,
                at.table,
                at.counters,
                at.slots,
                at.links,
                at.pending_bins,
                at.learned,
            ),
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
        stride, row_stride = token_ids.stride()[::-1]
        assert stride == 1
        assert drafts.is_contiguous() and confidences.is_contiguous()
        at = self._addresses(state)
        self._module.launch(
            "suffix_draft",
            num_reqs,
            256,
            (
                token_ids.data_ptr(),
                row_stride,
                idx_mapping.data_ptr(),
                total_len.data_ptr(),
                prompt_len.data_ptr(),
                num_sampled.data_ptr(),
                placeholder_ids.data_ptr(),
                placeholder_ids.shape[0],
                num_steps,
                at.tokens,
                at.pages,
                at.table,
                at.counters,
                at.slots,
                at.pending_tokens,
                at.pending_predicted,
                at.pending_bins,
                at.links,
                at.learned,
                at.steering,
                at.draft_sources,
                drafts.data_ptr(),
                num_drafts.data_ptr(),
                confidences.data_ptr(),
            ),
        )

    def _addresses(self, state: SuffixState) -> _Addresses:
        # The tensors of a state stay where they are.
        if state is not self._state:
            self._state, self._state_at = state, _Addresses(state)
        assert self._state_at is not None
        return self._state_at


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
        stride = token_ids.stride(0)
        own = [
            x.data_ptr()
            for x in (self._scores, self._tokens, self._chances, self._found)
        ]
        self._module.launch(
            "suffix_count",
            2 * num_reqs,
            512,
            (
                token_ids.data_ptr(),
                stride,
                idx_mapping.data_ptr(),
                total_len.data_ptr(),
                num_sampled.data_ptr(),
                self._limits.data_ptr(),
                num_steps,
                state.tokens.data_ptr(),
                state.pages.data_ptr(),
                state.counters.data_ptr(),
                state.slots.data_ptr(),
                *(places.data_ptr() for places in self._places),
                *own,
            ),
        )
        self._module.launch(
            "suffix_choose",
            (num_reqs + 3) // 4,
            128,
            (
                token_ids.data_ptr(),
                stride,
                idx_mapping.data_ptr(),
                total_len.data_ptr(),
                num_reqs,
                *own,
                state.draft_sources.data_ptr(),
                drafts.data_ptr(),
                num_drafts.data_ptr(),
                confidences.data_ptr(),
            ),
        )
