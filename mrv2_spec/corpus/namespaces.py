"""Namespaces of the memory: who may read whose responses."""

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Sequence
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

    The ranks' keys differ, the numbers do not: they follow the order of first use.

    Attributes:
        salt_key: what cache salts are digested with.
    """

    def __init__(self, limit: int = MAX_NAMESPACES) -> None:
        self.salt_key = secrets.token_bytes(SALT_KEY_BYTES)
        self._ids: OrderedDict[StoredNamespace, int] = OrderedDict()
        self._limit = limit
        self._next = 0

    def id_of(self, namespace: Namespace) -> int:
        """Return a namespace's number, a new one if it has none."""
        return self._id_of(self._stored(namespace))

    def find(self, namespace: Namespace) -> int | None:
        """Return a namespace's number, or None if it has none."""
        return self._ids.get(self._stored(namespace))

    def stored(self) -> dict[int, StoredNamespace]:
        """Return the namespaces that have a number, least recently used first."""
        return {number: stored for stored, number in self._ids.items()}

    def restore(
        self, salt_key: bytes, namespaces: Sequence[StoredNamespace]
    ) -> list[int]:
        """Take up the namespaces of a file and its key; return their numbers.

        Only before the first request: salts seen earlier were digested with another
        key.
        """
        assert not self._ids
        self.salt_key = salt_key
        return [self._id_of(stored) for stored in namespaces]

    def _stored(self, namespace: Namespace) -> StoredNamespace:
        adapter, salt, name = namespace
        digest = None if salt is None else digest_salt(self.salt_key, salt)
        return StoredNamespace(adapter, digest, name)

    def _id_of(self, stored: StoredNamespace) -> int:
        if stored in self._ids:
            self._ids.move_to_end(stored)
            return self._ids[stored]
        if len(self._ids) >= self._limit:
            self._ids.popitem(last=False)
        self._ids[stored] = self._next
        self._next += 1
        return self._ids[stored]
