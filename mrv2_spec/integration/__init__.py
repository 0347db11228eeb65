"""The only place that touches vLLM's own objects: one file a hook.

``install`` is called in every vLLM process; it and ``uninstall`` may be called again.
"""

import os
from typing import Any

from mrv2_spec.corpus.namespaces import Namespace
from mrv2_spec.corpus.saved import SavedMemory
from mrv2_spec.counters import DraftCounts, Totals
from mrv2_spec.errors import UserError
from mrv2_spec.integration import patching

SUPPORTED_VLLM = ("0.32.0", "0.33.0")

_RUNNER = "vllm.v1.worker.gpu.model_runner"
_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"
_WORKER = "vllm.v1.worker.worker_base"
_GPU_WORKER = "vllm.v1.worker.gpu_worker"
_ASYNC_UTILS = "vllm.v1.worker.gpu.async_utils"
_STRUCTURED_OUTPUTS = "vllm.v1.worker.gpu.structured_outputs"
_ASYNC_LLM = "vllm.v1.engine.async_llm"
_ENGINE_CORE = "vllm.v1.engine.core"
_SPEC_DECODE_METRICS = "vllm.v1.spec_decode.metrics"
_METRICS_STATS = "vllm.v1.metrics.stats"
_METRICS_LOGGERS = "vllm.v1.metrics.loggers"
_SAMPLING_PARAMS = "vllm.sampling_params"
_ENGINE_ARGS = "vllm.engine.arg_utils"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_SCHEDULER_OUTPUT = "vllm.v1.core.sched.output"


def is_supported(vllm_version: str) -> bool:
    """Tell whether the hooks were written for this vLLM.

    Args:
        vllm_version: such as ``0.33.0`` or, with a build tag, ``0.32.0+cpu``.
    """
    return vllm_version.partition("+")[0] in SUPPORTED_VLLM


def is_installed() -> bool:
    """Tell whether the hooks are in place in this process."""
    return patching.is_active()


def install() -> None:
    """Put the hooks in place.

    Raises:
        PatchError: vLLM looks unlike the versions that the hooks were written for.
    """
    if patching.is_active():
        return
    import vllm.config.speculative as speculative_module
    import vllm.config.vllm as vllm_config_module

    from mrv2_spec.integration import (
        async_scheduling,
        counting,
        cpu_grammar,
        graphs,
        hand_off,
        idling,
        memory,
        methods,
        metrics,
        requests,
        rows,
        sampling,
        sleeping,
        speculator,
        user_input,
        verification,
        warmup,
        widths,
        worker,
    )

    runner_patches = (
        *rows.PATCHES,
        *speculator.PATCHES,
        *memory.PATCHES,
        *requests.PATCHES,
        *verification.PATCHES,
        *widths.PATCHES,
        *idling.PATCHES,
        *sleeping.RUNNER_PATCHES,
        *counting.PATCHES,
        *hand_off.RUNNER_PATCHES,
    )
    try:
        patching.apply(speculative_module, methods.SPECULATIVE_PATCHES)
        patching.apply(
            vllm_config_module,
            (
                *methods.PATCHES,
                *async_scheduling.PATCHES,
                *graphs.CONFIG_PATCHES,
            ),
        )
        patching.apply_on_import(_ENGINE_ARGS, user_input.PATCHES)
        patching.apply_on_import(_SAMPLING_PARAMS, sampling.PATCHES)
        patching.apply_on_import(_SCHEDULER_OUTPUT, requests.REQUEST_PATCHES)
        patching.apply_on_import(_WORKER, worker.PATCHES)
        patching.apply_on_import(_GPU_WORKER, warmup.PATCHES)
        patching.apply_on_import(_SCHEDULER, metrics.SCHEDULER_PATCHES)
        patching.apply_on_import(_ASYNC_LLM, metrics.FRONT_END_PATCHES)
        patching.apply_on_import(_ENGINE_CORE, metrics.ENGINE_PATCHES)
        patching.apply_on_import(_ASYNC_UTILS, counting.OUTPUT_PATCHES)
        patching.apply_on_import(_STRUCTURED_OUTPUTS, cpu_grammar.PATCHES)
        patching.apply_on_import(_SPEC_DECODE_METRICS, metrics.STATS_PATCHES)
        patching.apply_on_import(_METRICS_STATS, metrics.REQUEST_PATCHES)
        patching.apply_on_import(_METRICS_LOGGERS, metrics.LOGGER_PATCHES)
        patching.apply_on_import(_GRAPHS, graphs.PATCHES)
        patching.apply_on_import(_SCHEDULER, sleeping.SCHEDULER_PATCHES)
        patching.apply_on_import(_SCHEDULER, hand_off.SCHEDULER_PATCHES)
        patching.apply_on_import(_RUNNER, runner_patches)
    except patching.PatchError:
        patching.revert_all()
        raise


def uninstall() -> None:
    """Give vLLM back its own attributes."""
    patching.revert_all()


def read_counters(llm: Any) -> Totals | None:
    """Return what became of an engine's drafts, or None if this plugin drafts nothing.

    Args:
        llm: a ``vllm.LLM``.
    """
    counts = read_counts(llm)
    return None if counts is None else counts.totals()


def read_counts(llm: Any) -> DraftCounts | None:
    """Return the same by source, position and length."""
    values = _call_engine(llm, "mrv2_spec_counters")
    return None if values is None else DraftCounts.from_list(values)


def read_request_counts(llm: Any) -> list[tuple[str, DraftCounts]]:
    """Return the counts of the requests that the engine remembers, oldest first.

    The names are the engine's own: vLLM adds a hyphen and a random part to a request's
    id. The newest few thousand are remembered.

    Args:
        llm: a ``vllm.LLM``.
    """
    found = _call_engine(llm, "mrv2_spec_request_counters")
    return [(req_id, DraftCounts.from_list(values)) for req_id, values in found]


def _call_engine(llm: Any, method: str) -> Any:
    # Either of vLLM's offline classes.
    client = getattr(llm, "llm_engine", llm).engine_core
    # In this process, or behind a socket.
    engine_core = getattr(client, "engine_core", None)
    if engine_core is not None and hasattr(engine_core, method):
        return getattr(engine_core, method)()
    return client.call_utility(method)


def save_memory(llm: Any, path: str | os.PathLike[str]) -> SavedMemory:
    """Write what an engine's suffix decoding remembers to a file; see docs/corpus.md.

    Waits for the device: for use between steps, not within one.

    Args:
        llm: a ``vllm.LLM``; its first rank writes.
        path: on the worker's machine; what was there is replaced as a whole.

    Raises:
        UserError: the file cannot be written, or there is nothing to save.
    """
    replies = llm.collective_rpc("mrv2_spec_save_memory", args=(os.fspath(path),))
    reply = next((reply for reply in replies if reply is not None), None)
    if reply is None:
        raise UserError(
            "this engine has no memory to save: its speculative method is not 'suffix'"
        )
    if "error" in reply:
        raise UserError(reply["error"])
    return SavedMemory(**reply)


def purge_memory(llm: Any, namespace: Namespace | None = None) -> None:
    """Forget what an engine's suffix decoding remembers. Files are left as they are.

    Args:
        llm: a ``vllm.LLM``.
        namespace: (adapter, cache_salt, name), each a string or None, of the requests
            whose responses to forget; None forgets all of them.

    Raises:
        UserError: the engine has no memory.
    """
    if not any(llm.collective_rpc("mrv2_spec_purge", args=namespace or ())):
        raise UserError(
            "this engine has no memory to purge: its speculative method is not 'suffix'"
        )
