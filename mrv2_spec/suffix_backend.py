"""The device side of suffix decoding: CUDA on a GPU, plain torch on the CPU."""

from typing import Protocol

import torch

from mrv2_spec.kernels.suffix_counts import CountRules, draft_by_counts
from mrv2_spec.kernels.suffix_cuda import CudaCounts, CudaSuffix
from mrv2_spec.kernels.suffix_draft import draft_suffix
from mrv2_spec.kernels.suffix_state import SuffixSettings, SuffixState
from mrv2_spec.kernels.suffix_update import update_suffix
from mrv2_spec.views import StepInputs


class SuffixOutputs(Protocol):
    """Where the drafts of a batch go."""

    # [max_num_reqs, K] int64, batch-ordered
    draft_tokens: torch.Tensor
    # [max_num_reqs] int32, by slot
    num_valid_drafts_for_trim: torch.Tensor
    # [max_num_reqs, K] float32, batch-ordered
    draft_token_confidence_probs: torch.Tensor


class SuffixBackend(Protocol):
    """What both devices can do; the results are the same."""

    def step(
        self,
        state: SuffixState,
        step: StepInputs,
        prompt_len: torch.Tensor,
        placeholder_ids: torch.Tensor,
        outputs: SuffixOutputs,
    ) -> None:
        """Learn from what was emitted, remember it, and draft.

        Args:
            state: changed in place.
            step: the batch that was just sampled.
            prompt_len: [max_num_reqs] int32.
            placeholder_ids: [any] int32, tokens never drafted.
            outputs: filled for the batch.
        """


class TorchBackend:
    """Tensor operations with no custom kernel.

    Args:
        settings: constants of the memory and of the learned scoring.
        rules: limits of the reference's scoring, or None for the learned one.
    """

    def __init__(self, settings: SuffixSettings, rules: CountRules | None) -> None:
        self._settings = settings
        self._rules = rules

    def step(
        self,
        state: SuffixState,
        step: StepInputs,
        prompt_len: torch.Tensor,
        placeholder_ids: torch.Tensor,
        outputs: SuffixOutputs,
    ) -> None:
        """See :meth:`SuffixBackend.step`."""
        rows = step.rows
        update_suffix(
            state,
            self._settings,
            rows.token_ids,
            step.idx_mapping,
            rows.total_len,
            prompt_len,
            step.num_sampled,
        )
        targets = (
            outputs.draft_tokens,
            outputs.num_valid_drafts_for_trim,
            outputs.draft_token_confidence_probs,
        )
        if self._rules is not None:
            draft_by_counts(
                state,
                self._settings,
                self._rules,
                rows.token_ids,
                step.idx_mapping,
                rows.total_len,
                step.num_sampled,
                *targets,
                num_steps=step.num_speculative_tokens,
            )
            return
        draft_suffix(
            state,
            self._settings,
            rows.token_ids,
            step.idx_mapping,
            rows.total_len,
            prompt_len,
            step.num_sampled,
            placeholder_ids,
            *targets,
            num_steps=step.num_speculative_tokens,
        )


class CudaBackend:
    """CUDA kernels, compiled here and not in a step.

    Args:
        settings: constants of the memory and of the learned scoring.
        rules: limits of the reference's scoring, or None for the learned one.
        max_num_reqs: request slots.
        device: where the state lives.
    """

    def __init__(
        self,
        settings: SuffixSettings,
        rules: CountRules | None,
        max_num_reqs: int,
        device: torch.device,
    ) -> None:
        self._suffix = CudaSuffix(settings, max_num_reqs, device)
        self._counts = (
            None if rules is None else CudaCounts(settings, rules, max_num_reqs, device)
        )

    def step(
        self,
        state: SuffixState,
        step: StepInputs,
        prompt_len: torch.Tensor,
        placeholder_ids: torch.Tensor,
        outputs: SuffixOutputs,
    ) -> None:
        """See :meth:`SuffixBackend.step`."""
        rows = step.rows
        batch = (rows.token_ids, step.idx_mapping, rows.total_len)
        targets = (
            outputs.draft_tokens,
            outputs.num_valid_drafts_for_trim,
            outputs.draft_token_confidence_probs,
        )
        num_steps = step.num_speculative_tokens
        self._suffix.update(state, *batch, prompt_len, step.num_sampled)
        if self._counts is not None:
            self._counts.draft(
                state, *batch, step.num_sampled, *targets, num_steps=num_steps
            )
            return
        self._suffix.draft(
            state,
            *batch,
            prompt_len,
            step.num_sampled,
            placeholder_ids,
            *targets,
            num_steps=num_steps,
        )


def make_backend(
    settings: SuffixSettings,
    rules: CountRules | None,
    max_num_reqs: int,
    device: torch.device,
) -> SuffixBackend:
    """Return the backend for a device; arguments as for :class:`CudaBackend`."""
    if device.type == "cuda":
        return CudaBackend(settings, rules, max_num_reqs, device)
    return TorchBackend(settings, rules)
