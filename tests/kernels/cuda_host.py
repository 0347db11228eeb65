"""Builds a CUDA source for the host, to run its kernels where there is no GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

HEADER = Path(__file__).with_name("cuda_host.h")


def has_compiler() -> bool:
    """Tell whether a C++ compiler is installed."""
    return shutil.which("g++") is not None


class HostModule:
    """Stands in for `CudaModule`: the same launches, on CPU tensors.

    Args:
        text: CUDA source.
        options: macros for it (`-D...`); other options are left out.
        kernels: names to launch.
        folder: where to build.
        seed: order in which the threads run.
    """

    def __init__(
        self,
        text: str,
        options: tuple[str, ...],
        kernels: tuple[str, ...],
        folder: Path,
        seed: int,
    ) -> None:
        cases = "".join(
            f'  if (!std::strcmp(name, "{k}")) host::launch({k}, grid, block, args);\n'
            for k in kernels
        )
        unit = folder / "kernels.cpp"
        unit.write_text(
            f'#include <algorithm>\n#include "{HEADER}"\n{text}\n'
            'extern "C" void host_launch(const char* name, unsigned grid, unsigned '
            "block,\n    const unsigned long long* args, unsigned seed) {\n"
            f"  host::order.seed(seed);\n{cases}}}\n"
        )
        library = folder / "kernels.so"
        macros = [o for o in options if o.startswith("-D")]
        command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC"]
        subprocess.run(
            [*command, *macros, "-w", str(unit), "-o", str(library)],
            check=True,
            capture_output=True,
            text=True,
        )
        self._library = ctypes.CDLL(str(library))
        self._seed = seed

    def launch(self, name: str, grid: int, block: int, args: tuple[int, ...]) -> None:
        """Run a kernel to its end."""
        array = (ctypes.c_ulonglong * len(args))(*args)
        self._seed += 1
        self._library.host_launch(name.encode(), grid, block, array, self._seed)
