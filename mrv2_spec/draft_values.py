"""What a step's drafts are worth: learned on the device, tallied for the host."""

from typing import Any

import torch

from mrv2_spec.kernels.value_drafts import (
    MAX_COUNT,
    NUM_ADDED,
    NUM_CONFIDENCES,
    NUM_SUMS,
    STEP_PERIOD,
    TALLY_WIDTH,
    bin_edges,
    confidence_edges,
    value_drafts,
)

# How often large counts are halved, so that old traffic fades.
STEPS_BETWEEN_HALVINGS = 16
# Rows of whole 16 bytes: kernels are compiled for aligned pointers.
_TALLY_STRIDE = -(-TALLY_WIDTH // 4) * 4


class DraftValues:
    """Books which drafts come true, and corrects the chances of the new ones.

    Args:
        max_num_reqs: request slots.
        num_speculative_tokens: K, the places of a draft.
        num_classes: kinds of draft that the drafter tells apart; 0 where places are
            told apart by the chances that it gives them.
        device: where all of this lives.

    Attributes:
        sums: [2, 2, cells] int32, see ``value_drafts``.
        added: [3, 2, cells] int32, likewise.
        classes: [max_num_reqs] int32 by slot, written by the drafter; None without
            classes.
        confidences: [max_num_reqs, K] float32 by slot, of the newest drafts.
        asleep: whether drafts are made to be judged only, where none are asked for.
        stirring: whether those judged last were good enough to judge more of them.
    """

    def __init__(
        self,
        max_num_reqs: int,
        num_speculative_tokens: int,
        num_classes: int,
        device: torch.device,
    ) -> None:
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        shape = (max_num_reqs, num_speculative_tokens)
        num_cells = num_classes * num_speculative_tokens or NUM_CONFIDENCES
        self.sums = torch.zeros(NUM_SUMS, 2, num_cells, **ints)
        self.added = torch.zeros(NUM_ADDED, 2, num_cells, **ints)
        self.classes: torch.Tensor | None = None
        if num_classes:
            self.classes = torch.zeros(max_num_reqs, **ints)
        self.confidences = torch.zeros(shape, dtype=torch.float32, device=device)
        self._bin_edges = torch.tensor([*bin_edges(), 0.0], device=device)
        self._confidence_edges = torch.tensor([*confidence_edges(), 2.0], device=device)
        self._made_tokens = torch.zeros(shape, **ints)
        self._made_cells = torch.zeros(shape, **ints)
        self._made = torch.zeros(max_num_reqs, 2, **ints)
        self._tallies = torch.zeros(2, _TALLY_STRIDE, **ints)
        self._tally_views = [tally[:TALLY_WIDTH] for tally in self._tallies]
        self.asleep = self.stirring = False
        self._steps = 0
        self._taken = 0

    @property
    def tally(self) -> torch.Tensor:
        """[TALLY_WIDTH] int32: the newest step's draft places by value, then its
        rounds and the tokens that they emitted."""
        tally: torch.Tensor = self._tally_views[self._steps % 2]
        return tally

    @property
    def counts(self) -> torch.Tensor:
        """[2, cells] int32: places decided and come true, as the next step knows them.

        For whoever looks at them from outside; changes nothing.
        """
        steps = self._steps
        counts = self.sums[(steps + 1) % NUM_SUMS] + self.added[steps % NUM_ADDED]
        if self._fades_before(steps + 1):
            counts >>= (counts[:1] > MAX_COUNT).to(torch.int32)
        return counts

    @staticmethod
    def _fades_before(step: int) -> bool:
        return step > 1 and (step - 1) % STEPS_BETWEEN_HALVINGS == 0

    def take_tally(self) -> torch.Tensor | None:
        """Return the newest tally, or None if it was taken before."""
        if self._taken == self._steps:
            return None
        self._taken = self._steps
        return self.tally

    def update(
        self,
        token_ids: torch.Tensor,
        idx_mapping: torch.Tensor,
        total_len: torch.Tensor,
        num_sampled: torch.Tensor,
        drafts: torch.Tensor,
        num_drafts: torch.Tensor,
        confidences: torch.Tensor,
    ) -> None:
        """Take in one step; the arguments are those of ``value_drafts``."""
        if idx_mapping.shape[0] == 0:
            # Nothing is launched: the tables do not come round.
            return
        self._steps += 1
        value_drafts(
            token_ids,
            idx_mapping,
            total_len,
            num_sampled,
            drafts,
            num_drafts,
            confidences,
            self.classes,
            self._bin_edges,
            self._confidence_edges,
            self.sums,
            self.added,
            self._made_tokens,
            self._made_cells,
            self._made,
            self.confidences,
            self._tallies,
            step=self._steps % STEP_PERIOD,
            fade=self._fades_before(self._steps),
        )

    def forget(self, slots: torch.Tensor) -> None:
        """Forget the drafts made for the former requests of slots.

        Args:
            slots: [any] int64, on the device.
        """
        self._made.index_fill_(0, slots, 0)

    def reset(self) -> None:
        """Forget all drafts and what was learned from them."""
        for tensor in (
            self.sums,
            self.added,
            self._made,
            self._tallies,
            self.confidences,
        ):
            tensor.zero_()
