"""Judges the drafts of a speculator that is not ours by what became of them.

Whatever such a drafter says of its drafts' chances, or nothing, how often its drafts
came true corrects it. What it says is taken from the first rank: budgets come of
it, and ranks whose budgets differ would wait for each other for ever.
"""

from collections.abc import Callable
from typing import Any

import torch

from mrv2_spec.draft_values import DraftValues

# Where vLLM's runner passes ``num_sampled`` to a speculator.
_NUM_SAMPLED = 5


def judge_drafts(
    speculator: Any, req_states: Any, values: DraftValues
) -> Callable[..., torch.Tensor]:
    """Return the speculator's ``propose``, followed by a look at what it proposed."""
    from vllm.distributed.parallel_state import get_tp_group

    propose = speculator.propose
    shape = (req_states.max_num_reqs, req_states.num_speculative_steps)
    given = torch.zeros(shape, dtype=torch.float32, device=req_states.device)
    group = get_tp_group()

    def judged_propose(*args: Any, **kwargs: Any) -> torch.Tensor:
        drafts: torch.Tensor = propose(*args, **kwargs)
        input_batch = args[0] if args else kwargs["input_batch"]
        num_reqs = input_batch.num_reqs
        if kwargs.get("dummy_run", False) or num_reqs == 0:
            return drafts
        if len(args) > _NUM_SAMPLED:
            num_sampled = args[_NUM_SAMPLED]
        else:
            num_sampled = kwargs["num_sampled"]
        # A copy: what the drafter publishes is its own. Without, all drafts are sure.
        said = speculator.draft_token_confidence_probs
        given[:num_reqs] = 1.0 if said is None else said[:num_reqs]
        if group.world_size > 1:
            # In the order of the stream, as the model's own: the host does not wait.
            group.broadcast(given)
            group.broadcast(speculator.num_valid_drafts_for_trim)
        values.update(
            req_states.all_token_ids.gpu,
            input_batch.idx_mapping,
            req_states.total_len.gpu,
            num_sampled,
            drafts[:num_reqs].contiguous(),
            speculator.num_valid_drafts_for_trim,
            given,
        )
        return drafts

    return judged_propose
