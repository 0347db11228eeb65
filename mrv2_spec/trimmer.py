"""Which drafts a step verifies, decided on the device without waiting for it."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mrv2_spec.kernels.fill_draft_budget import fill_draft_budget
from mrv2_spec.kernels.trim_drafts import trim_drafts

Int32Array = npt.NDArray[np.int32]

# Batches whose counts may be on their way to the device at once: the engine prepares at
# most two steps before the device has run them.
NUM_STAGED = 4


class VariableDraftTrimmer:
    """Lays out a batch with as many drafts a request as are worth verifying.

    Knows nothing of drafters: it reads how many of each slot's drafts are real and,
    for a budget, how likely the target is to accept them. All calls are made on one
    stream: what an earlier one copied to the device serves later ones.

    Args:
        num_valid_drafts: [max_num_reqs] int32 on the device, by slot; read anew at
            every call.
        query_start_loc: [max_num_reqs + 1] int32 on the device; written in place.
        num_bonus_tokens: logits rows of a request beside those of its drafts.
        max_num_reqs: request slots.
        max_total_logits: the most logits rows that one step may have.
        device: where all of this lives.
    """

    def __init__(
        self,
        num_valid_drafts: torch.Tensor,
        query_start_loc: torch.Tensor,
        num_bonus_tokens: int = 1,
        *,
        max_num_reqs: int,
        max_total_logits: int,
        device: torch.device,
    ) -> None:
        if num_valid_drafts.shape != (max_num_reqs,):
            raise ValueError(
                f"num_valid_drafts has shape {tuple(num_valid_drafts.shape)}, expected "
                f"({max_num_reqs},): one count for each request slot"
            )
        if num_valid_drafts.dtype != torch.int32:
            raise ValueError(
                f"num_valid_drafts is {num_valid_drafts.dtype}, expected torch.int32"
            )
        if query_start_loc.shape != (max_num_reqs + 1,):
            raise ValueError(
                f"query_start_loc has shape {tuple(query_start_loc.shape)}, expected "
                f"({max_num_reqs + 1},): one more than the request slots"
            )
        self.num_valid_drafts = num_valid_drafts
        self.query_start_loc = query_start_loc
        self.num_bonus_tokens = num_bonus_tokens
        self.max_num_reqs = max_num_reqs
        self.max_total_logits = max_total_logits
        self._cu_num_logits = torch.zeros(
            max_num_reqs + 1, dtype=torch.int32, device=device
        )
        # Its beginnings, by the number of requests: to slice it takes a step too long.
        self._cu_num_logits_of = [
            self._cu_num_logits[: num_reqs + 1] for num_reqs in range(max_num_reqs + 1)
        ]
        # Rows of whole 16 bytes: kernels are compiled for aligned pointers.
        shape = (2, -(-max_num_reqs // 4) * 4)
        self._counts = torch.zeros(shape, dtype=torch.int32, device=device)
        self._drafts, self._scheduled = self._counts[0], self._counts[1]
        on_gpu = device.type == "cuda"
        self._staged = [
            torch.zeros(shape, dtype=torch.int32, pin_memory=on_gpu)
            for _ in range(NUM_STAGED)
        ]
        self._staged_np = [staged.numpy() for staged in self._staged]
        # Recorded behind each one's newest copy.
        self._copied: list[Any] = [
            torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
            for _ in self._staged
        ]
        self._turn = 0
        # What the newest copy holds.
        self._newest: tuple[bytes, bytes] | None = None

    def max_draft_budget(self, num_reqs: int) -> int:
        """Return the most draft places that ``num_reqs`` requests leave room for."""
        return max(0, self.max_total_logits - num_reqs * self.num_bonus_tokens)

    def trim(
        self,
        idx_mapping: torch.Tensor,
        num_draft_tokens_per_req: Int32Array,
        num_scheduled_tokens: Int32Array,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep every real draft of every request.

        Args:
            idx_mapping: [num_reqs] int64 on the device, slot of each batch entry.
            num_draft_tokens_per_req: [num_reqs] on the host, scheduled drafts.
            num_scheduled_tokens: [num_reqs] on the host, drafts included.

        Returns:
            ``cu_num_logits`` [num_reqs + 1] and ``query_start_loc``
            [max_num_reqs + 1], int32 on the device, valid until the next call.
        """
        num_reqs = idx_mapping.shape[0]
        self._to_device(num_draft_tokens_per_req, num_scheduled_tokens)
        trim_drafts(
            idx_mapping,
            self.num_valid_drafts,
            self._drafts,
            self._scheduled,
            self._cu_num_logits,
            self.query_start_loc,
            num_bonus_tokens=self.num_bonus_tokens,
        )
        return self._cu_num_logits_of[num_reqs], self.query_start_loc

    def fill(
        self,
        idx_mapping: torch.Tensor,
        num_draft_tokens_per_req: Int32Array,
        num_scheduled_tokens: Int32Array,
        confidences: torch.Tensor,
        draft_budget: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Verify exactly ``draft_budget`` places: the likeliest drafts, then fillers.

        Args:
            idx_mapping: as for :meth:`trim`.
            num_draft_tokens_per_req: as for :meth:`trim`.
            num_scheduled_tokens: as for :meth:`trim`.
            confidences: [max_num_reqs, K] float32 on the device, by slot.
            draft_budget: at most the sum of the scheduled drafts.

        Returns:
            As :meth:`trim`.
        """
        num_reqs = idx_mapping.shape[0]
        self._to_device(num_draft_tokens_per_req, num_scheduled_tokens)
        fill_draft_budget(
            idx_mapping,
            self.num_valid_drafts,
            self._drafts,
            self._scheduled,
            confidences,
            self._cu_num_logits,
            self.query_start_loc,
            draft_budget=draft_budget,
            num_bonus_tokens=self.num_bonus_tokens,
        )
        return self._cu_num_logits_of[num_reqs], self.query_start_loc

    def _to_device(self, drafts: Int32Array, scheduled: Int32Array) -> None:
        newest = (drafts.tobytes(), scheduled.tobytes())
        if newest == self._newest:
            # It is there already, as while the same number of requests decode.
            return
        self._newest = newest
        # One transfer for both, from memory that is pinned once: to pin it anew costs
        # the host more than the copy.
        turn = self._turn = (self._turn + 1) % NUM_STAGED
        copied = self._copied[turn]
        if copied is not None and not copied.query():
            # Only a caller that never waits for its steps gets here.
            copied.synchronize()
        num_reqs = drafts.shape[0]
        staged = self._staged_np[turn]
        staged[0, :num_reqs] = drafts
        staged[1, :num_reqs] = scheduled
        self._counts.copy_(self._staged[turn], non_blocking=True)
        if copied is not None:
            copied.record()
