"""Builds the speculator of a served method in place of vLLM's own."""

from collections.abc import Callable
from typing import Any

import torch

from mrv2_spec.draft_values import DraftValues
from mrv2_spec.integration.judging import judge_drafts
from mrv2_spec.integration.methods import served_method, speculator_class
from mrv2_spec.integration.patching import Patch

# Where the verification hook, which is handed the request states alone, finds the
# speculator that reads them.
_SPECULATOR = "_mrv2_spec_speculator"
_DRAFT_VALUES = "_mrv2_spec_draft_values"

# What the runner reads of every speculator, and its base class does not promise: it
# embeds no images, its drafts are certain, and without confidences all count as sure.
_DEFAULTS: dict[str, Any] = {
    "supports_mm_inputs": False,
    "draft_logits": None,
    "draft_token_confidence_probs": None,
}


def speculator_of(req_states: Any) -> Any:
    """Return the served speculator that reads these request states, or None."""
    return getattr(req_states, _SPECULATOR, None)


def draft_values_of(req_states: Any) -> DraftValues:
    """Return what judges the drafts made for these request states."""
    values: DraftValues = getattr(req_states, _DRAFT_VALUES)
    return values


def drafts_unasked(speculator: Any) -> bool:
    """Tell whether a speculator also drafts in steps whose drafts are not scheduled."""
    from mrv2_spec.speculator import RowSpeculator

    return isinstance(speculator, RowSpeculator)


def _values_for(speculator: Any, req_states: Any) -> DraftValues:
    if drafts_unasked(speculator):
        own: DraftValues = speculator.draft_values
        return own
    num_slots = req_states.num_speculative_steps
    values = DraftValues(req_states.max_num_reqs, num_slots, 0, req_states.device)
    if getattr(speculator, "num_valid_drafts_for_trim", None) is not None:
        speculator.propose = judge_drafts(speculator, req_states, values)
    return values


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_speculator(vllm_config: Any, device: torch.device, req_states: Any) -> Any:
        if served_method(vllm_config) is None:
            return original(vllm_config, device, req_states)
        speculator = speculator_class(vllm_config)(vllm_config, device, req_states)
        for name, value in _DEFAULTS.items():
            if not hasattr(speculator, name):
                setattr(speculator, name, value)
        setattr(req_states, _SPECULATOR, speculator)
        setattr(req_states, _DRAFT_VALUES, _values_for(speculator, req_states))
        return speculator

    return init_speculator


PATCHES = (Patch("init_speculator", (("vllm_config", "device", "req_states"),), _wrap),)
