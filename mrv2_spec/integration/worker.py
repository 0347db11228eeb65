"""Calls that reach every worker through vLLM's ``collective_rpc``, by name."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from mrv2_spec.corpus.errors import CorpusError
from mrv2_spec.integration.patching import Patch


def _speculator(worker: Any) -> Any:
    from mrv2_spec.suffix import SuffixSpeculator

    speculator = getattr(worker.model_runner, "speculator", None)
    return speculator if isinstance(speculator, SuffixSpeculator) else None


def _save_memory(_: None) -> Callable[..., dict[str, Any] | None]:
    def mrv2_spec_save_memory(self: Any, path: str) -> dict[str, Any] | None:
        from vllm.distributed import get_tensor_model_parallel_rank

        speculator = _speculator(self)
        # All ranks remember the same.
        if speculator is None or get_tensor_model_parallel_rank() != 0:
            return None
        try:
            return asdict(speculator.save_memory(path))
        except CorpusError as error:
            # Not raised here: it would reach the caller wrapped, and log a traceback.
            return {"error": str(error)}

    return mrv2_spec_save_memory


def _purge(_: None) -> Callable[..., bool]:
    def mrv2_spec_purge(self: Any, *namespace: str | None) -> bool:
        if len(namespace) not in (0, 3):
            raise TypeError(
                "mrv2_spec_purge takes nothing, or (adapter, cache_salt, name)"
            )
        speculator = _speculator(self)
        if speculator is None:
            return False
        speculator.purge(namespace or None)
        return True

    return mrv2_spec_purge


PATCHES = (
    Patch("WorkerBase.mrv2_spec_save_memory", (), _save_memory),
    Patch("WorkerBase.mrv2_spec_purge", (), _purge),
)
