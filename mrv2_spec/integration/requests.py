"""Tells the trimmer, and a drafter with memory, which requests took a slot."""

from collections.abc import Callable
from typing import Any

from mrv2_spec.integration.patching import Patch
from mrv2_spec.views import CONTRIBUTE_ARG, READ_ARG, NewRequest

_CACHE_SALT = "_mrv2_spec_cache_salt"


def _wrap_from_request(original: Callable[..., Any]) -> Any:
    # The worker is told everything about a request but its cache salt.
    def from_request(cls: type[Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        new_request = original(request, *args, **kwargs)
        setattr(new_request, _CACHE_SALT, request.cache_salt)
        return new_request

    return classmethod(from_request)


def _wrap_add_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_requests(self: Any, scheduler_output: Any) -> Any:
        result = original(self, scheduler_output)
        new = scheduler_output.scheduled_new_reqs
        if not new:
            return result
        from mrv2_spec.integration.verification import TrimManager
        from mrv2_spec.suffix import SuffixSpeculator

        if isinstance(self.adaptive_verification, TrimManager):
            self.adaptive_verification.forget_former_requests()
        if isinstance(self.speculator, SuffixSpeculator):
            slots = self.req_states.req_id_to_index
            self.speculator.add_requests(
                [_describe(slots[data.req_id], data) for data in new]
            )
        return result

    return add_requests


def _describe(slot: int, data: Any) -> NewRequest:
    params = data.sampling_params
    extra_args = dict(params.extra_args or {}) if params is not None else {}
    if not hasattr(data, _CACHE_SALT):
        # Made by someone else's scheduler: with its salt unknown, the request must not
        # meet any other.
        extra_args |= {READ_ARG: False, CONTRIBUTE_ARG: False}
    return NewRequest(
        slot=slot,
        prompt_len=data.prompt_len,
        prefill_len=len(data.prefill_token_ids),
        adapter=data.lora_request.lora_name if data.lora_request else None,
        cache_salt=getattr(data, _CACHE_SALT, None),
        extra_args=extra_args,
    )


REQUEST_PATCHES = (
    Patch(
        "NewRequestData.from_request",
        (("request", "block_ids", "prefill_token_ids", "uses_mrope"),),
        _wrap_from_request,
    ),
)

PATCHES = (
    Patch(
        "GPUModelRunner.add_requests",
        (("self", "scheduler_output"),),
        _wrap_add_requests,
    ),
)
