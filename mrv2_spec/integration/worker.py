"""Calls that reach every worker through vLLM's ``collective_rpc``, by name."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from mrv2_spec.integration.patching import Patch


def _counters(_: None) -> Callable[[Any], dict[str, int] | None]:
    def mrv2_spec_counters(self: Any) -> dict[str, int] | None:
        from mrv2_spec.speculator import RowSpeculator

        speculator = getattr(self.model_runner, "speculator", None)
        if not isinstance(speculator, RowSpeculator):
            return None
        return asdict(speculator.counters.read())

    return mrv2_spec_counters


PATCHES = (Patch("WorkerBase.mrv2_spec_counters", (), _counters),)
