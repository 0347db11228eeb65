"""Counts what the plugin holds before vLLM sizes the KV cache.

vLLM counts what is allocated while the model loads, and the peak of a profiling run
after it; the runner's own buffers, made before both, it leaves to its safety margin.
"""

from collections.abc import Callable
from typing import Any

from mrv2_spec.integration.patching import Patch


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        from mrv2_spec.speculator import RowSpeculator

        result = original(self, *args, **kwargs)
        if isinstance(self.speculator, RowSpeculator):
            self.model_memory_usage += self.speculator.persistent_bytes()
        return result

    return load_model


PATCHES = (
    Patch(
        "GPUModelRunner.load_model",
        (("self", "load_dummy_weights", "args", "model", "kwargs"),),
        _wrap,
    ),
)
