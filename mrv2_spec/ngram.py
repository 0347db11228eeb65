"""n-gram drafting: continue the longest earlier copy of a request's last tokens."""

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.states import RequestState

from mrv2_spec.kernels.propose_ngram import propose_ngram
from mrv2_spec.speculator import RowSpeculator
from mrv2_spec.views import StepInputs

# How often the first draft after a match of 1, 2, ... tokens is wrong, rounded from a
# replay of recorded chats, code edits and agent logs (``bench/replay_ngram.py``). The
# longest match looked for stands for longer ones too, and is wrong half as often.
_FIRST_DRAFT_WRONG = (0.7, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1)


def confidence_table(max_n: int, num_slots: int) -> torch.Tensor:
    """Return the prior chance that the target accepts a draft.

    It rises with the match length and, once a draft was accepted, with the position:
    what was copied so far was right.

    Args:
        max_n: longest match.
        num_slots: drafts a request, K.

    Returns:
        [max_n + 1, K] float32; row 0 is for no match.
    """
    table = torch.zeros(max_n + 1, num_slots)
    position = torch.arange(num_slots)
    for n in range(1, max_n + 1):
        wrong = _FIRST_DRAFT_WRONG[min(n, len(_FIRST_DRAFT_WRONG)) - 1]
        if n == max_n:
            wrong /= 2
        table[n] = 1.0 - wrong / (1.0 + 0.5 * position)
    return table


class NgramSpeculator(RowSpeculator):
    """Drafts what followed the longest earlier copy of the row's end.

    The draft ends where the context ends, never crosses the model's length, and
    neither matches nor copies multimodal placeholders. One kernel launch a step.
    """

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
        self._confidence_table = confidence_table(
            self.max_n, self.num_speculative_steps
        ).to(device)
        self.warm_up()

    def describe(self) -> str:
        """Return the settings in force, for the start-up line."""
        return (
            f"match {self.min_n}..{self.max_n} tokens, {self.settings.tie} on equal "
            "length"
        )

    def draft(self, step: StepInputs) -> None:
        """Draft for the batch; see :meth:`RowSpeculator.draft`."""
        propose_ngram(
            step.rows.token_ids,
            step.idx_mapping,
            step.rows.total_len,
            step.num_sampled,
            self.placeholder_ids,
            self._confidence_table,
            self._best,
            self._arrivals,
            self.draft_tokens,
            self.num_valid_drafts_for_trim,
            self.draft_token_confidence_probs,
            max_total_len=step.max_total_len,
            max_model_len=step.rows.max_model_len,
            num_steps=step.num_speculative_tokens,
            min_n=self.min_n,
            max_n=self.max_n,
            latest=self.latest,
        )
