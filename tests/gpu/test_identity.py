"""Greedy text with speculation equals greedy text without it, token for token.

A real small model, 16 prompts of three kinds, twice each so that suffix decoding has
its memory warm, batch-invariant mode: without speculation, vLLM's own n-gram drafter,
and ours untrimmed, trimmed, and restless (falling asleep and waking all the time);
eager, with CUDA graphs, and with piecewise graphs alone; k = 5 and 16. Eager and
compiled models round differently, so each is compared with no speculation of its own
kind. Ours run with vLLM's check that no step waits for the device.

``MRV2_SPEC_RESULTS`` names a folder for the record, ``MRV2_SPEC_MODEL`` the checkpoint
(default: the demo's).
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
PROMPTS = HERE.parent / "data" / "identity_prompts.jsonl"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# name -> (MRV2_SPEC, method, k, trim)
ARMS = {
    "none": ("0", "none", 0, "off"),
    **{
        f"{name}-k{k}": (plugin, method, k, trim)
        for k in (5, 16)
        for name, plugin, method, trim in (
            ("in-tree n-gram", "0", "ngram", "off"),
            ("n-gram untrimmed", "1", "ngram", "off"),
            ("n-gram trimmed", "1", "ngram", "on"),
            ("suffix untrimmed", "1", "suffix", "off"),
            ("suffix trimmed", "1", "suffix", "on"),
            ("n-gram restless", "1", "ngram", "restless"),
            ("suffix restless", "1", "suffix", "restless"),
        )
    },
}
# Which arms run in each mode.
MODES = {
    "graphs": list(ARMS),
    "eager": [
        "none",
        "n-gram untrimmed-k5",
        "n-gram trimmed-k16",
        "suffix trimmed-k16",
        "suffix restless-k16",
    ],
    "piecewise": ["none", "n-gram trimmed-k16", "suffix trimmed-k16"],
}
# Engines that share the GPU at a time.
PARALLEL = 11


def _model() -> str:
    if "MRV2_SPEC_MODEL" in os.environ:
        return os.environ["MRV2_SPEC_MODEL"]
    from mrv2_spec.demo.smollm2 import ensure_model

    return str(ensure_model())


def _run(name: str, mode: str, model: str, folder: Path) -> dict[str, Any]:
    plugin, method, k, trim = ARMS[name]
    out = folder / f"{name.replace(' ', '-')}-{mode}.json"
    environ = {
        **os.environ,
        "MRV2_SPEC": plugin,
        "VLLM_BATCH_INVARIANT": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    if plugin == "1":
        environ["VLLM_GPU_SYNC_CHECK"] = "error"
    command = [
        sys.executable, str(HERE / "identity_arm.py"), "--model", model,
        "--prompts", str(PROMPTS), "--out", str(out), "--method", method,
        "--k", str(k), "--trim", trim, "--mode", mode,
    ]  # fmt: skip
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode != 0:
        return {"error": f"{name} {mode}:\n{done.stdout}\n{done.stderr}"}
    result: dict[str, Any] = json.loads(out.read_text())
    lines = (done.stdout + done.stderr).splitlines()
    ours = [line.split("mrv2-spec: ")[1] for line in lines if "mrv2-spec: " in line]
    result["start_up_line"] = next(
        (line for line in ours if line.startswith("method")), None
    )
    result["naps"] = sum("drafting sleeps" in line for line in ours)
    return result


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All arms' results by ``name/mode``."""
    model, folder = _model(), tmp_path_factory.mktemp("identity")
    names = [(name, mode) for mode, arms in MODES.items() for name in arms]
    with ThreadPoolExecutor(PARALLEL) as pool:
        done = pool.map(lambda n: _run(n[0], n[1], model, folder), names)
        found = {
            f"{name}/{mode}": result
            for (name, mode), result in zip(names, done, strict=True)
        }
    errors = [result["error"] for result in found.values() if "error" in result]
    assert not errors, errors[0]
    _save(found)
    return found


def _different(tokens: list[list[int]], expected: list[list[int]]) -> int:
    return sum(
        sum(a != b for a, b in zip(got, want, strict=True))
        for got, want in zip(tokens, expected, strict=True)
    )


def _oracle(found: dict[str, dict[str, Any]], name: str) -> list[list[int]]:
    tokens: list[list[int]] = found[f"none/{name.split('/')[1]}"]["tokens"]
    return tokens


def _save(found: dict[str, dict[str, Any]]) -> None:
    if "MRV2_SPEC_RESULTS" not in os.environ:
        return
    sys.path.insert(0, str(HERE.parent.parent / "bench"))
    from harness import machine, save

    oracle = found["none/eager"]["tokens"]
    compiled = found["none/graphs"]["tokens"]
    record = {
        **machine(os.environ.get("MRV2_SPEC_COMMIT")),
        "prompts": len(oracle) // 2,
        "tokens": sum(map(len, oracle)),
        "graphs_against_eager_without_speculation": _different(compiled, oracle),
        "arms": {
            name: {
                "different_tokens": _different(result["tokens"], _oracle(found, name)),
                "counters": result["counters"],
                "start_up_line": result["start_up_line"],
                "naps": result["naps"],
            }
            for name, result in found.items()
        },
    }
    save("identity", record, Path(os.environ["MRV2_SPEC_RESULTS"]))


def test_no_arm_changes_a_token(results: dict[str, dict[str, Any]]) -> None:
    for mode in MODES:
        oracle = results[f"none/{mode}"]["tokens"]
        assert len(oracle) == 32
        assert all(len(tokens) == 256 for tokens in oracle)
    different = {
        name: _different(result["tokens"], _oracle(results, name))
        for name, result in results.items()
    }
    assert different == dict.fromkeys(different, 0)


def test_our_arms_drafted_and_their_counters_add_up(
    results: dict[str, dict[str, Any]],
) -> None:
    for name, result in results.items():
        if not name.startswith(("n-gram", "suffix")):
            assert result["counters"] is None
            continue
        c = result["counters"]
        assert c["accepted"] > 100, name
        assert c["proposed"] == (c["verified"] + c["invalid"] + c["never_issued"]), name
        trimmed = " untrimmed" not in name
        trimmer = "trimmer on" if trimmed else "trimmer off"
        assert trimmer in result["start_up_line"], name
        assert "async scheduling on" in result["start_up_line"], name
        if trimmed:
            assert c["never_issued"] > 0, name
        if " restless" in name:
            assert result["naps"] > 3, name
