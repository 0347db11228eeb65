"""A number for a tokenizer: equal where every token id means the same piece of text.

Taken from the tokenizer's files alone, so that the command line and an engine come to
the same without loading it. Hashed is the set of (id, token): the vocabulary and the
added tokens of ``tokenizer.json`` and the added tokens of ``tokenizer_config.json``.
Where there is no ``tokenizer.json``, the bytes of the vocabulary file are.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrv2_spec.corpus.errors import CorpusError, reason

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
# In order: the first that exists is hashed where there is no tokenizer.json.
VOCABULARY_FILES = (
    "tekken.json",
    "tokenizer.model",
    "tiktoken.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)


@dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """What is known of a tokenizer from its files."""

    fingerprint: str
    """SHA-256 in hexadecimal digits."""
    num_ids: int | None
    """One more than the highest token id, or None if the files do not tell."""


def identify_tokenizer(name: str, revision: str | None = None) -> TokenizerIdentity:
    """Identify a tokenizer by its vocabulary.

    Args:
        name: a folder, or the name of a model on the Hugging Face hub.
        revision: of the model on the hub.

    Raises:
        CorpusError: there is no such tokenizer, or its files make no sense.
    """
    path = _find(name, TOKENIZER_FILE, revision)
    if path is None:
        return _identify_by_bytes(name, revision)
    config = _find(name, CONFIG_FILE, revision)
    try:
        pairs = set(_vocabulary(json.loads(_read(path))))
        if config is not None:
            pairs |= set(_configured(json.loads(_read(config))))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorpusError(
            f"tokenizer {name}: {TOKENIZER_FILE} or {CONFIG_FILE} is no tokenizer of "
            f"Hugging Face ({type(error).__name__}: {error})"
        ) from error
    if not pairs:
        raise CorpusError(f"tokenizer {name} has an empty vocabulary")
    digest = hashlib.sha256(b"vocabulary\n")
    for number, token in sorted(pairs):
        data = token.encode("utf-8", "surrogatepass")
        # With its length, so that no token can be taken for two others.
        digest.update(b"%d %d " % (number, len(data)) + data)
    return TokenizerIdentity(digest.hexdigest(), max(pairs)[0] + 1)


def _vocabulary(tokenizer: dict[str, Any]) -> Iterator[tuple[int, str]]:
    vocab = tokenizer["model"]["vocab"]
    if isinstance(vocab, list):  # Unigram: [token, score], by id
        yield from ((number, str(entry[0])) for number, entry in enumerate(vocab))
    else:
        yield from ((int(number), token) for token, number in vocab.items())
    for added in tokenizer.get("added_tokens") or ():
        yield int(added["id"]), str(added["content"])


def _configured(config: dict[str, Any]) -> Iterator[tuple[int, str]]:
    for number, added in (config.get("added_tokens_decoder") or {}).items():
        yield int(number), str(added["content"])


def _identify_by_bytes(name: str, revision: str | None) -> TokenizerIdentity:
    for filename in VOCABULARY_FILES:
        path = _find(name, filename, revision)
        if path is not None:
            digest = hashlib.sha256(b"file\n" + _read(path))
            return TokenizerIdentity(digest.hexdigest(), None)
    raise CorpusError(
        f"tokenizer {name} has none of the files {TOKENIZER_FILE}, "
        f"{', '.join(VOCABULARY_FILES)}: name the model's folder"
    )


def _find(name: str, filename: str, revision: str | None) -> Path | None:
    folder = Path(name)
    if folder.exists():
        path = folder / filename
        return path if path.is_file() else None
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise CorpusError(f"tokenizer {name} is no folder")
    return _find_on_hub(name, filename, revision)


def _find_on_hub(name: str, filename: str, revision: str | None) -> Path | None:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
    except ModuleNotFoundError:
        raise CorpusError(f"tokenizer {name} is no folder") from None
    try:
        return Path(hf_hub_download(name, filename, revision=revision))
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, OSError, ValueError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CorpusError(
            f"tokenizer {name} is neither a folder nor a model that can be fetched: "
            f"{first}"
        ) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CorpusError(
            f"tokenizer file {path} cannot be read: {reason(error)}"
        ) from error
