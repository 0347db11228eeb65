"""Launch kernels on a driver that only writes down what it is given; its own process.

Run without TRITON_INTERPRET. Kernels are compiled for Hopper as on a GPU, and Triton's
own code binds the arguments. Every launch is made twice, the second time through
Triton. Prints JSON: by scenario, for each launch, how often Triton was asked, what the
driver got, and what it got from Triton.
"""

import itertools
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mrv2_spec.draft_values import DraftValues
from mrv2_spec.kernels.count_drafts import count_drafts
from mrv2_spec.kernels.fill_draft_budget import fill_draft_budget
from mrv2_spec.kernels.launching import Launches
from mrv2_spec.kernels.propose_ngram import NUM_CLASSES, propose_ngram
from mrv2_spec.kernels.trim_drafts import trim_drafts

STREAM = 7
SLOTS, K, WIDTH = 8, 4, 64
STEPS = 8


class Recorder:
    """A driver that launches nothing. Each compiled kernel gets a number of its own."""

    def __init__(self) -> None:
        self.launches: list[Any] = []
        functions = itertools.count(100)
        self.utils = SimpleNamespace(
            load_binary=lambda *_: ("module", next(functions), 8, 0, 1024),
            unload_module=lambda *_: None,
            get_device_properties=lambda _: {"max_shared_mem": 1 << 18},
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        """Return what launches a compiled kernel."""

        def run(*values: Any) -> None:
            # Between the kernel's metadata and its arguments are Triton's hooks.
            args = [x.data_ptr() if hasattr(x, "data_ptr") else x for x in values[9:]]
            self.launches.append([*values[:5], list(values[5]), args])

        return run


RECORDER = Recorder()
launches: list[dict[str, Any]] = []
launch = Launches.__call__


def launch_twice(self: Launches, grid: Any, args: Any) -> None:
    before = self.num_ordinary
    launch(self, grid, args)
    asked = self.num_ordinary - before
    got = RECORDER.launches.pop()
    self._kernel[grid](*args, **self._constants, num_warps=self._num_warps)
    launches.append({"asked": asked, "got": got, "want": RECORDER.launches.pop()})


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def slots(num_reqs: int) -> torch.Tensor:
    return ints(num_reqs, dtype=torch.int64)


ROWS, TOTAL_LEN, NOTHING = ints(SLOTS, WIDTH), ints(SLOTS), ints(0)
DRAFTS, CHANCES = ints(SLOTS, K, dtype=torch.int64), torch.zeros(SLOTS, K)
PRIOR, BEST = torch.zeros(NUM_CLASSES, K), ints(SLOTS, dtype=torch.int64)
COUNTS, STARTS = [ints(SLOTS) for _ in range(3)], [ints(SLOTS + 1), ints(SLOTS + 1)]
VALUES = [DraftValues(SLOTS, K, n, torch.device("cpu")) for n in (0, 2)]


def ngram(step: int) -> None:
    propose_ngram(
        ROWS,
        slots(step + 1),
        TOTAL_LEN,
        ints(step + 1),
        NOTHING,
        PRIOR,
        BEST,
        COUNTS[0],
        DRAFTS,
        COUNTS[1],
        CHANCES,
        COUNTS[2],
        # A number of blocks that is 1, and a multiple of 16.
        max_total_len=1 + 2_500_000 * step,
        max_model_len=WIDTH,
        num_steps=step % (K + 1),
        min_n=2,
        max_n=3,
        latest=True,
    )


def fill(step: int) -> None:
    fill_draft_budget(
        slots(step + 1),
        *COUNTS,
        CHANCES,
        *STARTS,
        draft_budget=step,
        num_bonus_tokens=1,
    )


def trim(step: int, idx_mapping: torch.Tensor | None = None) -> None:
    if idx_mapping is None:
        idx_mapping = slots(step + 1)
    trim_drafts(idx_mapping, *COUNTS, *STARTS, num_bonus_tokens=1)


def value(step: int, which: int = 0) -> None:
    VALUES[which].update(
        ROWS, slots(step + 1), TOTAL_LEN, ints(step + 1), DRAFTS, COUNTS[0], CHANCES
    )


def count(step: int) -> None:
    count_drafts(slots(step + 1), STARTS[0], COUNTS[0], None)


def count_sources(step: int) -> None:
    count_drafts(slots(step + 1), STARTS[0], COUNTS[0], COUNTS[1])


def unaligned(step: int) -> None:
    # Every other batch begins 8 bytes past a multiple of 16.
    trim(step, slots(step + 2)[step % 2 :])


def stride(step: int) -> None:
    wide = torch.zeros(SLOTS, K * (1 + step // 2))[:, :K]
    fill_draft_budget(
        slots(1), *COUNTS, wide, *STARTS, draft_budget=1, num_bonus_tokens=1
    )


def watched(step: int) -> None:
    hook = knobs.runtime.launch_enter_hook
    calls = [lambda _: None] if step % 2 else []
    hook.calls[:] = calls
    trim(step)
    hook.calls.clear()


SCENARIOS: dict[str, Callable[[int], None]] = {
    "ngram": ngram,
    "fill": fill,
    "trim": trim,
    "value": value,
    "value_classes": lambda step: value(step, 1),
    "count": count,
    "count_sources": count_sources,
    "unaligned": unaligned,
    "stride": stride,
    "watched": watched,
}


if __name__ == "__main__":
    driver.set_active(RECORDER)  # type: ignore[arg-type]
    Launches.__call__ = launch_twice  # type: ignore[method-assign]
    results = {}
    for name, run in SCENARIOS.items():
        for step in range(STEPS):
            run(step)
        results[name] = list(launches)
        launches.clear()
    json.dump(results, sys.stdout)
