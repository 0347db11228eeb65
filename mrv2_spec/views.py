"""What a drafter may read: the resident token rows, and this step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The runner's resident rows, by request slot. Read only."""

    # [max_num_reqs, max_model_len] int32; undefined at and past the total length
    token_ids: torch.Tensor
    # [max_num_reqs] int32, prompt and output tokens
    total_len: torch.Tensor
    # drafts must end before this position
    max_model_len: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The batch that was just sampled, in batch order."""

    rows: TokenRows
    # [num_reqs] int64, batch_idx -> req_state_idx
    idx_mapping: torch.Tensor
    # [num_reqs] int32, tokens sampled; 0 inside a prefill
    num_sampled: torch.Tensor
    # [>= num_reqs] int32 on the host, bounds on what the rows held before the token
    # just sampled
    seq_lens: torch.Tensor
    # drafts a request may get this step, 0 to K
    num_speculative_tokens: int

    @property
    def max_total_len(self) -> int:
        """A bound on the total length of the batch's rows."""
        # By numpy: as torch operations these would take several times as long.
        seq_lens = self.seq_lens.numpy()[: self.idx_mapping.shape[0]]
        return min(int(seq_lens.max()) + 1, self.rows.max_model_len)


# A request's own arguments (``extra_args``, over HTTP ``vllm_xargs``).
NAMESPACE_ARG = "mrv2_spec_namespace"
READ_ARG = "mrv2_spec_read"
CONTRIBUTE_ARG = "mrv2_spec_contribute"


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that was just given a slot: new, or back after a preemption."""

    slot: int
    prompt_len: int
    # tokens known at once: the prompt and, after a preemption, the output so far
    prefill_len: int
    # name of the LoRA adapter
    adapter: str | None
    cache_salt: str | None
    # the user's own arguments of the request
    extra_args: Mapping[str, Any]
