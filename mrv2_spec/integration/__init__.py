"""The only place that touches vLLM's own objects: one file a hook.

``install`` is called in every vLLM process; it and ``uninstall`` may be called again.
"""

import os
from typing import Any

from mrv2_spec.corpus.namespaces import Namespace
from mrv2_spec.corpus.saved import SavedMemory
from mrv2_spec.counters import Totals
from mrv2_spec.errors import UserError
from mrv2_spec.integration import patching

SUPPORTED_VLLM = ("0.32.0", "0.33.0")

_RUNNER = "vllm.v1.worker.gpu.model_runner"
_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"
_WORKER = "vllm.v1.worker.worker_base"
_GPU_WORKER = "vllm.v1.worker.gpu_worker"
_ENGINE_ARGS = "vllm.engine.arg_utils"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_ASYNC_SCHEDULER = "vllm.v1.core.sched.async_scheduler"
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
        grammar,
        graphs,
        memory,
        methods,
        requests,
        rows,
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
        *sleeping.RUNNER_PATCHES,
        *grammar.PATCHES,
    )
    try:
        patching.apply(speculative_module, methods.SPECULATIVE_PATCHES)
        patching.apply(
            vllm_config_module, (*methods.PATCHES, *async_scheduling.PATCHES)
        )
        patching.apply_on_import(_ENGINE_ARGS, user_input.PATCHES)
        patching.apply_on_import(_SCHEDULER_OUTPUT, requests.REQUEST_PATCHES)
        patching.apply_on_import(_WORKER, worker.PATCHES)
        patching.apply_on_import(_GPU_WORKER, warmup.PATCHES)
        patching.apply_on_import(_GRAPHS, graphs.PATCHES)
        patching.apply_on_import(_SCHEDULER, sleeping.SCHEDULER_PATCHES)
        patching.apply_on_import(_ASYNC_SCHEDULER, sleeping.ASYNC_SCHEDULER_PATCHES)
        patching.apply_on_import(_RUNNER, runner_patches)
    except patching.PatchError:
        patching.revert_all()
        raise


def uninstall() -> None:
    """Give vLLM back its own attributes."""
    patching.revert_all()


def read_counters(llm: Any) -> Totals | None:
    """Return what became of an engine's drafts, or None if this plugin drafts nothing.

    Waits for the device: for use between steps, not within one.

    Args:
        llm: a ``vllm.LLM``; every rank that drafts counts the same.
    """
    replies = llm.collective_rpc("mrv2_spec_counters")
    totals = next((reply for reply in replies if reply is not None), None)
    return None if totals is None else Totals(**totals)


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
