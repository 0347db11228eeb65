"""Lets ``min_p`` and ``logit_bias`` through, which vLLM refuses with speculation.

Its V1 runner did not apply them to drafts; its V2 runner applies them to every row that
is verified, as it does without speculation.
"""

from collections.abc import Callable
from copy import copy
from typing import Any

from mrv2_spec.integration.methods import is_served
from mrv2_spec.integration.patching import Patch


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        if is_served(speculative_config) and (self.min_p or self.logit_bias):
            # Whatever else is checked there still is.
            without = copy(self)
            without.min_p = 0.0
            without.logit_bias = None
            original(without, speculative_config)
            return
        original(self, speculative_config)

    return _validate_spec_decode


PATCHES = (
    Patch(
        "SamplingParams._validate_spec_decode",
        (("self", "speculative_config"),),
        _wrap,
    ),
)
