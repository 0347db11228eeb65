"""The only place that touches vLLM's own objects: one file a hook.

``install`` is called in every vLLM process; it and ``uninstall`` may be called again.
"""

from typing import Any

from mrv2_spec.counters import Totals
from mrv2_spec.integration import patching

SUPPORTED_VLLM = ("0.32.0", "0.33.0")

_RUNNER = "vllm.v1.worker.gpu.model_runner"

_installed = False


def is_supported(vllm_version: str) -> bool:
    """Tell whether the hooks were written for this vLLM.

    Args:
        vllm_version: such as ``0.33.0`` or, with a build tag, ``0.32.0+cpu``.
    """
    return vllm_version.partition("+")[0] in SUPPORTED_VLLM


def is_installed() -> bool:
    """Tell whether the hooks are in place in this process."""
    return _installed


def install() -> None:
    """Put the hooks in place.

    Raises:
        PatchError: vLLM looks unlike the versions that the hooks were written for.
    """
    global _installed
    if _installed:
        return
    import vllm.config.vllm as vllm_config_module

    from mrv2_spec.integration import (
        async_scheduling,
        grammar,
        methods,
        rows,
        speculator,
        verification,
    )

    patching.apply(vllm_config_module, [*methods.PATCHES, *async_scheduling.PATCHES])
    try:
        patching.apply_on_import(
            _RUNNER,
            [
                *rows.PATCHES,
                *speculator.PATCHES,
                *verification.PATCHES,
                *grammar.PATCHES,
            ],
        )
    except patching.PatchError:
        patching.revert_all()
        raise
    _installed = True


def uninstall() -> None:
    """Give vLLM back its own attributes."""
    global _installed
    patching.revert_all()
    _installed = False


def read_counters(llm: Any) -> Totals | None:
    """Return what became of an engine's drafts, or None if this plugin drafts nothing.

    Waits for the device: for use between steps, not within one.

    Args:
        llm: a ``vllm.LLM``; every rank counts the same, the first one's are returned.
    """
    totals: Totals | None = llm.collective_rpc(_worker_totals)[0]
    return totals


def _worker_totals(worker: Any) -> Totals | None:
    from mrv2_spec.speculator import RowSpeculator

    found = worker.model_runner.speculator
    return found.counters.read() if isinstance(found, RowSpeculator) else None
