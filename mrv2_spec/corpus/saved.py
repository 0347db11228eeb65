"""What saving a memory reports."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SavedMemory:
    """What was written."""

    path: str
    documents: int
    tokens: int
    bytes: int
