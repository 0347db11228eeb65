"""What became of the drafts: counters on the device, totals on the host."""

from dataclasses import dataclass

import torch

from mrv2_spec.kernels import count_drafts as kernel


@dataclass(frozen=True, slots=True)
class Totals:
    """Monotonic totals of one engine, in drafts unless said otherwise.

    ``proposed == verified + invalid + never_issued + in_flight`` at any moment.
    """

    proposed: int = 0
    """Real drafts that the drafter proposed."""
    verified: int = 0
    """Real drafts that the target verified."""
    accepted: int = 0
    """Verified drafts that the target accepted."""
    never_issued: int = 0
    """Real drafts that were trimmed, not scheduled, or whose request ended."""
    invalid: int = 0
    """Real drafts that a grammar ruled out."""
    fillers: int = 0
    """Places verified without a real draft in them."""
    rounds: int = 0
    """Decode rounds: steps of a request past its prefill."""
    rounds_with_draft: int = 0
    """Decode rounds that had at least one real draft."""
    in_flight: int = 0
    """Proposed by the last step and not booked yet."""

    @property
    def coverage(self) -> float:
        """Share of the decode rounds that had a real draft; 0 without rounds."""
        return self.rounds_with_draft / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> float:
        """Accepted share of the verified drafts; 0 without any."""
        return self.accepted / self.verified if self.verified else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a decode round: one and the accepted drafts; 0 without rounds."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 0.0


class DraftCounters:
    """Device counters of one speculator.

    Args:
        max_num_reqs: request slots.
        device: where the speculator runs.
    """

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        self._counters = torch.zeros(
            len(kernel.COUNTERS), dtype=torch.int64, device=device
        )
        self._in_flight = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self._warm_up()

    def _warm_up(self) -> None:
        # Compile both variants now: a serving step must not wait for a compiler. A
        # request with nothing in flight and nothing proposed is booked as nothing.
        slots = torch.zeros(1, dtype=torch.int64, device=self._counters.device)
        nothing = torch.zeros(2, dtype=torch.int32, device=self._counters.device)
        for num_acceptable in (None, nothing):
            self.book(
                slots, nothing, nothing, num_acceptable, nothing, nothing, nothing
            )

    def book(
        self,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor,
        cu_num_logits: torch.Tensor,
        num_acceptable: torch.Tensor | None,
        total_len: torch.Tensor,
        prefill_len: torch.Tensor,
        num_valid_drafts: torch.Tensor,
    ) -> None:
        """Book one step; shapes as in :func:`mrv2_spec.kernels.count_drafts`."""
        kernel.count_drafts(
            idx_mapping,
            num_sampled,
            cu_num_logits,
            num_acceptable,
            total_len,
            prefill_len,
            num_valid_drafts,
            self._in_flight,
            self._counters,
        )

    def reset(self) -> None:
        """Start from zero; what is in flight is forgotten."""
        self._counters.zero_()
        self._in_flight.zero_()

    def read(self) -> Totals:
        """Return the totals. Waits for the device: not for use within a step."""
        values = dict(zip(kernel.COUNTERS, self._counters.tolist(), strict=True))
        return Totals(**values, in_flight=int(self._in_flight.sum()))
