"""Building a memory: lines, tokenizers, and the commands around them."""

import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mrv2_spec.cli import app
from mrv2_spec.corpus.build import build_memory, load_encoder
from mrv2_spec.corpus.errors import CorpusError
from mrv2_spec.corpus.fingerprint import identify_tokenizer
from mrv2_spec.corpus.jsonl import Line, describe_broken, read_lines
from mrv2_spec.corpus.memory_file import read_memory
from mrv2_spec.corpus.namespaces import StoredNamespace
from mrv2_spec.demo import smollm2

WORDS = ["[UNK]", "[EOS]", "the", "cat", "sat", "on", "mat", "Hello"]


def write_tokenizer(folder: Path, words: list[str], **changes: Any) -> str:
    """Write a tokenizer of whole words as a Hugging Face folder."""
    folder.mkdir(exist_ok=True)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 1,
                "content": words[1],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(words)},
            "unk_token": words[0],
        },
        **changes,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": words[0],
        "eos_token": words[1],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return write_tokenizer(tmp_path / "tokenizer", WORDS)


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes lines, dicts as JSON, and names the file."""

    def write(*content: Any) -> Path:
        path = tmp_path / "texts.jsonl"
        parts = (
            line if isinstance(line, bytes) else json.dumps(line).encode()
            for line in content
        )
        path.write_bytes(b"\n".join(parts))
        return path

    return write


# Lines

BROKEN: list[tuple[Any, str]] = [
    (b"{", "not JSON"),
    (b'{"text": "a"} {"text": "b"}', "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'{"text": "\xff"}', "not UTF-8"),
    ({"tex": "a"}, "not an object with either"),
    ({"text": "a", "token_ids": [2]}, "not an object with either"),
    ([2, 3], "not an object with either"),
    ("text", "not an object with either"),
    (7, "not an object with either"),
    ({"text": 3}, '"text" is not a string'),
    ({"text": None}, '"text" is not a string'),
    ({"text": ""}, '"text" is empty'),
    ({"text": "\ud800"}, '"text" is not Unicode'),
    ({"token_ids": []}, '"token_ids" is empty'),
    ({"token_ids": "2 3"}, '"token_ids" is not a list of whole numbers'),
    ({"token_ids": [2, "3"]}, '"token_ids" is not a list of whole numbers'),
    ({"token_ids": [2.0]}, '"token_ids" is not a list of whole numbers'),
    ({"token_ids": [True]}, '"token_ids" is not a list of whole numbers'),
    ({"token_ids": [2, -1]}, "token id -1 is not from 0 to 7"),
    ({"token_ids": [8]}, "token id 8 is not from 0 to 7"),
    ({"token_ids": [10**30]}, "is not from 0 to 7"),
]


@pytest.mark.parametrize(("line", "problem"), BROKEN)
def test_broken_line_is_named(
    line: Any, problem: str, lines: Callable[..., Path], tokenizer: str
) -> None:
    path = lines({"text": "the cat"}, b"", line, {"token_ids": [2, 7], "id": 5})
    found = list(read_lines(path, num_ids=8))
    assert [line.number for line in found] == [1, 3, 4]
    assert [line.problem is None for line in found] == [True, False, True]
    assert problem in str(found[1].problem)
    assert found[-1].end == path.stat().st_size

    with pytest.raises(CorpusError) as caught:
        build_memory(path, tokenizer)
    message = str(caught.value)
    assert message.startswith(f"{path}: line 3 (")
    assert problem in message
    assert "--skip-broken" in message
    assert "\n" not in message

    built = build_memory(path, tokenizer, skip_broken=True)
    assert [line.number for line in built.broken] == [3]
    assert built.memory.documents.lengths.tolist() == [2, 2]


def test_many_broken_lines_are_counted() -> None:
    broken = [Line(number, 0, problem="not JSON") for number in range(3, 12)]
    assert describe_broken(broken[:2]) == "line 3 (not JSON), line 4 (not JSON)"
    assert describe_broken(broken).endswith("line 7 (not JSON), and 4 more")


def test_text_without_a_token_is_broken(
    lines: Callable[..., Path], tokenizer: str
) -> None:
    path = lines({"text": "the"}, {"text": "  "}, {"tex": 1}, {"text": "cat"})
    with pytest.raises(CorpusError, match=r'line 2 \("text" has no token\), line 3 \('):
        build_memory(path, tokenizer)
    built = build_memory(path, tokenizer, skip_broken=True)
    assert [line.number for line in built.broken] == [2, 3]
    assert built.memory.documents.tokens.tolist() == [2, 3]


@pytest.mark.parametrize("content", [(), (b"", b"  ")])
def test_empty_file_is_refused(
    content: tuple[bytes, ...], lines: Callable[..., Path], tokenizer: str
) -> None:
    with pytest.raises(CorpusError, match="holds no response: nothing to build"):
        build_memory(lines(*content), tokenizer)


def test_nothing_left_after_skipping_is_refused(
    lines: Callable[..., Path], tokenizer: str
) -> None:
    with pytest.raises(CorpusError, match="holds no response"):
        build_memory(lines(b"{", {"text": ""}), tokenizer, skip_broken=True)


def test_order_of_texts_and_ids_is_kept(
    lines: Callable[..., Path], tokenizer: str, rng: random.Random
) -> None:
    # More than a batch, mixed.
    expected, content = [], []
    for _ in range(600):
        ids = [rng.randrange(2, 8) for _ in range(rng.randint(1, 6))]
        expected.append(ids)
        words = " ".join(WORDS[token] for token in ids)
        content.append(rng.choice([{"text": words}, {"token_ids": ids}]))
    path = lines(*content)
    done: list[int] = []
    built = build_memory(
        path, tokenizer, namespace="n", adapter="a", advance=done.append
    )
    documents = built.memory.documents
    assert documents.lengths.tolist() == [len(ids) for ids in expected]
    assert documents.tokens.tolist() == [token for ids in expected for token in ids]
    assert documents.names == (StoredNamespace("a", None, "n"),)
    assert done == sorted(done)
    assert 0 < done[-1] <= path.stat().st_size


def test_token_ids_alone_load_no_tokenizer(
    lines: Callable[..., Path], tokenizer: str
) -> None:
    path = lines({"token_ids": [2]})
    build_memory(path, tokenizer, load=lambda _: pytest.fail("was loaded"))


def test_special_tokens_are_added_to_nothing(
    lines: Callable[..., Path], tmp_path: Path
) -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "[EOS]", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"[EOS]": {"id": "[EOS]", "ids": [1], "tokens": ["[EOS]"]}},
    }
    folder = write_tokenizer(tmp_path / "eos", WORDS, post_processor=template)
    built = build_memory(lines({"text": "the cat"}, {"text": "the [EOS]"}), folder)
    assert built.memory.documents.tokens.tolist() == [2, 3, 2, 1]


# Fingerprints


def test_fingerprint_is_of_the_vocabulary(tokenizer: str, tmp_path: Path) -> None:
    first = identify_tokenizer(tokenizer)
    assert first.num_ids == len(WORDS)
    file = tmp_path / "tokenizer" / "tokenizer.json"
    # Another order of the same pairs, and what does not name tokens.
    content = json.loads(file.read_text())
    content["model"]["vocab"] = dict(reversed(content["model"]["vocab"].items()))
    content["normalizer"] = {"type": "Lowercase"}
    file.write_text(json.dumps(content, indent=3))
    assert identify_tokenizer(tokenizer) == first
    swapped = [*WORDS[:-2], WORDS[-1], WORDS[-2]]
    more = [*WORDS, "dog"]
    other = [
        identify_tokenizer(write_tokenizer(tmp_path / "other", words)).fingerprint
        for words in (swapped, more, WORDS[:-1])
    ]
    assert len({first.fingerprint, *other}) == 4


def test_fingerprint_takes_added_tokens_from_both_files(
    tokenizer: str, tmp_path: Path
) -> None:
    first = identify_tokenizer(tokenizer)
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    content = json.loads(config.read_text())
    content["added_tokens_decoder"] = {"1": {"content": "[EOS]"}}
    config.write_text(json.dumps(content))
    assert identify_tokenizer(tokenizer) == first  # said twice
    content["added_tokens_decoder"]["8"] = {"content": "<new>"}
    config.write_text(json.dumps(content))
    assert identify_tokenizer(tokenizer).num_ids == 9
    assert identify_tokenizer(tokenizer) != first
    config.unlink()
    assert identify_tokenizer(tokenizer) == first


def test_fingerprint_of_a_unigram_list(tmp_path: Path) -> None:
    as_list = {"type": "Unigram", "unk_id": 0, "vocab": [[word, -1] for word in WORDS]}
    folder = write_tokenizer(tmp_path / "u", WORDS, model=as_list)
    same = write_tokenizer(tmp_path / "w", WORDS)
    assert identify_tokenizer(folder) == identify_tokenizer(same)


def test_fingerprint_of_other_files_is_of_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x00pieces")
    first = identify_tokenizer(str(tmp_path))
    assert first.num_ids is None
    (tmp_path / "tokenizer.model").write_bytes(b"\x01pieces")
    assert identify_tokenizer(str(tmp_path)) != first


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no tokenizer of Hugging Face"),
        ("[]", "is no tokenizer of Hugging Face"),
        ('{"model": {}}', "is no tokenizer of Hugging Face (KeyError: 'vocab')"),
        ('{"model": {"vocab": {}}}', "has an empty vocabulary"),
        (None, "has none of the files tokenizer.json, "),
    ],
)
def test_folder_without_a_tokenizer(
    content: str | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CorpusError) as caught:
        identify_tokenizer(str(tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_tokenizer_folder(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="is no folder"):
        identify_tokenizer(str(tmp_path / "none"))


# Commands


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["corpus", *map(str, arguments)])


def refusal(*arguments: Any) -> str:
    """Run a command that must fail and return its one line."""
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return str(result.stderr)


def test_build_and_info(
    lines: Callable[..., Path], tokenizer: str, tmp_path: Path
) -> None:
    texts = lines({"text": "the cat sat"}, {"token_ids": [2, 7]})
    output = tmp_path / "memory.bin"
    given = ["--tokenizer", tokenizer, "-o", output]
    result = run("build", texts, *given, "--namespace", "[docs]", "--adapter", "lora")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    size = output.stat().st_size
    assert result.stdout == f"{output}: 2 responses, 5 tokens, {size} bytes\n"
    memory = read_memory(output, tokenizer=identify_tokenizer(tokenizer).fingerprint)
    assert memory.documents.tokens.tolist() == [2, 3, 4, 2, 7]

    result = run("info", output, "--json")
    assert json.loads(result.stdout) == {
        "file": str(output),
        "version": 1,
        "bytes": size,
        "tokenizer": memory.tokenizer,
        "responses": 2,
        "tokens": 5,
        "shortest": 2,
        "longest": 3,
        "corpus_tokens_needed": 128,
        "namespaces": [
            {
                "adapter": "lora",
                "salted": False,
                "name": "[docs]",
                "responses": 2,
                "tokens": 5,
            }
        ],
    }
    result = run("info", output)
    assert result.exit_code == 0
    assert memory.tokenizer in result.stdout
    assert "[docs]" in result.stdout


def test_build_says_what_it_skipped(
    lines: Callable[..., Path], tokenizer: str, tmp_path: Path
) -> None:
    texts = lines({"text": "the"}, b"{", {"text": "cat"})
    output = tmp_path / "memory.bin"
    given = ["build", texts, "--tokenizer", tokenizer, "-o", output]
    assert "line 2 (not JSON); mend the file" in refusal(*given)
    assert not output.exists()
    result = run(*given, "--skip-broken")
    assert result.exit_code == 0
    assert result.stderr == "skipped: line 2 (not JSON)\n"
    assert read_memory(output).documents.num_documents == 2


def test_progress_is_shown_on_a_terminal(
    lines: Callable[..., Path],
    tokenizer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = lines(*({"token_ids": [2]} for _ in range(600)))
    monkeypatch.setenv("FORCE_COLOR", "1")
    output = tmp_path / "memory.bin"
    result = run("build", texts, "--tokenizer", tokenizer, "-o", output)
    assert result.exit_code == 0
    assert "reading" in result.stderr
    assert "100%" in result.stderr
    assert "reading" not in result.stdout


def test_build_says_when_the_default_capacity_is_too_small(
    lines: Callable[..., Path],
    tokenizer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mrv2_spec import corpus_cli
    from mrv2_spec.config import Settings

    texts = lines({"text": "the"}, {"text": "cat"}, {"text": "sat"})
    monkeypatch.setattr(corpus_cli, "Settings", lambda: Settings(corpus_tokens=128))
    result = run(
        "build", texts, "--tokenizer", tokenizer, "-o", tmp_path / "memory.bin"
    )
    assert "set mrv2_spec.corpus_tokens to at least 192" in result.stdout


def test_commands_refuse_in_one_line(
    lines: Callable[..., Path], tokenizer: str, tmp_path: Path
) -> None:
    texts = lines({"text": "the"})
    output = tmp_path / "memory.bin"
    given = ["--tokenizer", tokenizer, "-o", output]
    assert "none.jsonl cannot be read: No such" in refusal(
        "build", tmp_path / "none.jsonl", *given
    )
    assert "cannot be read: Is a directory" in refusal("build", tmp_path, *given)
    line = refusal("build", texts, "--tokenizer", tokenizer, "-o", tmp_path / "no/m")
    assert "cannot be written: No such file or directory" in line
    line = refusal("build", texts, "--tokenizer", tmp_path / "none", "-o", output)
    assert "is no folder" in line
    assert not output.exists()
    assert "is not a memory file" in refusal("info", texts)


@pytest.mark.skipif(
    importlib.util.find_spec(smollm2.PACKAGE) is None,
    reason=f"{smollm2.REQUIREMENT} is not installed",
)
@pytest.mark.slow
def test_texts_of_a_real_tokenizer(lines: Callable[..., Path], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = str(smollm2.ensure_model())
    texts = ["Hello world", "naïve café ☕ 東京", "a<|im_end|>"]
    path = lines(*({"text": text} for text in texts))
    output = tmp_path / "memory.bin"
    assert run("build", path, "--tokenizer", model, "-o", output).exit_code == 0
    documents = read_memory(output, vocab_size=49152).documents
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(model)
    assert loaded.decode(documents.tokens.tolist()) == "".join(texts)
    end = loaded.convert_tokens_to_ids("<|im_end|>")
    assert documents.tokens[-1] == end
    # What is hashed is what the loaded tokenizer says.
    assert identify_tokenizer(model).num_ids == len(loaded.get_vocab())
    assert load_encoder(model)(["Hello world"])[0] == documents.tokens[:2].tolist()
