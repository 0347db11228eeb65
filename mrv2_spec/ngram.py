"""n-gram drafting: continue the longest earlier copy of a request's last tokens."""

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.states import RequestState

from mrv2_spec.kernels.propose_ngram import NUM_CLASSES, propose_ngram
from mrv2_spec.speculator import RowSpeculator
from mrv2_spec.views import StepInputs

# How often the first draft of each class is wrong (no match, then the lengths of
# ``CLASS_LENGTHS``), rounded from a replay of recorded chats, code edits and agent
# logs, and how fast that falls with the position: what was copied so far was right.
_FIRST_DRAFT_WRONG = (1.0, 0.7, 0.45, 0.3, 0.3, 0.3, 0.25, 0.2, 0.05, 0.01)
_FALLS_WITH_POSITION = 0.4


def prior_acceptance(num_slots: int) -> torch.Tensor:
    """Return the chance that the target accepts a draft, before any was seen.

    Args:
        num_slots: drafts a request, K.

    Returns:
        [NUM_CLASSES, K] float32; row 0 is for no match.
    """
    first = torch.tensor(_FIRST_DRAFT_WRONG)
    assert first.shape[0] == NUM_CLASSES
    prior = 1.0 - first[:, None] / (
        1.0 + _FALLS_WITH_POSITION * torch.arange(num_slots)
    )
    prior[0] = 0.0
    return prior


class NgramSpeculator(RowSpeculator):
    """Drafts what followed the longest earlier copy of the row's end.

    The draft ends where the context ends, never crosses the model's length, and
    neither matches nor copies multimodal placeholders. One kernel launch a step. How
    likely a draft is accepted is learned by the length of its match and by position.
    """

    num_draft_classes = NUM_CLASSES

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        super().__init__(vllm_config, device, req_states)
        spec_config = vllm_config.speculative_config
        assert spec_config is not None
        assert spec_config.prompt_lookup_min is not None
        assert spec_config.prompt_lookup_max is not None
        self.min_n: int = spec_config.prompt_lookup_min
        self.max_n: int = spec_config.prompt_lookup_max
        self.latest = self.settings.tie == "latest"
        max_num_reqs = req_states.max_num_reqs
        self._best = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self._arrivals = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self._prior = prior_acceptance(self.num_speculative_steps).to(device)
        self.warm_up()

    def describe(self) -> str:
        """Return the settings in force, for the start-up line."""
        return (
            f"match {self.min_n}..{self.max_n} tokens, {self.settings.tie} on equal "
            "length"
        )

    def draft(self, step: StepInputs) -> None:
        """Draft for the batch; see :meth:`RowSpeculator.draft`."""
        values = self.draft_values
        assert values.classes is not None
        propose_ngram(
            step.rows.token_ids,
            step.idx_mapping,
            step.rows.total_len,
            step.num_sampled,
            self.placeholder_ids,
            self._prior,
            self._best,
            self._arrivals,
            self.draft_tokens,
            self.num_valid_drafts_for_trim,
            self.draft_token_confidence_probs,
            values.classes,
            max_total_len=step.max_total_len,
            max_model_len=step.rows.max_model_len,
            num_steps=step.num_speculative_tokens,
            min_n=self.min_n,
            max_n=self.max_n,
            latest=self.latest,
        )
