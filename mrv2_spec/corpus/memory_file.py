"""The memory file: written whole or not at all, read only if every byte is right.

    magic, version, header's size and SHA-256 | JSON header | payload

The header gives the tokenizer, the counts, the namespaces and the payload's size and
SHA-256. The payload is little-endian: the responses' lengths (uint32), their namespaces
(uint32, an index into the header's list) and all tokens (int32), oldest response first.
"""

import contextlib
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mrv2_spec.corpus.documents import Documents
from mrv2_spec.corpus.errors import CorpusError, reason
from mrv2_spec.corpus.namespaces import SALT_KEY_BYTES, StoredNamespace

MAGIC = b"mrv2-spec-mem"
VERSION = 1
# magic, version, bytes of the header, SHA-256 of the header
_PREFIX = struct.Struct("<13sIQ32s")
_COUNT = np.dtype("<u4")
_TOKEN = np.dtype("<i4")
_TEMP_PREFIX = ".mrv2-spec-unfinished-"


@dataclass(frozen=True, slots=True)
class Memory:
    """What a file holds."""

    documents: Documents
    tokenizer: str
    """Fingerprint of the tokenizer that the tokens are of."""
    salt_key: bytes
    """What the namespaces' cache salts were digested with."""


def write_memory(path: Path, memory: Memory) -> int:
    """Write a memory file in place of what was there, and return its bytes.

    The file appears under its name once all of it is on the disk; it can be read by its
    owner alone, as it holds what users were told.

    Raises:
        CorpusError: the path cannot be written.
    """
    payload = _pack_payload(memory.documents)
    header = json.dumps(_header(memory, payload)).encode()
    prefix = _PREFIX.pack(MAGIC, VERSION, len(header), _sha256(header))
    with _replacing(path) as file:
        for part in (prefix, header, payload):
            file.write(part)
    return len(prefix) + len(header) + len(payload)


def check_writable(path: Path) -> None:
    """Refuse a path that cannot be written, before the work is done.

    Raises:
        CorpusError: a folder, or in a folder that is missing or cannot be written.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "Is a directory")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from error


def read_memory(
    path: Path, *, tokenizer: str | None = None, vocab_size: int | None = None
) -> Memory:
    """Read a memory file and check all of it.

    Args:
        path: the file.
        tokenizer: the fingerprint that it must have; None accepts any.
        vocab_size: what every token id must be below; None accepts any.

    Raises:
        CorpusError: the file cannot be read, is none, is of another version or
            tokenizer, or is damaged.
    """
    try:
        with path.open("rb") as file:
            header = _read_header(path, file)
            memory = _read_payload(path, file, header)
    except OSError as error:
        raise CorpusError(
            f"memory file {path} cannot be read: {reason(error)}"
        ) from error
    if tokenizer is not None and memory.tokenizer != tokenizer:
        raise CorpusError(
            f"memory file {path} is of another tokenizer ({memory.tokenizer[:12]}, not "
            f"{tokenizer[:12]}): its tokens would be other texts; build it with the "
            "model's own tokenizer"
        )
    tokens = memory.documents.tokens
    highest = int(tokens.max())
    if vocab_size is not None and highest >= vocab_size:
        raise CorpusError(
            f"memory file {path} has the token id {highest}, the model has only "
            f"{vocab_size}; build it from texts or ids of this model"
        )
    return memory


def _header(memory: Memory, payload: bytes) -> dict[str, Any]:
    documents = memory.documents
    return {
        "tokenizer": memory.tokenizer,
        "documents": documents.num_documents,
        "tokens": documents.num_tokens,
        "payload_bytes": len(payload),
        "payload_sha256": _sha256(payload).hex(),
        "salt_key": memory.salt_key.hex(),
        "namespaces": [name._asdict() for name in documents.names],
    }


def _pack_payload(documents: Documents) -> bytes:
    return b"".join(
        (
            documents.lengths.astype(_COUNT).tobytes(),
            documents.namespaces.astype(_COUNT).tobytes(),
            documents.tokens.astype(_TOKEN).tobytes(),
        )
    )


def _read_header(path: Path, file: BinaryIO) -> dict[str, Any]:
    prefix = file.read(_PREFIX.size)
    if not prefix.startswith(MAGIC):
        raise CorpusError(
            f"{path} is not a memory file of mrv2-spec: make one with mrv2-spec corpus "
            "build, or save one from an engine"
        )
    if len(prefix) < _PREFIX.size:
        raise CorpusError(f"memory file {path} is truncated: make it again")
    _, version, num_bytes, checksum = _PREFIX.unpack(prefix)
    if version != VERSION:
        raise CorpusError(
            f"memory file {path} is of version {version}, this mrv2-spec reads version "
            f"{VERSION}: make it again"
        )
    # Bounded by the file: a damaged size must not ask for terabytes.
    size = os.fstat(file.fileno()).st_size
    text = file.read(min(num_bytes, size))
    if len(text) < num_bytes:
        raise CorpusError(f"memory file {path} is truncated: make it again")
    if _sha256(text) != checksum:
        raise _damaged(path, "its header's checksum is wrong")
    header: dict[str, Any] = json.loads(text)
    expected = _PREFIX.size + num_bytes + header["payload_bytes"]
    if size < expected:
        raise CorpusError(
            f"memory file {path} is truncated ({size} of {expected} bytes): make it "
            "again"
        )
    if size > expected:
        raise _damaged(path, f"{size - expected} bytes follow its end")
    return header


def _read_payload(path: Path, file: BinaryIO, header: dict[str, Any]) -> Memory:
    payload = file.read()
    if _sha256(payload).hex() != header["payload_sha256"]:
        raise _damaged(path, "its checksum is wrong")
    num_documents, num_tokens = header["documents"], header["tokens"]
    names = tuple(StoredNamespace(**name) for name in header["namespaces"])
    salt_key = bytes.fromhex(header["salt_key"])
    # What no writer of ours makes is refused too, and not only what a disk damages.
    itemsize = _COUNT.itemsize
    tokens_at = 2 * itemsize * num_documents
    if len(payload) != tokens_at + _TOKEN.itemsize * num_tokens:
        raise _damaged(path, "its counts are wrong")
    lengths = np.frombuffer(payload, _COUNT, num_documents)
    namespaces = np.frombuffer(payload, _COUNT, num_documents, itemsize * num_documents)
    tokens = np.frombuffer(payload, _TOKEN, num_tokens, tokens_at)
    if (
        num_documents < 1
        or int(lengths.sum(dtype=np.int64)) != num_tokens
        or int(lengths.min()) < 1
        or int(namespaces.max()) >= len(names)
        or int(tokens.min()) < 0
        or len(salt_key) != SALT_KEY_BYTES
    ):
        raise _damaged(path, "its counts are wrong")
    documents = Documents(
        tokens=tokens.astype(np.int32),
        lengths=lengths.astype(np.int64),
        namespaces=namespaces.astype(np.int64),
        names=names,
    )
    return Memory(documents, header["tokenizer"], salt_key)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that takes the path's place once it is on the disk."""
    temp: str | None = None
    try:
        descriptor, temp = tempfile.mkstemp(prefix=_TEMP_PREFIX, dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
        temp = None
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        if temp is not None:
            with contextlib.suppress(OSError):
                os.unlink(temp)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _damaged(path: Path, what: str) -> CorpusError:
    return CorpusError(f"memory file {path} is damaged ({what}): make it again")


def _unwritable(path: Path, error: OSError) -> CorpusError:
    return CorpusError(f"memory file {path} cannot be written: {reason(error)}")
