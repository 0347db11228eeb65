"""The ceiling: a drafter that knows the recorded text, with this project's trimmer."""

from typing import Any

import torch
import triton
import triton.language as tl

from grid.force import Followers, Process, Trajectories, followers
from mrv2_spec.speculator import RowSpeculator
from mrv2_spec.views import StepInputs


@triton.jit
def _oracle_kernel(
    # [num_reqs] batch_idx -> req_state_idx
    idx_mapping_ptr,
    # [num_reqs] int32
    num_sampled_ptr,
    # [max_num_reqs] int32, by slot
    total_len_ptr,
    # [max_num_reqs, max_model_len] int32, by slot
    rows_ptr,
    rows_stride,
    # [max_num_reqs] slot -> trajectory, or -1
    numbers_ptr,
    # [num_trajectories, max_len]
    tokens_ptr,
    tokens_stride,
    # [num_trajectories]
    lens_ptr,
    # [num_trajectories]
    prompt_lens_ptr,
    # [max_num_reqs, K] int64 (output)
    drafts_ptr,
    drafts_stride,
    # [max_num_reqs] int32, by slot (output)
    num_drafts_ptr,
    # [max_num_reqs, K] float32 (output)
    confidences_ptr,
    confidences_stride,
    num_steps,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    batch_idx = tl.program_id(0)
    slot = tl.load(idx_mapping_ptr + batch_idx)
    total_len = tl.load(total_len_ptr + slot)
    last = tl.load(rows_ptr + slot * rows_stride + tl.maximum(total_len - 1, 0))
    number = tl.load(numbers_ptr + slot)
    known = number >= 0
    number = tl.maximum(number, 0)
    index = total_len - tl.load(prompt_lens_ptr + number)
    left = tl.load(lens_ptr + number) - index
    sampled = tl.load(num_sampled_ptr + batch_idx)
    count = tl.minimum(num_steps, tl.maximum(left, 0))
    count = tl.where(known & (sampled > 0) & (index >= 0), count, 0)
    k = tl.arange(0, BLOCK_K)
    real = k < count
    token = tl.load(tokens_ptr + number * tokens_stride + index + k, mask=real, other=0)
    token = tl.where(real, token, last).to(tl.int64)
    tl.store(drafts_ptr + batch_idx * drafts_stride + k, token, mask=k < K)
    sure = tl.where(real, 1.0, 0.0)
    tl.store(confidences_ptr + batch_idx * confidences_stride + k, sure, mask=k < K)
    tl.store(num_drafts_ptr + slot, count)


class OracleSpeculator(RowSpeculator):
    """Drafts what the target is forced to say."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device, req_states)
        self._followers: Followers = followers(req_states.max_num_reqs, device)
        self._nothing = Trajectories([[0]], [0], device)
        self.warm_up()

    def describe(self) -> str:
        """Return what the start-up line says of the drafter."""
        return "drafts the recorded text"

    def draft(self, step: StepInputs) -> None:
        """Copy the next tokens of each request's trajectory."""
        trajectories = Process.trajectories or self._nothing
        num_reqs = step.idx_mapping.shape[0]
        _oracle_kernel[(num_reqs,)](
            step.idx_mapping,
            step.num_sampled,
            step.rows.total_len,
            step.rows.token_ids,
            step.rows.token_ids.stride(0),
            self._followers.numbers,
            trajectories.tokens,
            trajectories.tokens.stride(0),
            trajectories.lens,
            trajectories.prompt_lens,
            self.draft_tokens,
            self.draft_tokens.stride(0),
            self.num_valid_drafts_for_trim,
            self.draft_token_confidence_probs,
            self.draft_token_confidence_probs.stride(0),
            step.num_speculative_tokens,
            K=self.num_speculative_steps,
            BLOCK_K=triton.next_power_of_2(self.num_speculative_steps),
        )
