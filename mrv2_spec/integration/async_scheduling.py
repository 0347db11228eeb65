"""Checks the configuration, and keeps async scheduling on while it is resolved."""

from collections.abc import Callable
from typing import Any, Literal

import vllm.config.vllm as vllm_config_module

from mrv2_spec.integration.methods import (
    check_scheduling,
    check_settings,
    mark_served,
    served_method,
)
from mrv2_spec.integration.patching import Patch


def _wrap(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def __post_init__(self: Any) -> None:
        if served_method(self) is None:
            original(self)
            return
        check_settings(self)
        mark_served(self)
        # vLLM 0.32 asks these method names, and not the runner, whether async
        # scheduling works; on the V2 runner every method served here does.
        types = vllm_config_module.NgramGPUTypes
        vllm_config_module.NgramGPUTypes = Literal[
            "ngram_gpu", "ngram", "suffix", "custom_class"
        ]
        try:
            original(self)
        finally:
            vllm_config_module.NgramGPUTypes = types
        check_scheduling(self)

    return __post_init__


PATCHES = (Patch("VllmConfig.__post_init__", (("self",),), _wrap),)
