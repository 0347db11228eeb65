"""GPU kernels of a few steps, by what they are for."""

from collections import defaultdict
from typing import Any

import torch

# (group, parts of kernel names), the first that fits. V1's ``ngram_gpu`` is compiled as
# layers are, so its kernels have names like theirs and are among the fused layers.
GROUPS = (
    ("drafting", ("propose_ngram", "suffix_", "_oracle", "_ngram_")),
    ("valuing", ("value_drafts",)),
    ("trimming", ("fill_draft_budget", "trim_drafts")),
    ("counting", ("count_drafts",)),
    ("forcing texts", ("_force_kernel",)),
    (
        "attention",
        ("flash", "fmha", "attention", "attn", "reshape_and_cache", "varlen"),
    ),
    (
        "rejection",
        (
            "rejection", "resampl", "residual_mass", "cumulative_log_p",
            "local_logits_stats", "draft_sampled", "flatten_sampled",
            "num_sampled_and_rejected",
        ),
    ),
    (
        "batch layout",
        (
            "prepare_", "combine_", "expand_idx", "post_update", "block_table",
            "slot_mapping", "apply_write", "query_start_loc",
        ),
    ),
    ("sampling", ("sample", "gumbel", "argmax", "softmax", "temperature", "top_k",
                  "topk", "min_p", "penalt", "num_nans", "reduce_kernel")),
    ("matmul", ("gemm", "gemv", "cutlass", "nvjet", "cublas", "splitk", "xmma")),
    ("fused layers", ("triton_", "rms_norm", "silu", "rotary", "act_and_mul")),
    ("copies and fills", ("memcpy", "memset", "copy", "fill")),
    ("indexing", ("index", "gather", "scatter", "arange", "elementwise", "cat")),
)  # fmt: skip
OTHER = "other"
_NAMES_SHOWN = 12


def group_of(name: str) -> str:
    """Return the group of a kernel."""
    lower = name.lower()
    for group, parts in GROUPS:
        if any(part in lower for part in parts):
            return group
    return OTHER


def busy_us(spans: list[tuple[float, float]]) -> float:
    """Return the time in which at least one of some spans was running."""
    busy, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy


class KernelWindow:
    """Profiles the kernels of some steps; may be opened several times.

    Args:
        on_gpu: without a GPU, operators of the CPU stand in for kernels.
    """

    def __init__(self, on_gpu: bool) -> None:
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity

        self._on_gpu = on_gpu
        self._activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        self._device = DeviceType.CUDA if on_gpu else DeviceType.CPU
        self._profile: Any = None
        self._us: dict[str, float] = defaultdict(float)
        self._launches: dict[str, int] = defaultdict(int)
        self._busy_us = 0.0
        self.steps = 0

    @property
    def is_open(self) -> bool:
        """Tell whether steps are being profiled."""
        return self._profile is not None

    def open(self) -> None:
        """Begin with an idle device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        self._profile = torch.profiler.profile(activities=[self._activity])
        self._profile.start()

    def close(self, steps: int) -> None:
        """End after so many steps, when all that they launched has run."""
        if self._on_gpu:
            torch.cuda.synchronize()
        profile, self._profile = self._profile, None
        profile.stop()
        self.steps += steps
        spans = []
        for event in profile.events():
            if event.device_type != self._device:
                continue
            begin, end = event.time_range.start, event.time_range.end
            spans.append((begin, end))
            self._us[event.name] += end - begin
            self._launches[event.name] += 1
        self._busy_us += busy_us(spans)

    def figures(self) -> dict[str, Any]:
        """Return milliseconds a step: busy, by group, and the dearest kernels."""
        steps = max(self.steps, 1)
        groups: dict[str, float] = defaultdict(float)
        for name, us in self._us.items():
            groups[group_of(name)] += us / steps / 1000
        dearest = sorted(self._us, key=lambda name: -self._us[name])
        others = [name for name in dearest if group_of(name) == OTHER]
        ours = ("drafting", "valuing", "trimming", "counting", "rejection", "sampling")
        shown = dict.fromkeys(
            dearest[:_NAMES_SHOWN]
            + others[:_NAMES_SHOWN]
            + [name for name in dearest if group_of(name) in ours]
        )
        return {
            "steps": self.steps,
            "busy_ms": self._busy_us / steps / 1000,
            "groups_ms": dict(sorted(groups.items(), key=lambda one: -one[1])),
            "launches": sum(self._launches.values()) / steps,
            "kernels": [
                {
                    "name": name[:160],
                    "group": group_of(name),
                    "ms": self._us[name] / steps / 1000,
                    "launches": self._launches[name] / steps,
                }
                for name in shown
            ],
        }
