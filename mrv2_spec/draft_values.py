"""What a step's drafts are worth: learned on the device, tallied for the host."""

from typing import Any

import torch

from mrv2_spec.kernels.value_drafts import TALLY_WIDTH, bin_edges, value_drafts

# Counts above this are halved, so that old traffic fades, and how often this is looked
# at.
MAX_COUNT = 512
STEPS_BETWEEN_HALVINGS = 16


class DraftValues:
    """Books which drafts come true, and publishes the value of the new ones.

    Args:
        max_num_reqs: request slots.
        num_speculative_tokens: K, the places of a draft.
        num_classes: kinds of draft whose acceptance is learned apart; 0 where the
            drafter's own confidences are taken as they are.
        device: where all of this lives.

    Attributes:
        counts: [2, num_classes, K] int32, decided and come true; None without classes.
        classes: [max_num_reqs] int32 by slot, written by the drafter; likewise.
        confidences: [max_num_reqs, K] float32 by slot, of the newest drafts.
        tally: [2, TALLY_WIDTH] int32, of the newest step: its draft places by value
            and, last, its rounds and their tokens; of all drafts, and of those that
            would also have been made had every right token been taken at once.
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
        self.counts: torch.Tensor | None = None
        self.classes: torch.Tensor | None = None
        if num_classes:
            self.counts = torch.zeros(2, num_classes, num_speculative_tokens, **ints)
            self.classes = torch.zeros(max_num_reqs, **ints)
        self.confidences = torch.zeros(shape, dtype=torch.float32, device=device)
        # Whether the drafts of the coming steps go unverified.
        self.unverified = False
        self._edges = torch.tensor([*bin_edges(), 0.0], device=device)
        self._held_tokens = torch.zeros(shape, **ints)
        self._held = torch.zeros(max_num_reqs, 4, **ints)
        self._tallies = torch.zeros(2, 2, TALLY_WIDTH, **ints)
        self._steps = 0

    @property
    def tally(self) -> torch.Tensor:
        tally: torch.Tensor = self._tallies[self._steps % 2]
        return tally

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
            self._edges,
            self.counts,
            self._held_tokens,
            self._held,
            self.confidences,
            self._tallies[self._steps % 2],
            self._tallies[(self._steps + 1) % 2],
            hold=self.unverified,
        )
        if self.counts is not None and self._steps % STEPS_BETWEEN_HALVINGS == 0:
            self.counts >>= (self.counts[:1] > MAX_COUNT).to(torch.int32)

    def reset(self) -> None:
        """Forget all drafts and what was learned from them."""
        for tensor in (self._held, self._tallies, self.confidences):
            tensor.zero_()
        if self.counts is not None:
            self.counts.zero_()
