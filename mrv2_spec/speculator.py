"""The base of the drafters that copy from the resident token rows."""

from abc import abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
from vllm.v1.worker.gpu.states import RequestState

from mrv2_spec.config import Settings, parse_settings
from mrv2_spec.draft_values import DraftValues
from mrv2_spec.placeholders import find_placeholder_ids
from mrv2_spec.views import StepInputs, TokenRows

# Steps whose drafts nobody verifies draft now and then all the same: the first two of
# so many, as a draft is judged in the step after it was made; fewer later on.
_IDLE_PERIODS = ((64, 8), (192, 16))
_LONGEST_IDLE_PERIOD = 32
_STEPS_THAT_LOOK = 2
# While what they see is good, so many in a row look where they have become rare:
# drafting need not wait for many periods where the text changes its nature. Of so many
# steps only, so that looking costs little where a text is good now and then and never
# pays.
_STEPS_THAT_LOOK_ON, _PERIOD_OF_LOOKING_ON = 16, 64


def looks(idle_step: int, stirring: bool) -> bool:
    """Tell whether a step drafts to be judged.

    Args:
        idle_step: its number since drafting slept.
        stirring: whether the drafts judged last were good.
    """
    for until, period in _IDLE_PERIODS:
        if idle_step < until:
            return idle_step % period < _STEPS_THAT_LOOK
    if stirring and idle_step % _PERIOD_OF_LOOKING_ON < _STEPS_THAT_LOOK_ON:
        return True
    return idle_step % _LONGEST_IDLE_PERIOD < _STEPS_THAT_LOOK


class RowSpeculator(BaseSpeculator):  # type: ignore[misc]
    """A speculator that drafts from tokens alone, with no forward pass of its own.

    Subclasses implement :meth:`draft`. The base narrows vLLM's wide ``propose``, owns
    what is published, and books what became of the drafts.

    Args:
        vllm_config: the engine's configuration, with a speculative part.
        device: where the token rows live.
        req_states: the runner's request states; read in place, never changed.

    Attributes:
        draft_tokens: [max_num_reqs, K] int64, batch-ordered.
        num_valid_drafts_for_trim: [max_num_reqs] int32, by slot, the leading drafts
            of a row that are real.
        draft_token_confidence_probs: [max_num_reqs, K] float32, batch-ordered, the
            chance that the target accepts a draft given those before it, as experience
            corrects what the drafter says.
    """

    supports_mm_inputs = False
    # Rejection sampling takes a draft without logits as certain.
    draft_logits = None
    # The rows are scanned every step: they must not live in host memory.
    needs_dense_token_rows = True
    # Kinds of draft that the drafter tells apart; 0: only the chances that it gives.
    num_draft_classes = 0

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        assert vllm_config.speculative_config is not None
        self.vllm_config = vllm_config
        self.device = device
        self.req_states = req_states
        self.settings: Settings = parse_settings(vllm_config.additional_config)
        self.num_speculative_steps = vllm_config.num_speculative_tokens
        shape = (req_states.max_num_reqs, self.num_speculative_steps)
        self.draft_tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        # Its first rows, by their number: to slice it takes a step too long.
        self._draft_tokens_of = [
            self.draft_tokens[:num_reqs] for num_reqs in range(shape[0] + 1)
        ]
        self.draft_token_confidence_probs = torch.zeros(
            shape, dtype=torch.float32, device=device
        )
        self.num_valid_drafts_for_trim = torch.zeros(
            req_states.max_num_reqs, dtype=torch.int32, device=device
        )
        # [any] int32, tokens that stand for embeddings: never drafted.
        self.placeholder_ids = torch.tensor(
            find_placeholder_ids(vllm_config.model_config.hf_config),
            dtype=torch.int32,
            device=device,
        )
        self._idle_steps = 0
        # [max_num_reqs], by slot: drafted for since what was drafted was last settled.
        self._pending = np.zeros(req_states.max_num_reqs, dtype=np.bool_)
        self.draft_values = DraftValues(*shape, self.num_draft_classes, device)

    @abstractmethod
    def draft(self, step: StepInputs) -> None:
        """Fill ``draft_tokens``, ``draft_token_confidence_probs`` (batch-ordered) and
        ``num_valid_drafts_for_trim`` (by slot) for the batch, without host syncs."""

    def warm_up(self) -> None:
        """Compile what drafting needs; changes no state. Subclasses call it last in
        their constructor, so that no serving step waits for a compiler."""
        nothing = torch.zeros(1, dtype=torch.int32, device=self.device)
        rows = TokenRows(
            token_ids=self.req_states.all_token_ids.gpu,
            total_len=self.req_states.total_len.gpu,
            max_model_len=self.req_states.max_model_len,
        )
        self.draft(
            StepInputs(
                rows=rows,
                idx_mapping=nothing.to(torch.int64),
                num_sampled=nothing,
                seq_lens=torch.zeros(1, dtype=torch.int32, device="cpu"),
                num_speculative_tokens=self.num_speculative_steps,
            )
        )

    def persistent_bytes(self) -> int:
        """Return the device bytes held for the whole run beside the published ones."""
        return 0

    def reset(self) -> None:
        """Forget all requests: what was drafted for them, and what became of it."""
        self.num_valid_drafts_for_trim.zero_()
        self._pending[:] = False
        self.draft_values.reset()

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Do nothing: drafting is not captured."""

    def capture(self) -> None:
        """Do nothing: drafting is not captured."""

    def has_pending_drafts(self, slots: npt.NDArray[Any]) -> bool:
        """Tell whether any of these slots may have ``num_valid_drafts_for_trim``."""
        return bool(self._pending[slots].any())

    def forget_pending(self, slot: int) -> None:
        """Take note that a slot's drafts are nobody's any more."""
        self._pending[slot] = False

    def passes_by(self, num_speculative_tokens: int, slots: npt.NDArray[Any]) -> bool:
        """Take note of a step in which :meth:`propose` would do nothing.

        Args:
            num_speculative_tokens: places that the step after it has.
            slots: [num_reqs] of the step.

        Returns:
            Whether it is such a step. Then ``propose`` need not be called for it.
        """
        if not self._idles(num_speculative_tokens) or self.has_pending_drafts(slots):
            return False
        self._idle_steps += 1
        return True

    def _idles(self, num_speculative_tokens: int) -> bool:
        return (
            num_speculative_tokens == 0
            and self.draft_values.asleep
            and not looks(self._idle_steps + 1, self.draft_values.stirring)
        )

    # Not `torch.inference_mode`: the runner is in it, and entering it again takes time.
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Draft for the batch that was just sampled.

        Returns:
            [num_reqs, K] int64; unused places hold the last sampled token. vLLM may
            write into it afterwards.
        """
        num_reqs: int = input_batch.num_reqs
        if dummy_run or num_reqs == 0:
            return self._draft_tokens_of[num_reqs]
        if num_speculative_tokens is None:
            num_speculative_tokens = self.num_speculative_steps
        req_states = self.req_states
        slots = input_batch.idx_mapping_np
        if self._idles(num_speculative_tokens):
            self._idle_steps += 1
            if self.has_pending_drafts(slots):
                # Only those that this step settled: a request may sit it out, or be
                # about to give up its slot, and its drafts are counted then.
                self.num_valid_drafts_for_trim.index_fill_(
                    0, input_batch.idx_mapping, 0
                )
                self._pending[slots] = False
            return self._draft_tokens_of[num_reqs]
        self.draft_values.asleep &= num_speculative_tokens == 0
        if self.draft_values.asleep:
            # Nobody will verify them. They are made all the same, to be compared with
            # what comes: that tells when verifying would pay.
            self._idle_steps += 1
            num_speculative_tokens = self.num_speculative_steps
        else:
            self._idle_steps = 0
        step = StepInputs(
            rows=TokenRows(
                token_ids=req_states.all_token_ids.gpu,
                total_len=req_states.total_len.gpu,
                max_model_len=req_states.max_model_len,
            ),
            idx_mapping=input_batch.idx_mapping,
            num_sampled=num_sampled,
            seq_lens=input_batch.seq_lens_cpu_upper_bound,
            num_speculative_tokens=num_speculative_tokens,
        )
        self.draft(step)
        self._pending[slots] = True
        self.draft_values.update(
            step.rows.token_ids,
            step.idx_mapping,
            step.rows.total_len,
            num_sampled,
            self.draft_tokens,
            self.num_valid_drafts_for_trim,
            self.draft_token_confidence_probs,
        )
        return self._draft_tokens_of[num_reqs]
