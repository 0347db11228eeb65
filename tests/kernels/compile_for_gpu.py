"""Compile kernels for a GPU that need not be there; a process of its own.

Run without TRITON_INTERPRET, cases on standard input, results on standard output, both
JSON. A case has ``module``, ``kernel``, ``constexprs`` and ``num_warps``; its result is
null or the error.
"""

import importlib
import inspect
import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)

# The kernels say the type of every pointer in a comment: `drafts_ptr,  # *int64 [...]`.
_POINTER = re.compile(r"^\s*(\w+_ptr),\s*#\s*\*(\w+) \[", re.MULTILINE)
_TYPES = {"int32": "i32", "int64": "i64", "float32": "fp32", "int8": "i8"}


def signature(kernel: Any, constexprs: dict[str, Any]) -> dict[str, str]:
    """Return the argument types of a kernel, read off its source."""
    source = inspect.getsource(kernel.fn)
    pointers = {name: f"*{_TYPES[kind]}" for name, kind in _POINTER.findall(source)}
    types = {}
    for name in kernel.arg_names:
        if name in constexprs:
            types[name] = "constexpr"
        elif name.endswith("_ptr"):
            types[name] = pointers[name]
        else:
            types[name] = "i64" if name.endswith("_stride") else "i32"
    return types


def compile_case(case: dict[str, Any]) -> str | None:
    """Compile one case down to machine code; return the error, if any."""
    kernel = getattr(importlib.import_module(case["module"]), case["kernel"])
    source = ASTSource(
        fn=kernel,
        signature=signature(kernel, case["constexprs"]),
        constexprs=case["constexprs"],
    )
    options = {"num_warps": case["num_warps"]}
    try:
        compiled = triton.compile(source, target=TARGET, options=options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if compiled.asm["cubin"] else "no machine code came out"


if __name__ == "__main__":
    json.dump([compile_case(case) for case in json.load(sys.stdin)], sys.stdout)
