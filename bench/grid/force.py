"""Makes the model say recorded texts: every logits row gets its recorded token on top.

The compute stays the model's; which drafts are accepted is decided by the text. What it
costs differs by runner. V2 copies all logits of a step to float32 as soon as any
request has a logits processor, which it would not for greedy requests, and then
launches the kernel below; V1 makes such a copy anyway, and finding each row's request
and position takes five or six small launches.

``ForcedTokens`` is a logits processor of the V2 runner; ``force_v1`` does the same on
V1. Trajectories reach the process before a run (``worker.GridWorker.grid_load``); a
request names its own by number in ``extra_args``.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

TRAJECTORY_ARG = "grid_trajectory"
# Above any logit, and exact in bfloat16.
HUGE = 2.0**100
BLOCK = 128


class Trajectories:
    """The recorded texts on the device.

    Attributes:
        tokens: [num_trajectories, max_len] int32.
        lens: [num_trajectories] int32.
        prompt_lens: [num_trajectories] int32, of the requests that follow them.
    """

    def __init__(
        self, outputs: list[list[int]], prompt_lens: list[int], device: torch.device
    ) -> None:
        table = np.zeros((len(outputs), max(map(len, outputs))), dtype=np.int32)
        for row, output in zip(table, outputs, strict=True):
            row[: len(output)] = output
        self.tokens = torch.from_numpy(table).to(device)
        lens = [len(output) for output in outputs]
        self.lens = torch.tensor(lens, dtype=torch.int32, device=device)
        self.prompt_lens = torch.tensor(prompt_lens, dtype=torch.int32, device=device)


class Followers:
    """Which trajectory each request slot follows.

    Attributes:
        numbers: [max_num_reqs] int32 on the device, -1 for none.
    """

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self.numbers = torch.full((max_num_reqs,), -1, dtype=torch.int32, device=device)
        self._staged = np.full(max_num_reqs, -1, dtype=np.int32)
        self._changed = False

    def stage(self, slot: int, number: int) -> None:
        """Note a slot's trajectory for the next ``flush``."""
        self._staged[slot] = number
        self._changed = True

    def flush(self) -> None:
        """Bring what was staged to the device, without waiting."""
        if not self._changed:
            return
        self._changed = False
        copy = torch.from_numpy(self._staged.copy())
        if self.numbers.is_cuda:
            copy = copy.pin_memory()
        self.numbers.copy_(copy, non_blocking=True)


class Process:
    """What the engine's process holds; one engine a process."""

    trajectories: Trajectories | None = None
    followers: Followers | None = None


def followers(max_num_reqs: int, device: torch.device) -> Followers:
    """Return the process's followers; the first caller makes them."""
    if Process.followers is None:
        Process.followers = Followers(max_num_reqs, device)
    return Process.followers


# Not compiled anew for a row count of one or a multiple of 16, in the midst of a run.
@triton.jit(do_not_specialize=["num_rows"])
def _force_kernel(
    # [num_rows, vocab_size]
    logits_ptr,
    logits_stride,
    # [num_rows] row -> slot
    row_slot_ptr,
    # [num_rows] position of the row's input token
    pos_ptr,
    # [max_num_reqs] slot -> trajectory, or -1
    numbers_ptr,
    # [num_trajectories, max_len]
    tokens_ptr,
    tokens_stride,
    # [num_trajectories]
    lens_ptr,
    # [num_trajectories]
    prompt_lens_ptr,
    num_rows,
    value,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    slot = tl.load(row_slot_ptr + row, mask=mask, other=0)
    number = tl.load(numbers_ptr + slot, mask=mask, other=-1)
    mask = mask & (number >= 0)
    pos = tl.load(pos_ptr + row, mask=mask, other=0)
    index = pos + 1 - tl.load(prompt_lens_ptr + number, mask=mask, other=0)
    mask = mask & (index >= 0)
    mask = mask & (index < tl.load(lens_ptr + number, mask=mask, other=0))
    token = tl.load(tokens_ptr + number * tokens_stride + index, mask=mask, other=0)
    tl.store(logits_ptr + row * logits_stride + token, value, mask=mask)


def force(
    logits: torch.Tensor,
    row_slots: torch.Tensor,
    pos: torch.Tensor,
    numbers: torch.Tensor,
    trajectories: Trajectories,
) -> None:
    """Put each row's recorded token on top, in place.

    Args:
        logits: [num_rows, vocab_size], any float type; may hold fewer rows than there
            are scheduled tokens.
        row_slots: [num_rows], each row's slot.
        pos: [num_rows], the position of each row's input token.
        numbers: [max_num_reqs] int32, each slot's trajectory or -1.
        trajectories: what is to be said.
    """
    num_rows = logits.shape[0]
    if num_rows == 0:
        return
    _force_kernel[(triton.cdiv(num_rows, BLOCK),)](
        logits,
        logits.stride(0),
        row_slots,
        pos,
        numbers,
        trajectories.tokens,
        trajectories.tokens.stride(0),
        trajectories.lens,
        trajectories.prompt_lens,
        num_rows,
        HUGE,
        BLOCK=BLOCK,
    )


class ForcedTokens(LogitsProcessor):  # type: ignore[misc]
    """Forces recorded texts on the V2 runner."""

    def __init__(self, vllm_config, req_states) -> None:  # type: ignore[no-untyped-def]
        self._followers = followers(req_states.max_num_reqs, req_states.device)

    def add_request(self, req_idx, sampling_params) -> bool:  # type: ignore[no-untyped-def]
        """Note which text the request says, if any."""
        number = (sampling_params.extra_args or {}).get(TRAJECTORY_ARG, -1)
        self._followers.stage(req_idx, number)
        return bool(number >= 0)

    def apply_staged_writes(self) -> None:
        """Bring the new requests' numbers to the device."""
        self._followers.flush()

    def apply(self, logits, ctx):  # type: ignore[no-untyped-def]
        """Put the recorded tokens on top, in place."""
        if Process.trajectories is not None:
            force(
                logits,
                ctx.expanded_idx_mapping,
                ctx.pos,
                self._followers.numbers,
                Process.trajectories,
            )
        return logits
