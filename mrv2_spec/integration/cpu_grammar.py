"""Masks logits by a grammar on the CPU, where vLLM's kernel does not run.

Triton's interpreter refuses the type of that kernel's mask, so that without this every
request with a grammar fails on a CPU host, with or without speculation.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mrv2_spec.integration.patching import Patch


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_grammar_bitmask(
        self: Any,
        logits: torch.Tensor,
        input_batch: Any,
        grammar_req_ids: list[str],
        grammar_bitmask: Any,
    ) -> None:
        if logits.device.type != "cpu":
            original(self, logits, input_batch, grammar_req_ids, grammar_bitmask)
        elif grammar_req_ids:
            mask_logits(
                logits, input_batch, grammar_req_ids, grammar_bitmask, self.mask_stride
            )

    return apply_grammar_bitmask


def mask_logits(
    logits: torch.Tensor,
    input_batch: Any,
    grammar_req_ids: list[str],
    grammar_bitmask: Any,
    mask_stride: int,
) -> None:
    """Put minus infinity where a grammar allows no token.

    Args:
        logits: [num_logits, vocab_size] (in and out).
        input_batch: its ``cu_num_logits`` says which rows a request has.
        grammar_req_ids: requests with a grammar.
        grammar_bitmask: [num_masks, words] int32, the requests' masks one after the
            other: a mask for each place that was scheduled, or ``mask_stride`` each.
        mask_stride: most masks of a request.
    """
    req_idx = {req_id: i for i, req_id in enumerate(input_batch.req_ids)}
    first_row = input_batch.cu_num_logits.tolist()
    scheduled = input_batch.num_draft_tokens_per_req
    same_for_all = grammar_bitmask.shape[0] == mask_stride * len(grammar_req_ids)
    bits = np.unpackbits(
        np.ascontiguousarray(grammar_bitmask).view(np.uint8), axis=1, bitorder="little"
    )
    forbidden = torch.from_numpy(bits[:, : logits.shape[1]] == 0)
    mask = 0
    for req_id in grammar_req_ids:
        i = req_idx[req_id]
        if same_for_all:
            num_masks = mask_stride
        else:
            num_masks = 1 + (0 if scheduled is None else int(scheduled[i]))
        # A trimmed request has fewer rows than masks.
        num_rows = min(num_masks, first_row[i + 1] - first_row[i])
        rows = logits[first_row[i] : first_row[i] + num_rows]
        rows.masked_fill_(forbidden[mask : mask + num_rows], float("-inf"))
        mask += num_masks


PATCHES = (
    Patch(
        "StructuredOutputsWorker.apply_grammar_bitmask",
        (("self", "logits", "input_batch", "grammar_req_ids", "grammar_bitmask"),),
        _wrap,
    ),
)
