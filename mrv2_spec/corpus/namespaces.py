"""Namespaces of the memory: who may read whose responses."""

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Namespaces whose number is remembered; a forgotten one starts with an empty memory.
MAX_NAMESPACES = 2**16

SALT_KEY_BYTES = 32

# (adapter, cache salt, name)
Namespace = tuple[str | None, str | None, str | None]


class StoredNamespace(NamedTuple):
    """A namespace as it is kept: its cache salt is a secret, so only a digest of it."""

    adapter: str | None
    salt_digest: str | None
    name: str | None


def digest_salt(key: bytes, salt: str) -> str:
    """Return a keyed digest of a cache salt: equal salts match, none can be read.

    Args:
        key: random, one a memory; without it, digests of one salt in two files could be
            told to be equal, and one table of guesses would serve for all files.
        salt: the request's ``cache_salt``.
    """
    data = salt.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, key=key, digest_size=32).hexdigest()


class Namespaces:
    """Numbers for namespaces, never given twice, the same on every rank.

    The ranks' keys differ, the numbers do not: they follow the order of first use. Each
    namespace counts its requests, which no other namespace changes.

    Attributes:
        salt_key: what cache salts are digested with.
    """

    def __init__(self, limit: int = MAX_NAMESPACES) -> None:
        self.salt_key = secrets.token_bytes(SALT_KEY_BYTES)
        self._known: OrderedDict[StoredNamespace, _Entry] = OrderedDict()
        self._limit = limit
        self._next = 0

    def id_of(self, namespace: Namespace) -> int:
        """Return a namespace's number, a new one if it has none."""
        return self._entry_of(self._stored(namespace)).number

    def count(self, namespace: Namespace) -> tuple[int, int]:
        """Return a namespace's number and how many requests it had, and count one."""
        entry = self._entry_of(self._stored(namespace))
        entry.requests += 1
        return entry.number, entry.requests - 1

    def find(self, namespace: Namespace) -> int | None:
        """Return a namespace's number, or None if it has none."""
        entry = self._known.get(self._stored(namespace))
        return None if entry is None else entry.number

    def stored(self) -> dict[int, StoredNamespace]:
        """Return the namespaces that have a number, least recently used first."""
        return {entry.number: stored for stored, entry in self._known.items()}

    def restore(
        self,
        salt_key: bytes,
        namespaces: Sequence[StoredNamespace],
        requests: Sequence[int] | None = None,
    ) -> list[int]:
        """Take up the namespaces of a file and its key; return their numbers.

        Only before the first request: salts seen earlier were digested with another
        key.

        Args:
            salt_key: the file's.
            namespaces: the file's.
            requests: how many responses each has there, 0 if not given.
        """
        assert not self._known
        self.salt_key = salt_key
        numbers = []
        counts = [0] * len(namespaces) if requests is None else requests
        for stored, count in zip(namespaces, counts, strict=True):
            entry = self._entry_of(stored)
            entry.requests = count
            numbers.append(entry.number)
        return numbers

    def _stored(self, namespace: Namespace) -> StoredNamespace:
        adapter, salt, name = namespace
        digest = None if salt is None else digest_salt(self.salt_key, salt)
        return StoredNamespace(adapter, digest, name)

    def _entry_of(self, stored: StoredNamespace) -> "_Entry":
        if stored in self._known:
            self._known.move_to_end(stored)
            return self._known[stored]
        if len(self._known) >= self._limit:
            self._known.popitem(last=False)
        self._known[stored] = _Entry(self._next)
        self._next += 1
        return self._known[stored]


@dataclass
class _Entry:
    number: int
    requests: int = 0
