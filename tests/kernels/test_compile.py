"""Every Triton kernel compiles for Hopper, on a host with or without a GPU."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

_NGRAM = {
    "MIN_N": 2,
    "MAX_N": 4,
    "NUM_PLACEHOLDERS": 0,
    "LATEST": False,
    "K": 16,
    "K_PO2": 16,
    "BLOCK": 1024,
    "CLASS_WINDOW": 32,
    "CLASS_LENGTHS": [1, 2, 3, 4, 5, 7, 10, 16, 32],
}
_VALUE = {
    "HAS_CLASSES": True,
    "NUM_CELLS": 160,
    "K": 16,
    "K_PO2": 16,
    "NUM_CONFIDENCES": 32,
    "NUM_BINS": 32,
    "TALLY_STRIDE": 36,
    "PRIOR_WEIGHT": 4,
    "MAX_COUNT": 1024,
    "CELL_BLOCK": 128,
}
_FILL = {
    "NUM_BONUS_TOKENS": 1,
    "K": 16,
    "K_PO2": 16,
    "LEVELS": 64,
    "BLOCK_ROWS": 64,
}
_COUNT = {"HAS_SOURCES": False, "NUM_BONUS_TOKENS": 1, "BLOCK": 256}

# Constexprs to compile each kernel with, by (module, kernel).
CASES: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("propose_ngram", "_propose_ngram_kernel"): [
        _NGRAM,
        {**_NGRAM, "LATEST": True, "NUM_PLACEHOLDERS": 2, "K": 5, "K_PO2": 8},
        {**_NGRAM, "MIN_N": 1, "MAX_N": 1, "K": 1, "K_PO2": 1},
        {**_NGRAM, "MAX_N": 16, "K": 32, "K_PO2": 32},
    ],
    ("value_drafts", "_value_drafts_kernel"): [
        _VALUE,
        {**_VALUE, "HAS_CLASSES": False, "NUM_CELLS": 32, "K": 5, "K_PO2": 8},
    ],
    ("trim_drafts", "_trim_drafts_kernel"): [
        {"NUM_BONUS_TOKENS": 1, "BLOCK": 1024},
    ],
    ("fill_draft_budget", "_fill_draft_budget_kernel"): [
        _FILL,
        {**_FILL, "K": 5, "K_PO2": 8, "LEVELS": 128},
        {**_FILL, "K": 1, "K_PO2": 1, "LEVELS": 1024},
        {**_FILL, "K": 32, "K_PO2": 32, "LEVELS": 32},
        {**_FILL, "BLOCK_ROWS": 256},
        {**_FILL, "K": 32, "K_PO2": 32, "LEVELS": 32, "BLOCK_ROWS": 256},
    ],
    ("count_drafts", "_count_drafts_kernel"): [
        _COUNT,
        {**_COUNT, "HAS_SOURCES": True, "NUM_BONUS_TOKENS": 2},
    ],
}


def num_warps(kernel: str, constexprs: dict[str, Any]) -> int:
    """Return the warps that the launcher asks for."""
    if kernel == "_fill_draft_budget_kernel":
        return 8 if constexprs["BLOCK_ROWS"] == 64 else 16
    if kernel == "_value_drafts_kernel":
        return 1
    return 8 if kernel == "_trim_drafts_kernel" else 4


FLAT = [
    {
        "module": f"mrv2_spec.kernels.{module}",
        "kernel": kernel,
        "constexprs": case,
        "num_warps": num_warps(kernel, case),
    }
    for (module, kernel), cases in CASES.items()
    for case in cases
]


def is_triton_kernel(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    )


def test_every_kernel_is_listed() -> None:
    found = {
        (path.stem, node.name)
        for path in (ROOT / "kernels").glob("*.py")
        # test_suffix_compile.py has those.
        if not path.stem.startswith("suffix")
        for node in ast.parse(path.read_text()).body
        if is_triton_kernel(node)
    }
    assert found == set(CASES), "list each kernel, and no other, in CASES"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[str | None]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_for_gpu.py")],
        input=json.dumps(FLAT),
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "number",
    range(len(FLAT)),
    ids=[f"{case['kernel'].strip('_')}-{i}" for i, case in enumerate(FLAT)],
)
def test_compiles(number: int, results: list[str | None]) -> None:
    assert results[number] is None
