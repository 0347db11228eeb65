"""The memory file: what is written is read, and nothing else is."""

import json
import os
import random
import stat
from pathlib import Path

import numpy as np
import pytest

from mrv2_spec.corpus import memory_file
from mrv2_spec.corpus.documents import Documents
from mrv2_spec.corpus.errors import CorpusError
from mrv2_spec.corpus.memory_file import Memory, read_memory, write_memory
from mrv2_spec.corpus.namespaces import (
    Namespaces,
    StoredNamespace,
    digest_salt,
)

KEY = bytes(range(32))


def random_memory(rng: random.Random, num_documents: int = 5) -> Memory:
    """Return a memory of a few namespaces."""
    lengths = [rng.randint(1, 9) for _ in range(num_documents)]
    names = (
        StoredNamespace(None, None, None),
        StoredNamespace("lora", digest_salt(KEY, "a secret"), "näme\n"),
    )
    tokens = [rng.choice([0, 1, 2**31 - 1]) for _ in range(sum(lengths))]
    documents = Documents(
        tokens=np.array(tokens, dtype=np.int32),
        lengths=np.array(lengths, dtype=np.int64),
        namespaces=np.array([rng.randrange(2) for _ in lengths], dtype=np.int64),
        names=names,
    )
    return Memory(documents, "f" * 64, KEY)


def as_plain(memory: Memory) -> tuple[object, ...]:
    """Return what a memory holds in types that compare."""
    documents = memory.documents
    return (
        documents.tokens.tolist(),
        documents.lengths.tolist(),
        documents.namespaces.tolist(),
        documents.names,
        memory.tokenizer,
        memory.salt_key,
    )


def refusal(path: Path, **expected: object) -> str:
    """Return the one line that says why a file is not read."""
    with pytest.raises(CorpusError) as caught:
        read_memory(path, **expected)  # type: ignore[arg-type]
    line = str(caught.value)
    assert "\n" not in line
    assert str(path) in line
    return line


@pytest.mark.parametrize("num_documents", [1, 2, 300])
def test_what_is_written_is_read(
    num_documents: int, tmp_path: Path, rng: random.Random
) -> None:
    memory = random_memory(rng, num_documents)
    path = tmp_path / "memory.bin"
    assert write_memory(path, memory) == path.stat().st_size
    assert as_plain(read_memory(path)) == as_plain(memory)
    again = read_memory(path, tokenizer=memory.tokenizer, vocab_size=2**31)
    assert as_plain(again) == as_plain(memory)
    # The arrays are the reader's own, not views of what was read.
    again.documents.tokens[0] = 7


def test_the_same_memory_is_the_same_file(tmp_path: Path, rng: random.Random) -> None:
    memory = random_memory(rng)
    write_memory(tmp_path / "a", memory)
    write_memory(tmp_path / "b", read_memory(tmp_path / "a"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_bytes_of_a_known_memory(tmp_path: Path) -> None:
    # The format of version 1: raise the version when this has to change.
    documents = Documents(
        np.array([1, 258, 3], dtype=np.int32),
        np.array([2, 1]),
        np.array([0, 0]),
        (StoredNamespace(None, None, "n"),),
    )
    write_memory(tmp_path / "memory.bin", Memory(documents, "t", bytes(32)))
    data = (tmp_path / "memory.bin").read_bytes()
    assert data[:17] == b"mrv2-spec-mem\x01\0\0\0"
    size = int.from_bytes(data[17:25], "little")
    header = json.loads(data[57 : 57 + size])
    assert header["payload_bytes"] == 28
    assert header["namespaces"] == [{"adapter": None, "salt_digest": None, "name": "n"}]
    assert data[57 + size :] == bytes.fromhex(
        "02000000 01000000 00000000 00000000 01000000 02010000 03000000"
    )


def test_every_flipped_bit_is_noticed(tmp_path: Path, rng: random.Random) -> None:
    path = tmp_path / "memory.bin"
    write_memory(path, random_memory(rng))
    data = path.read_bytes()
    seen = set()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        line = refusal(path)
        for reason in ("not a memory file", "version", "truncated", "damaged"):
            if reason in line:
                seen.add(reason)
                break
        else:
            pytest.fail(f"byte {at}: {line}")
        assert "damaged" in line or at < memory_file._PREFIX.size
    assert seen == {"not a memory file", "version", "truncated", "damaged"}


def test_every_truncation_is_noticed(tmp_path: Path, rng: random.Random) -> None:
    path = tmp_path / "memory.bin"
    write_memory(path, random_memory(rng))
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        expected = "truncated" if size >= len(memory_file.MAGIC) else "not a memory"
        assert expected in refusal(path)
    path.write_bytes(data + b"\0")
    assert "damaged (1 bytes follow its end)" in refusal(path)


def test_other_version_is_named(tmp_path: Path, rng: random.Random) -> None:
    path = tmp_path / "memory.bin"
    write_memory(path, random_memory(rng))
    data = bytearray(path.read_bytes())
    data[len(memory_file.MAGIC)] = 7
    path.write_bytes(data)
    assert "is of version 7, this mrv2-spec reads version 1" in refusal(path)


def test_other_tokenizer_and_vocabulary_are_named(
    tmp_path: Path, rng: random.Random
) -> None:
    path = tmp_path / "memory.bin"
    memory = random_memory(rng)
    memory.documents.tokens[:] = 49151
    write_memory(path, memory)
    line = refusal(path, tokenizer="0123456789abcdef")
    assert "is of another tokenizer (ffffffffffff, not 0123456789ab)" in line
    line = refusal(path, vocab_size=49151)
    assert "has the token id 49151, the model has only 49151" in line
    read_memory(path, tokenizer="f" * 64, vocab_size=49152)


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refusal(tmp_path / "none.bin")
    assert "cannot be read: Is a directory" in refusal(tmp_path)
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "a"}\n')
    assert "is not a memory file of mrv2-spec" in refusal(path)
    path.write_bytes(b"")
    assert "is not a memory file of mrv2-spec" in refusal(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lengths", np.array([4, 0])),
        ("lengths", np.array([4, 1])),
        ("namespaces", np.array([0, 2])),
        ("tokens", np.array([1, 2, -3, 4], dtype=np.int32)),
        ("lengths", np.array([], dtype=np.int64)),
    ],
)
def test_counts_that_do_not_fit_are_refused(
    field: str, value: np.ndarray, tmp_path: Path
) -> None:
    # Whole and with the right checksums, but no writer of ours makes it.
    parts = {
        "tokens": np.array([1, 2, 3, 4], dtype=np.int32),
        "lengths": np.array([3, 1]),
        "namespaces": np.array([0, 1]),
        field: value,
    }
    if not len(value):
        parts["namespaces"] = parts["tokens"] = value
    names = (StoredNamespace(None, None, None), StoredNamespace(None, None, "b"))
    path = tmp_path / "memory.bin"
    write_memory(path, Memory(Documents(**parts, names=names), "t", KEY))
    assert "damaged (its counts are wrong)" in refusal(path)


def test_written_whole_or_not_at_all(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "memory.bin"
    write_memory(path, random_memory(rng))
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CorpusError, match="cannot be written: No space left"):
            write_memory(path, random_memory(rng))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/memory.bin", "cannot be written: No such file or directory"),
        ("file/memory.bin", "cannot be written: Not a directory"),
        ("folder", "cannot be written: Is a directory"),
        ("a" * 300, "cannot be written: File name too long"),
    ],
)
def test_path_that_cannot_be_written(
    name: str, message: str, tmp_path: Path, rng: random.Random
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(CorpusError, match=message):
        write_memory(tmp_path / name, random_memory(rng))
    with pytest.raises(CorpusError, match=message):
        memory_file.check_writable(tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


# Namespaces


def test_salts_are_not_in_the_file(tmp_path: Path) -> None:
    spaces = Namespaces()
    salt = "the-salt-of-one-tenant"
    spaces.id_of(("lora", salt, "name"))
    stored = tuple(spaces.stored().values())
    documents = Documents(
        np.array([1], dtype=np.int32), np.array([1]), np.array([0]), stored
    )
    write_memory(tmp_path / "m", Memory(documents, "t", spaces.salt_key))
    assert b"lora" in (tmp_path / "m").read_bytes()
    assert salt.encode() not in (tmp_path / "m").read_bytes()
    # Another memory digests the same salt differently.
    other = Namespaces()
    other.id_of(("lora", salt, "name"))
    assert tuple(other.stored().values()) != stored


def test_same_salt_matches_after_a_restart(tmp_path: Path) -> None:
    before = Namespaces()
    asked = [("a", "salt", None), (None, "salt", None), (None, None, "salt")]
    for namespace in asked:
        before.id_of(namespace)
    names = tuple(before.stored().values())
    after = Namespaces()
    numbers = after.restore(before.salt_key, names, [3, 0, 1])
    assert after.count(asked[0]) == (numbers[0], 3)
    assert after.count(asked[0]) == (numbers[0], 4)
    assert after.count(asked[1]) == (numbers[1], 0)
    assert [after.find(namespace) for namespace in asked] == numbers
    assert [after.id_of(namespace) for namespace in asked] == numbers
    assert after.find((None, "other", None)) is None
    assert after.id_of((None, "other", None)) not in numbers
    # No key, no match.
    wrong = Namespaces()
    wrong.restore(bytes(32), names)
    assert wrong.find(asked[0]) is None
    assert wrong.find(asked[2]) is not None


def test_oldest_namespaces_are_forgotten() -> None:
    spaces = Namespaces(limit=2)
    first = spaces.id_of((None, "a", None))
    spaces.id_of((None, "b", None))
    assert spaces.id_of((None, "a", None)) == first
    spaces.id_of((None, "c", None))
    assert spaces.find((None, "b", None)) is None
    assert spaces.id_of((None, "b", None)) == 3  # never a number that was in use
    assert len(spaces.stored()) == 2


def test_numbers_do_not_depend_on_the_key(rng: random.Random) -> None:
    asked = [
        (None, rng.choice([None, "s", "t"]), rng.choice([None, "n"])) for _ in range(50)
    ]
    ranks = [Namespaces(limit=3) for _ in range(2)]
    assert ranks[0].salt_key != ranks[1].salt_key
    numbers = [[rank.id_of(namespace) for namespace in asked] for rank in ranks]
    assert numbers[0] == numbers[1]
