"""Compile CUDA sources without a GPU, through whatever NVRTC library is installed."""

from __future__ import annotations

import ctypes
import glob
import os
import site
import sys


def find_nvrtc() -> str | None:
    """Return the path of an NVRTC library, `MRV2_SPEC_NVRTC` first."""
    given = os.environ.get("MRV2_SPEC_NVRTC")
    if given:
        return given
    roots = [*site.getsitepackages(), *sys.path, "/usr/local/cuda/lib64"]
    patterns = ("nvidia/*/lib/libnvrtc.so.*", "libnvrtc.so.*")
    for root in roots:
        for pattern in patterns:
            found = sorted(glob.glob(os.path.join(root or ".", pattern)))
            if found:
                return found[-1]
    return None


def compile_source(text: str, options: tuple[str, ...], library: str) -> str:
    """Compile for Hopper; return the compiler's log, raise ValueError on an error."""
    nvrtc = ctypes.CDLL(library)
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"source.cu", 0, None, None
    )
    flags = [o.encode() for o in ("--gpu-architecture=sm_90", *options)]
    argv = (ctypes.c_char_p * len(flags))(*flags)
    status = nvrtc.nvrtcCompileProgram(program, len(flags), argv)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    message = log.value.decode()
    if status != 0:
        raise ValueError(message)
    return message
