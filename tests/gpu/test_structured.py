"""Grammars on the GPU: drafts full of illegal look-alikes change no token.

Requests with a JSON schema, a regular expression, choices, and none, several rounds of
them, batch-invariant, under CUDA graphs and async scheduling.
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

from tests.engine.harness import ngram, suffix, text_of
from tests.engine.test_structured import GRAMMARS, actions, is_valid
from tests.engine.worker import make_text_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BACKENDS = ("xgrammar", "guidance")
DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram untrimmed": ngram(8, trim=False),
    "ngram trimmed": ngram(8),
    "suffix untrimmed": suffix(8, trim=False),
}
ROUNDS = 3


def _run(backend: str, name: str, model: str, folder: Path) -> dict[str, Any]:
    job, out = folder / f"{backend} {name}.job", folder / f"{backend} {name}.json"
    engine = {
        **DRAFTERS[name],
        # Any white space would be legal, and endless.
        "structured_outputs_config": {
            "backend": backend,
            "disable_any_whitespace": True,
        },
    }
    job.write_text(
        json.dumps(
            {
                "model": model,
                "engine": engine,
                "actions": actions(),
                "rounds": ROUNDS,
            }
        )
    )
    environ = {
        **os.environ,
        "MRV2_SPEC": "0" if name == "none" else "1",
        "VLLM_BATCH_INVARIANT": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [
        sys.executable, "-m", "tests.gpu.structured_arm",
        "--job", str(job), "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode != 0:
        return {"error": f"{backend} {name}:\n{done.stdout}\n{done.stderr}"}
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, str], dict[str, Any]]:
    """All arms' results by backend and drafter."""
    folder = tmp_path_factory.mktemp("structured")
    model = make_text_model(folder / "text")
    arms = [(backend, name) for backend in BACKENDS for name in DRAFTERS]
    with ThreadPoolExecutor(len(arms)) as pool:
        done = pool.map(lambda arm: _run(*arm, model, folder), arms)
        found = dict(zip(arms, done, strict=True))
    errors = [result["error"] for result in found.values() if "error" in result]
    assert not errors, errors[0]
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_valid_and_equal_to_no_speculation(
    backend: str, results: dict[tuple[str, str], dict[str, Any]]
) -> None:
    expected = results[backend, "none"]["tokens"]
    for tokens in expected:
        for kind, token_ids in zip(GRAMMARS, tokens, strict=False):
            assert is_valid(kind, text_of(token_ids)), text_of(token_ids)
    for name in DRAFTERS:
        assert results[backend, name]["tokens"] == expected, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_grammars_ruled_drafts_out_and_let_others_pass(
    backend: str, results: dict[tuple[str, str], dict[str, Any]]
) -> None:
    for name in DRAFTERS:
        if name == "none":
            continue
        c = results[backend, name]["counters"]
        assert c["invalid"] > 0, name
        assert c["proposed"] == c["verified"] + c["invalid"] + c["never_issued"], name
        if "untrimmed" in name:
            assert c["accepted"] > 0, name
