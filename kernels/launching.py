"""Launch a Triton kernel again without asking Triton what it was asked before.

A launch through Triton costs the host 40 to 90 us with twenty arguments: all of them
are looked at anew, to find what was compiled for such arguments. An engine's launches
differ in a few arguments only, and in none that matters to the compiler.
"""

from typing import Any

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

# Triton compiles for addresses that are multiples of this, or for any.
ALIGNMENT = 16


class Launches:
    """Launches of one kernel with the same constants.

    The first goes through Triton, which compiles for what it finds in the arguments:
    types, aligned addresses, numbers that are 1 or multiples of 16. Later ones go
    straight to what came out, as long as all of that holds: tensors have the same type
    and device and begin at a multiple of 16 bytes, and numbers are the same, except
    those marked ``do_not_specialize``, which may change within 32 bits. Anything else
    goes through Triton again, and so does every launch in the interpreter, where a hook
    wants to see launches, or where Triton's parts are not what they were expected to
    be.

    Args:
        kernel: a ``triton.jit`` function whose constants come last.
        constants: the values of those, by name, in the kernel's order.
        num_warps: warps of a program.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any], num_warps: int) -> None:
        self._kernel = kernel
        self._constants = constants
        self._num_warps = num_warps
        # How often Triton was asked.
        self.num_ordinary = 0
        self._run: Any = None
        self._compiled: Any = None
        # The arguments of the last launch: held, so that an argument which is the same
        # object is the same tensor.
        self._known: list[Any] = []
        self._dtypes: list[torch.dtype | None] = []
        self._may_change: list[bool] = []
        # What is passed on: addresses, numbers, constants.
        self._values: list[Any] = []
        self._device: torch.device | None = None
        self._device_index = 0

    def __call__(self, grid: tuple[int, int, int], args: tuple[Any, ...]) -> None:
        """Launch.

        Args:
            grid: programs.
            args: tensors and whole numbers, all but the constants, in order.
        """
        if self._run is not None and self._take(args):
            self._run(
                *grid,
                driver.active.get_current_stream(self._device_index),
                self._compiled.function,
                self._compiled.packed_metadata,
                None,
                None,
                None,
                *self._values,
            )
            return
        self.num_ordinary += 1
        self._run = None
        compiled = self._kernel[grid](
            *args, **self._constants, num_warps=self._num_warps
        )
        self._remember(compiled, args)

    def _take(self, args: tuple[Any, ...]) -> bool:
        # Take over the arguments that changed; whether nothing else did.
        known = self._known
        for i, arg in enumerate(args):
            if arg is not known[i] and not self._replace(i, arg):
                return False
        hooks = knobs.runtime
        return (
            not hooks.launch_enter_hook.calls
            and not hooks.launch_exit_hook.calls
            and not self._kernel.pre_run_hooks
            and driver.active.get_current_device() == self._device_index
        )

    def _replace(self, i: int, arg: Any) -> bool:
        dtype = self._dtypes[i]
        if dtype is None:
            if type(arg) is not int:
                return False
            if not self._may_change[i]:
                return bool(arg == self._known[i])
            if not -(2**31) <= arg < 2**31:
                return False
            self._values[i] = arg
        else:
            if not isinstance(arg, torch.Tensor):
                return False
            address = arg.data_ptr()
            if (
                address % ALIGNMENT
                or arg.dtype is not dtype
                or arg.device != self._device
            ):
                return False
            self._values[i] = address
        self._known[i] = arg
        return True

    def _remember(self, compiled: Any, args: tuple[Any, ...]) -> None:
        if not isinstance(compiled, CompiledKernel) or torch.version.hip is not None:
            return
        try:
            params = self._kernel.params
            hooks = knobs.runtime
            as_expected = (
                [p.name for p in params[len(args) :]] == list(self._constants)
                and all(p.is_constexpr for p in params[len(args) :])
                and not any(p.is_constexpr for p in params[: len(args)])
                and not hooks.launch_enter_hook.calls
                and not hooks.launch_exit_hook.calls
                and not self._kernel.pre_run_hooks
                and callable(driver.active.get_current_stream)
                and compiled.function is not None
                and compiled.packed_metadata is not None
            )
            may_change = [bool(p.do_not_specialize) for p in params[: len(args)]]
            run = compiled.run
            device_index = driver.active.get_current_device()
        except AttributeError:
            return
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        numbers = [arg for arg in args if type(arg) is int]
        if (
            not as_expected
            or len(tensors) + len(numbers) != len(args)
            or any(tensor.data_ptr() % ALIGNMENT for tensor in tensors)
            or len({tensor.device for tensor in tensors}) != 1
            or any(not -(2**31) <= number < 2**31 for number in numbers)
        ):
            return
        self._known = list(args)
        self._dtypes = [getattr(arg, "dtype", None) for arg in args]
        self._may_change = may_change
        self._values = [
            arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args
        ]
        self._values += self._constants.values()
        self._device = tensors[0].device
        self._device_index = device_index
        self._compiled, self._run = compiled, run
