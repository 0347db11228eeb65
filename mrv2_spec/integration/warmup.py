"""Forgets vLLM's warm-up requests, which are drafted for like real ones."""

from collections.abc import Callable
from typing import Any

from mrv2_spec.integration.counting import forget_given_up
from mrv2_spec.integration.patching import Patch


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    def warmup_kernels(model_runner: Any, *args: Any, **kwargs: Any) -> Any:
        from mrv2_spec.speculator import RowSpeculator

        result = original(model_runner, *args, **kwargs)
        if isinstance(model_runner.speculator, RowSpeculator):
            model_runner.speculator.reset()
        forget_given_up(model_runner)
        return result

    return warmup_kernels


PATCHES = (
    Patch(
        "warmup_kernels",
        (("model_runner", "worker_execute_model", "worker_sample_tokens"),),
        _wrap,
    ),
)
