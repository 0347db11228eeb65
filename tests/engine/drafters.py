"""Drafters for ``method: custom_class``: nothing but what vLLM asks of a speculator."""

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from mrv2_spec.kernels.propose_ngram import propose_ngram_ref


class SilentSpeculator(BaseSpeculator):  # type: ignore[misc]
    """Copies what followed an earlier match; publishes nothing."""

    def __init__(self, vllm_config: Any, device: torch.device, states: Any) -> None:
        self.num_slots = vllm_config.num_speculative_tokens
        self.states = states
        self.device = device

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing."""

    def capture(self) -> None:
        """Do nothing."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft row by row in plain Python."""
        drafts = torch.zeros(input_batch.num_reqs, self.num_slots, dtype=torch.int64)
        if dummy_run:
            return drafts
        for i, slot in enumerate(input_batch.idx_mapping.tolist()):
            total_len = int(self.states.total_len.gpu[slot])
            row = self.states.all_token_ids.gpu[slot, :total_len].tolist()
            draft: list[int] = []
            if num_sampled[i] > 0:
                draft, _ = propose_ngram_ref(
                    row,
                    num_steps=self.num_slots,
                    min_n=1,
                    max_n=3,
                    max_model_len=self.states.max_model_len,
                )
            drafts[i] = row[-1]
            drafts[i, : len(draft)] = torch.tensor(draft, dtype=torch.int64)
            self.publish(slot, len(draft))
        return drafts

    def publish(self, slot: int, num_drafts: int) -> None:
        """Tell nobody how many drafts are real."""


class PublishingSpeculator(SilentSpeculator):
    """The same, and says by slot how many of its drafts are real."""

    def __init__(self, vllm_config: Any, device: torch.device, states: Any) -> None:
        super().__init__(vllm_config, device, states)
        self.num_valid_drafts_for_trim = torch.zeros(
            states.max_num_reqs, dtype=torch.int32, device=device
        )

    def publish(self, slot: int, num_drafts: int) -> None:
        """Publish the count."""
        self.num_valid_drafts_for_trim[slot] = num_drafts


class MoodySpeculator(PublishingSpeculator):
    """The same, with chances that every rank makes up for itself."""

    def __init__(self, vllm_config: Any, device: torch.device, states: Any) -> None:
        super().__init__(vllm_config, device, states)
        shape = (states.max_num_reqs, self.num_slots)
        self.draft_token_confidence_probs = torch.zeros(shape, device=device)
        self.moods = torch.Generator(device).manual_seed(
            vllm_config.parallel_config.rank
        )

    def publish(self, slot: int, num_drafts: int) -> None:
        """Publish the count, and chances."""
        super().publish(slot, num_drafts)
        self.draft_token_confidence_probs.uniform_(generator=self.moods)


class NoSpeculator:
    """Takes the same arguments, and is none."""

    def __init__(self, vllm_config: Any, device: torch.device, states: Any) -> None:
        raise AssertionError("never built")
