"""Seeded sampling with drafts follows the target's own distribution.

A tiny model over 20 tokens answers one prompt 100,000 times with as many seeds. Its
exact distribution of the next tokens comes from transformers in double precision; a
chi-square test compares the counts with it, without and with drafts, and with the
parameters that shape a distribution.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.worker import make_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUMBER = 100_000
NUM_TOKENS = 3
# The highest that vLLM takes: hundreds of texts are common, and drafts often right.
TEMPERATURE = 2.0
# The tail repeats: every round past the first token has drafts to copy.
PROMPT = [4, 5, 6, 7, 8] * 5 + [4, 5]
MIN_EXPECTED = 8
SPECULATIVE = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
ARMS: dict[str, tuple[bool, bool, dict[str, Any]]] = {
    "no speculation": (False, True, {}),
    "untrimmed": (True, False, {}),
    "trimmed": (True, True, {}),
    "min_p": (True, False, {"min_p": 0.05}),
    "logit_bias": (True, False, {"logit_bias": {"6": -2.0, "9": 2.0}}),
    "top_k and top_p": (True, False, {"top_k": 12, "top_p": 0.95}),
}


def shape(logits: torch.Tensor, sampling: dict[str, Any]) -> torch.Tensor:
    """Return [..., vocab_size] probabilities as the parameters ask for."""
    for token, bias in sampling.get("logit_bias", {}).items():
        logits[..., int(token)] += bias
    probs = (logits / TEMPERATURE).softmax(-1)
    keep = probs >= sampling.get("min_p", 0.0) * probs.amax(-1, keepdim=True)
    if "top_k" in sampling:
        kept = probs.topk(sampling["top_k"], -1).values[..., -1:]
        keep &= probs >= kept
        probs = torch.where(keep, probs, 0.0)
        probs /= probs.sum(-1, keepdim=True)
        # Of what is left, the likeliest until their sum passes top_p.
        ordered, order = probs.sort(-1, descending=True)
        inside = ordered.cumsum(-1) - ordered < sampling["top_p"]
        keep &= torch.zeros_like(keep).scatter(-1, order, inside)
    probs = torch.where(keep, probs, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def exact(model: str, sampling: dict[str, Any]) -> torch.Tensor:
    """Return [vocab_size] * NUM_TOKENS, the probability of every text."""
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM.from_pretrained(model).double().eval()
    size = llama.config.vocab_size
    texts = torch.zeros(1, 0, dtype=torch.long)
    probs = torch.ones(1, dtype=torch.float64)
    for _ in range(NUM_TOKENS):
        rows = torch.cat([torch.tensor([PROMPT]).expand(len(texts), -1), texts], 1)
        with torch.inference_mode():
            last = [llama(part).logits[:, -1] for part in rows.split(500)]
        step = shape(torch.cat(last).clone(), sampling)
        probs = (probs[:, None] * step).flatten()
        texts = torch.cat(
            [
                texts.repeat_interleave(size, 0),
                torch.arange(size).repeat(len(texts))[:, None],
            ],
            1,
        )
    return probs.view([size] * NUM_TOKENS)


def p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Return how likely such a distance is; rare texts are counted together."""
    rare = expected < MIN_EXPECTED
    assert not observed[expected == 0].any(), "a text that cannot be"
    o = torch.cat([observed[~rare], observed[rare].sum()[None]])
    e = torch.cat([expected[~rare], expected[rare].sum()[None]])
    o, e = o[e > 0], e[e > 0]
    distance = ((o - e) ** 2 / e).sum()
    freedom = torch.tensor((len(e) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, distance / 2))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def sample(
    model: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """Return a function that runs an arm."""
    folder = tmp_path_factory.mktemp("sampling")

    def run(name: str) -> dict[str, Any]:
        speculates, trim, sampling = ARMS[name]
        engine: dict[str, Any] = {
            "gpu_memory_utilization": 0.1,
            "kv_cache_memory_bytes": 2 << 30,
        }
        if speculates:
            engine["speculative_config"] = SPECULATIVE
            engine["additional_config"] = {"mrv2_spec": {"trim": trim}}
        job, out = folder / f"{name}.job", folder / f"{name}.json"
        job.write_text(
            json.dumps(
                {
                    "engine": engine,
                    "sampling": sampling,
                    "prompt": PROMPT,
                    "number": NUMBER,
                    "num_tokens": NUM_TOKENS,
                    "batch": 512,
                    "temperature": TEMPERATURE,
                    "seeded": True,
                }
            )
        )
        environ = {
            **os.environ,
            "MRV2_SPEC": "1" if speculates else "0",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [
            sys.executable, str(HERE / "sampling_arm.py"), "--model", model,
            "--job", str(job), "--out", str(out),
        ]  # fmt: skip
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        result: dict[str, Any] = json.loads(out.read_text())
        return result

    return run


@pytest.mark.parametrize("name", ARMS)
def test_follows_the_targets_distribution(
    name: str, model: str, sample: Callable[[str], dict[str, Any]]
) -> None:
    speculates, trim, sampling = ARMS[name]
    result = sample(name)
    probs = exact(model, sampling)
    observed = torch.zeros_like(probs)
    for text, number in result["texts"]:
        observed[tuple(text)] += number
    assert observed.sum() == NUMBER
    found = p_value(observed, probs * NUMBER)
    said = (
        f"{name}: p = {found:.4f}, {len(result['texts'])} texts, {result['accepted']} "
        f"of {result['verified']} drafts accepted in {result['rounds']} rounds"
    )
    assert found > 0.001, said
    if speculates and not trim:
        assert result["rounds"] >= NUMBER, said
        assert result["accepted"] > NUMBER / 20, said
    if speculates:
        # The test must be able to tell: another distribution is far away.
        bias = {**sampling.get("logit_bias", {}), "6": 0.5}
        wrong = exact(model, {**sampling, "logit_bias": bias}) * NUMBER
        assert observed[wrong == 0].any() or p_value(observed, wrong) < 1e-6
