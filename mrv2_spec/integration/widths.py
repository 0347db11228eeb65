"""Takes the drafts out of a step that the trimmer would verify none of.

What the scheduler scheduled is its own record and stays as it is: it counts what was
not verified as rejected. The runner gets a copy without drafts, and so takes the path
of a step that never had any: the narrow graph, the plain sampler, no draft layout.
"""

import copy
from collections.abc import Callable
from typing import Any

from mrv2_spec.integration.patching import Patch
from mrv2_spec.integration.signatures import EXECUTE_MODEL
from mrv2_spec.integration.verification import TrimManager


def _without_drafts(scheduler_output: Any) -> Any:
    drafts = scheduler_output.scheduled_spec_decode_tokens
    plain = copy.copy(scheduler_output)
    plain.num_scheduled_tokens = {
        req_id: num_tokens - len(drafts.get(req_id, ()))
        for req_id, num_tokens in scheduler_output.num_scheduled_tokens.items()
    }
    plain.total_num_scheduled_tokens = sum(plain.num_scheduled_tokens.values())
    plain.scheduled_spec_decode_tokens = {}
    return plain


def _wrap_execute(original: Callable[..., Any]) -> Callable[..., Any]:
    def execute_model(
        self: Any,
        scheduler_output: Any,
        intermediate_tensors: Any = None,
        dummy_run: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        manager = self.adaptive_verification
        if isinstance(manager, TrimManager) and not dummy_run:
            drafts = scheduler_output.scheduled_spec_decode_tokens
            if (
                scheduler_output.total_num_scheduled_tokens
                and not manager.choose(scheduler_output)
                and drafts
                # A grammar's masks were laid out for the drafts that were scheduled.
                and not scheduler_output.has_structured_output_requests
            ):
                scheduler_output = _without_drafts(scheduler_output)
        return original(
            self, scheduler_output, intermediate_tensors, dummy_run, *args, **kwargs
        )

    return execute_model


PATCHES = (Patch("GPUModelRunner.execute_model", EXECUTE_MODEL, _wrap_execute),)
