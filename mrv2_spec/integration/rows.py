"""Token rows in device memory: vLLM keeps them on the host for most methods."""

from collections.abc import Callable
from typing import Any

from mrv2_spec.integration.methods import served_method, speculator_class
from mrv2_spec.integration.patching import Patch


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    def request_state(*args: Any, **kwargs: Any) -> Any:
        from vllm.config import get_current_vllm_config

        vllm_config = get_current_vllm_config()
        if served_method(vllm_config) is not None and getattr(
            speculator_class(vllm_config), "needs_dense_token_rows", False
        ):
            kwargs["use_dense_all_token_ids"] = True
        return original(*args, **kwargs)

    return request_state


PATCHES = (
    Patch(
        "RequestState",
        (
            (
                "max_num_reqs",
                "max_model_len",
                "max_num_batched_tokens",
                "num_speculative_steps",
                "vocab_size",
                "device",
                "num_prefill_lookahead",
                "use_dense_all_token_ids",
            ),
        ),
        _wrap,
    ),
)
