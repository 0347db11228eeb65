"""Build a memory from JSON lines and a tokenizer."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mrv2_spec.corpus.documents import make_documents
from mrv2_spec.corpus.errors import CorpusError
from mrv2_spec.corpus.fingerprint import identify_tokenizer
from mrv2_spec.corpus.jsonl import Line, describe_broken, read_lines
from mrv2_spec.corpus.memory_file import Memory
from mrv2_spec.corpus.namespaces import SALT_KEY_BYTES, StoredNamespace

# Lines that are handed to the tokenizer together.
_BATCH = 256

Encode = Callable[[list[str]], list[list[int]]]
# Called with the bytes of the file that were read.
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Built:
    """A memory and the lines that are not in it."""

    memory: Memory
    broken: list[Line]


def load_encoder(tokenizer: str) -> Encode:
    """Load a tokenizer as vLLM does; special tokens are added to nothing.

    Raises:
        CorpusError: it cannot be loaded.
    """
    try:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(tokenizer)
    except ModuleNotFoundError as error:
        raise CorpusError(
            f"texts need {error.name}, which is not installed: run this where vLLM is, "
            'or give "token_ids"'
        ) from error
    # What the libraries raise for a folder that is no tokenizer is not documented.
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CorpusError(f"tokenizer {tokenizer} cannot be loaded: {first}") from error

    def encode(texts: list[str]) -> list[list[int]]:
        # Not verbose: a text may well be longer than the model's context.
        encoded = loaded(texts, add_special_tokens=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    return encode


def build_memory(
    source: Path,
    tokenizer: str,
    *,
    namespace: str | None = None,
    adapter: str | None = None,
    skip_broken: bool = False,
    advance: Advance = lambda done: None,
    load: Callable[[str], Encode] = load_encoder,
) -> Built:
    """Read responses, oldest first, and turn texts into tokens.

    Args:
        source: JSON lines.
        tokenizer: the folder or name of the model's tokenizer.
        namespace: the name that requests must give to read these responses.
        adapter: the LoRA adapter that requests must use to read them.
        skip_broken: keep the other lines where some are broken.
        advance: called now and then.
        load: loads the tokenizer; called only if there are texts.

    Raises:
        CorpusError: the file or the tokenizer cannot be used, a line is broken (unless
            skipped), or there is no response.
    """
    identity = identify_tokenizer(tokenizer)
    responses: list[NDArray[np.int32]] = []
    broken: list[Line] = []
    batch: list[Line] = []
    encode: Encode | None = None

    def flush() -> None:
        nonlocal encode
        texts = [line for line in batch if line.text is not None]
        if texts and encode is None:
            encode = load(tokenizer)
        encoded = iter(encode([line.text or "" for line in texts]) if encode else ())
        for line in batch:
            ids = line.token_ids
            if ids is None:
                ids = np.array(next(encoded), dtype=np.int32)
            if len(ids):
                responses.append(ids)
            else:
                broken.append(
                    Line(line.number, line.end, problem='"text" has no token')
                )
        batch.clear()

    for line in read_lines(source, identity.num_ids):
        if line.problem is not None:
            broken.append(line)
        elif skip_broken or not broken:
            batch.append(line)
        if len(batch) >= _BATCH:
            flush()
            advance(line.end)
    flush()
    broken.sort(key=lambda line: line.number)
    if broken and not skip_broken:
        raise CorpusError(
            f"{source}: {describe_broken(broken)}; mend the file, or keep the other "
            "lines with --skip-broken"
        )
    if not responses:
        raise CorpusError(f"{source} holds no response: nothing to build")
    documents = make_documents(responses, StoredNamespace(adapter, None, namespace))
    key = secrets.token_bytes(SALT_KEY_BYTES)
    return Built(Memory(documents, identity.fingerprint, key), broken)
