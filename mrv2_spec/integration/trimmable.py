"""Which engines may verify fewer drafts than were scheduled."""

from typing import Any

from mrv2_spec.config import Settings

# Backends seen to take every query length from the device. Others may plan from the
# host's copy, which a trimmed batch deliberately leaves inexact.
DEVICE_QUERY_LEN_BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")


def why_never_trimmed(vllm_config: Any, settings: Settings) -> str | None:
    """Return what in a configuration rules trimming out, or None if nothing does."""
    parallel = vllm_config.parallel_config
    if not settings.trim:
        return "switched off by mrv2_spec.trim=false"
    if vllm_config.lora_config is not None:
        return "LoRA maps adapters to tokens from the host's boundaries"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism needs the same widths on every stage"
    if parallel.data_parallel_size > 1:
        return "data-parallel ranks would have to agree on the widths"
    if (
        parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1
    ):
        return "context parallelism splits rows by the host's boundaries"
    if parallel.enable_batch_sharded_sampling:
        return "batch-sharded sampling needs the widths on the host"
    if parallel.use_ubatching:
        return "dual-batch overlap splits the batch by the host's boundaries"
    if vllm_config.model_config.return_sampling_mask:
        return "sampling replay needs fixed widths"
    if vllm_config.aux_output_config.enabled:
        return "returned routed experts need the widths on the host"
    return None


def why_not_trimmed(
    vllm_config: Any, speculator: Any, attn_groups: Any, settings: Settings
) -> str | None:
    """Return why an engine must verify every scheduled draft, or None if it need not.

    Args:
        vllm_config: the engine's configuration.
        speculator: the drafter in use.
        attn_groups: the runner's attention groups.
        settings: the plugin's settings.
    """
    why_never = why_never_trimmed(vllm_config, settings)
    if why_never is not None:
        return why_never
    if getattr(speculator, "num_valid_drafts_for_trim", None) is None:
        return "the drafter publishes no num_valid_drafts_for_trim"
    for group in (group for groups in attn_groups for group in groups):
        name = group.backend.get_name()
        if name not in DEVICE_QUERY_LEN_BACKENDS:
            return (
                f"attention backend {name} is not known to take query lengths from "
                f"the device; use one of {', '.join(DEVICE_QUERY_LEN_BACKENDS)}"
            )
    return _why_not_captured(vllm_config, attn_groups)


def _why_not_captured(vllm_config: Any, attn_groups: Any) -> str | None:
    from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend

    if not vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        return None
    max_query_len = vllm_config.num_speculative_tokens + 1
    unsupported = get_varlen_cudagraph_unsupported_backend(
        attn_groups, vllm_config, max_query_len
    )
    if unsupported is None:
        return None
    return (
        f"full CUDA graphs of attention backend {unsupported[0]} do not take query "
        "lengths that vary; use cudagraph_mode=PIECEWISE"
    )
