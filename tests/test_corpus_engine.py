"""Memory files in real engines on the CPU: saved, loaded, purged, refused.

The engines run in a child process, which is this file run as a script.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrv2_spec.corpus.documents import make_documents
from mrv2_spec.corpus.fingerprint import identify_tokenizer
from mrv2_spec.corpus.memory_file import Memory, read_memory, write_memory
from mrv2_spec.corpus.namespaces import StoredNamespace
from mrv2_spec.doctor import installed_version

VOCAB_SIZE = 40
NUM_TOKENS = 60
SALT = "the salt of tenant a"
ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}


def write_tokenizer(folder: Path, num_ids: int) -> None:
    """Write as much of a tokenizer as a fingerprint is made of."""
    vocab = {f"word{number}": number for number in range(num_ids)}
    folder.mkdir(exist_ok=True)
    content = {"model": {"type": "WordLevel", "vocab": vocab}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint folder of a random Llama."""
    transformers = pytest.importorskip("transformers")
    import torch

    folder: Path = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            initializer_range=0.3,
            bos_token_id=1,
            eos_token_id=2,
        )
        transformers.LlamaForCausalLM(config).float().save_pretrained(folder)
    write_tokenizer(folder, VOCAB_SIZE)
    return folder


def memory_of(path: Path, folder: Path, tokens: list[int]) -> Path:
    """Write a memory file of one response."""
    response = np.array(tokens, dtype=np.int32)
    documents = make_documents([response], StoredNamespace(None, None, None))
    fingerprint = identify_tokenizer(str(folder)).fingerprint
    write_memory(path, Memory(documents, fingerprint, bytes(32)))
    return path


# Refused before the model loads


@pytest.fixture
def refuse(model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that configures an engine and returns why that failed."""
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs

    from mrv2_spec import integration
    from mrv2_spec.config import SettingsError

    for name in ("VLLM_USE_V2_MODEL_RUNNER", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")

    def configure(memory_file: Any, **speculative: Any) -> Any:
        return EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=128,
            dtype="float32",
            speculative_config={**SUFFIX, **speculative},
            additional_config={"mrv2_spec": {"memory_file": memory_file}},
        ).create_engine_config()

    def refuse(memory_file: Any, **speculative: Any) -> str:
        with pytest.raises(SettingsError) as caught:
            configure(memory_file, **speculative)
        line = str(caught.value)
        assert "mrv2_spec.memory_file" in line
        assert "\n" not in line
        return line

    was_installed = integration.is_installed()
    integration.install()
    good = memory_of(model.parent / "good.bin", model, [3, 4, 5])
    assert configure(str(good)).use_v2_model_runner
    yield refuse
    if not was_installed:
        integration.uninstall()


def test_memory_file_is_checked_before_the_model_loads(
    refuse: Any, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "memory.bin"
    assert "must be the path of a file" in refuse(7)
    assert "must be the path of a file" in refuse("")
    assert "cannot be read: No such file" in refuse(str(path))
    memory_of(path, model, [3, VOCAB_SIZE])
    assert f"the token id {VOCAB_SIZE}, the model has only" in refuse(str(path))
    write_tokenizer(tmp_path / "other", VOCAB_SIZE + 1)
    memory_of(path, tmp_path / "other", [3, 4])
    assert "is of another tokenizer" in refuse(str(path))
    memory_of(path, model, [3, 4])
    assert "'suffix' only" in refuse(str(path), method="ngram")
    line = refuse(str(path), suffix_decoding_max_cached_requests=0)
    assert "suffix_decoding_max_cached_requests=0 keeps none" in line
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "damaged (its checksum is wrong)" in refuse(str(path))


# Engines


def run_engines(model: str, folder: Path) -> dict[str, Any]:
    """Run the engines of the test below; in the child process."""
    import gc

    from vllm import LLM, SamplingParams

    from mrv2_spec.errors import UserError
    from mrv2_spec.integration import purge_memory, read_counters, save_memory

    prompts = [[3 + i, 7, 9, 11 + i] for i in range(4)]
    params = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, detokenize=False, ignore_eos=True
    )
    # Reads the memory of its salt and leaves nothing in it.
    stranger = params.clone()
    stranger.extra_args = {"mrv2_spec_contribute": False}
    found: dict[str, Any] = {}

    def start(speculative: dict[str, Any], **settings: Any) -> Any:
        return LLM(
            model=model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=128,
            max_num_seqs=4,
            disable_log_stats=True,
            enable_prefix_caching=False,
            speculative_config=speculative,
            additional_config={"mrv2_spec": settings},
        )

    def ask(llm: Any, salt: str | None, params: Any = params) -> dict[str, Any]:
        before = read_counters(llm)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        if salt is not None:
            inputs = [{**one, "cache_salt": salt} for one in inputs]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        after = read_counters(llm)
        assert before is not None
        assert after is not None
        counts = {
            name: value - asdict(before)[name] for name, value in asdict(after).items()
        }
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        return {"texts": texts, "counts": counts}

    def error(call: Any, *arguments: Any) -> str:
        try:
            call(*arguments)
        except UserError as refusal:
            return str(refusal)
        return "no error"

    llm = start(SUFFIX, corpus_tokens=8192)
    found["save nothing"] = error(save_memory, llm, folder / "none.bin")
    found["cold stranger"] = ask(llm, "the salt of tenant b", stranger)
    found["cold"] = ask(llm, SALT)
    found["saved"] = asdict(save_memory(llm, folder / "a.bin"))
    found["unwritable"] = error(save_memory, llm, folder / "no" / "a.bin")
    ask(llm, None)
    save_memory(llm, folder / "both.bin")
    purge_memory(llm, (None, SALT, None))
    save_memory(llm, folder / "purged.bin")
    found["after purge"] = ask(llm, SALT)
    purge_memory(llm)
    found["save purged"] = error(save_memory, llm, folder / "none.bin")
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    # What was imported: vLLM would have it looked through many times.
    gc.freeze()

    llm = start(SUFFIX, corpus_tokens=8192, memory_file=str(folder / "a.bin"))
    save_memory(llm, folder / "again.bin")
    found["stranger"] = ask(llm, "the salt of tenant b", stranger)
    found["no salt"] = ask(llm, None)
    found["warm"] = ask(llm, SALT)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()

    llm = start({"method": "ngram", "num_speculative_tokens": 2})
    found["no memory"] = [
        error(save_memory, llm, folder / "n.bin"),
        error(purge_memory, llm),
    ]
    llm.llm_engine.engine_core.shutdown()
    return found


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(
    installed_version("vllm-cpu") is None, reason="vllm-cpu is not installed"
)
def test_memory_outlives_the_engine(model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(model), str(tmp_path)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    found = json.loads((tmp_path / "found.json").read_text())

    # Saved: four responses with the last tokens of their prompts, no salt.
    texts = found["cold"]["texts"]
    memory = read_memory(tmp_path / "a.bin")
    assert found["saved"]["path"] == str(tmp_path / "a.bin")
    assert found["saved"]["documents"] == memory.documents.num_documents == 4
    assert found["saved"]["tokens"] == memory.documents.num_tokens
    assert found["saved"]["bytes"] == (tmp_path / "a.bin").stat().st_size
    assert SALT.encode() not in (tmp_path / "a.bin").read_bytes()
    ends = np.cumsum(memory.documents.lengths)
    for end, text in zip(ends, texts, strict=True):
        # The last step's tokens are appended only by a step after it.
        assert " ".join(map(str, text[: NUM_TOKENS - 6])) in " ".join(
            map(str, memory.documents.tokens[:end].tolist())
        )
    assert memory.tokenizer == identify_tokenizer(str(model)).fingerprint

    # Loaded: the same documents, which speed up the same tenant and nobody else.
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "a.bin").read_bytes()
    for name in ("warm", "no salt", "stranger", "after purge"):
        assert found[name]["texts"] == texts
    cold, warm = found["cold"]["counts"], found["warm"]["counts"]
    assert warm["rounds"] < cold["rounds"]
    assert warm["accepted"] > cold["accepted"]
    assert found["no salt"]["counts"]["rounds"] > warm["rounds"]
    # To the count as if there were no file.
    assert found["stranger"]["counts"] == found["cold stranger"]["counts"]

    # Purged: one tenant, then all.
    both = read_memory(tmp_path / "both.bin").documents
    assert [name.salt_digest is None for name in both.names] == [False, True]
    left = read_memory(tmp_path / "purged.bin").documents
    assert left.names == (StoredNamespace(None, None, None),)
    assert left.num_documents == 4
    assert found["after purge"]["counts"]["rounds"] > warm["rounds"]
    assert found["save purged"] == "the memory is empty: nothing was saved"
    assert found["save nothing"] == "the memory is empty: nothing was saved"
    assert not (tmp_path / "none.bin").exists()
    assert "cannot be written: No such file or directory" in found["unwritable"]
    assert [line.partition(":")[0] for line in found["no memory"]] == [
        "this engine has no memory to save",
        "this engine has no memory to purge",
    ]


if __name__ == "__main__":
    result = run_engines(sys.argv[1], Path(sys.argv[2]))
    Path(sys.argv[2], "found.json").write_text(json.dumps(result))
