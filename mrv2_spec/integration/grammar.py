"""Tells the counters how many drafts of a request its grammar let pass."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mrv2_spec.integration.patching import Patch

_NO_LIMIT = np.iinfo(np.int32).max


def _wrap_sample(original: Callable[..., Any]) -> Callable[..., Any]:
    def sample(
        self: Any, hidden_states: Any, input_batch: Any, grammar_output: Any
    ) -> Any:
        from mrv2_spec.speculator import RowSpeculator

        if grammar_output is not None and isinstance(self.speculator, RowSpeculator):
            self.speculator.num_acceptable_drafts = _limits(input_batch, grammar_output)
        return original(self, hidden_states, input_batch, grammar_output)

    return sample


def _limits(input_batch: Any, grammar_output: Any) -> torch.Tensor | None:
    """Return [num_reqs] int32, the drafts that each request's grammar lets pass."""
    req_ids = grammar_output.structured_output_request_ids
    if not req_ids:
        return None
    acceptable = grammar_output.num_acceptable_drafts
    limits = np.full(input_batch.num_reqs, _NO_LIMIT, dtype=np.int32)
    batch_idx = {req_id: i for i, req_id in enumerate(input_batch.req_ids)}
    for i, req_id in enumerate(req_ids):
        if req_id in batch_idx:
            # No hand-off: vLLM rejects every draft of the request.
            limits[batch_idx[req_id]] = 0 if acceptable is None else acceptable[i]
    device = input_batch.idx_mapping.device
    staged = torch.from_numpy(limits)
    if device.type == "cuda":
        staged = staged.pin_memory()
    return staged.to(device, non_blocking=True)


PATCHES = (
    Patch(
        "GPUModelRunner.sample",
        (("self", "hidden_states", "input_batch", "grammar_output"),),
        _wrap_sample,
    ),
)
