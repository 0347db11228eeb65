"""Judges the drafts of a speculator that is not ours by what became of them.

Whatever confidences such a drafter publishes, or none, its drafts are grouped by the
first of them, and how often each group came true corrects what it claims.
"""

from collections.abc import Callable
from typing import Any

import torch

from mrv2_spec.draft_values import DraftValues

NUM_CONFIDENCE_CLASSES = 8
# What the drafter claims counts as much as this many drafts seen.
_CLAIM_WEIGHT = 8


def judge_drafts(
    speculator: Any, req_states: Any, values: DraftValues
) -> Callable[..., torch.Tensor]:
    """Return the speculator's ``propose``, followed by a look at what it proposed."""
    propose = speculator.propose
    shape = (req_states.max_num_reqs, req_states.num_speculative_steps)
    sure = torch.ones(shape, dtype=torch.float32, device=req_states.device)

    def judged_propose(*args: Any, **kwargs: Any) -> torch.Tensor:
        drafts: torch.Tensor = propose(*args, **kwargs)
        if kwargs.get("dummy_run", False):
            return drafts
        input_batch = args[0] if args else kwargs["input_batch"]
        num_sampled = args[5] if len(args) > 5 else kwargs["num_sampled"]
        num_reqs = input_batch.num_reqs
        if num_reqs == 0:
            return drafts
        claimed = speculator.draft_token_confidence_probs
        claimed = sure if claimed is None else claimed
        values.update(
            req_states.all_token_ids.gpu,
            input_batch.idx_mapping,
            req_states.total_len.gpu,
            num_sampled,
            drafts[:num_reqs].contiguous(),
            speculator.num_valid_drafts_for_trim,
            _corrected(claimed[:num_reqs], input_batch.idx_mapping, values),
        )
        return drafts

    return judged_propose


def _corrected(
    claimed: torch.Tensor, idx_mapping: torch.Tensor, values: DraftValues
) -> torch.Tensor:
    """Return [num_reqs, K] confidences: the claims, corrected by experience."""
    assert values.counts is not None and values.classes is not None
    claimed = claimed.to(torch.float32).nan_to_num(0.0).clamp(0.0, 1.0)
    classes = (claimed[:, 0] * (NUM_CONFIDENCE_CLASSES - 1)).round().to(torch.int32)
    values.classes[idx_mapping] = classes
    decided, came_true = values.counts[:, classes.to(torch.int64)]
    corrected: torch.Tensor = (came_true + claimed * _CLAIM_WEIGHT) / (
        decided + _CLAIM_WEIGHT
    )
    return corrected
