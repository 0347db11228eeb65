"""The driver half of the ``cpu`` backend entry: present, never active."""

from collections.abc import Callable
from typing import Any

from triton.backends.driver import DriverBase


class InterpreterOnlyDriver(DriverBase):  # type: ignore[misc]
    """A driver that is never selected, so a GPU's own driver stays the only one."""

    @classmethod
    def is_active(cls) -> bool:
        """Return False on every host."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Raise: there is no launcher to generate."""
        raise NotImplementedError("Triton runs on the CPU only with TRITON_INTERPRET=1")

    def get_current_target(self) -> Any:
        """Raise: there is no target."""
        raise NotImplementedError("Triton runs on the CPU only with TRITON_INTERPRET=1")

    def get_active_torch_device(self) -> Any:
        """Raise: there is no device."""
        raise NotImplementedError("Triton runs on the CPU only with TRITON_INTERPRET=1")

    def get_benchmarker(self) -> Callable[..., Any]:
        """Raise: there is nothing to time."""
        raise NotImplementedError("Triton runs on the CPU only with TRITON_INTERPRET=1")


# Triton takes only a class without abstract methods, and which methods are abstract
# differs between its versions.
InterpreterOnlyDriver.__abstractmethods__ = frozenset()
