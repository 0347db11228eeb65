"""The compiler half of the ``cpu`` backend entry: it supports no target."""

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend


class InterpreterOnlyCompiler(BaseBackend):  # type: ignore[misc]
    """Refuses every target; the interpreter needs no compiler."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        """Return False: no target can be compiled for."""
        return False

    def hash(self) -> str:
        """Return the constant identifier of this backend."""
        return "mrv2_spec-interpreter-only"

    def parse_options(self, options: dict[str, Any]) -> object:
        """Raise: nothing is ever compiled."""
        raise NotImplementedError("Triton runs on the CPU only with TRITON_INTERPRET=1")

    def add_stages(
        self, stages: dict[str, Any], options: object, language: Any = None
    ) -> None:
        """Raise: nothing is ever compiled."""
        raise NotImplementedError("Triton runs on the CPU only with TRITON_INTERPRET=1")

    def load_dialects(self, context: Any) -> None:
        """Do nothing: there are no dialects."""

    def get_module_map(self) -> dict[str, ModuleType]:
        """Return an empty map: no module is replaced."""
        return {}


# Triton takes only a class without abstract methods, and which methods are abstract
# differs between its versions.
InterpreterOnlyCompiler.__abstractmethods__ = frozenset()
