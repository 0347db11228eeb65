"""What a memory holds: responses, each a run of tokens in a namespace."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mrv2_spec.corpus.namespaces import StoredNamespace

# Tokens of a page of the device's memory, which a response fills alone. Equal to
# SuffixSettings.page_tokens, which cannot be imported without torch.
PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Documents:
    """Responses, oldest first. A leading piece of the prompt counts as response."""

    tokens: NDArray[np.int32]  # [num_tokens], one response after the other
    lengths: NDArray[np.int64]  # [num_documents], each at least 1
    namespaces: NDArray[np.int64]  # [num_documents], indexes `names`
    names: tuple[StoredNamespace, ...]

    @property
    def num_documents(self) -> int:
        """Number of responses."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all responses."""
        return len(self.tokens)

    def page_tokens(self) -> int:
        """Return the ``corpus_tokens`` that hold everything: whole pages."""
        pages = (self.lengths + PAGE_TOKENS - 1) // PAGE_TOKENS
        return int(pages.sum()) * PAGE_TOKENS


def make_documents(
    responses: Sequence[NDArray[np.int32]], namespace: StoredNamespace
) -> Documents:
    """Return responses of one namespace as documents."""
    lengths = np.array([len(response) for response in responses], dtype=np.int64)
    empty = np.zeros(0, dtype=np.int32)
    return Documents(
        tokens=np.concatenate([empty, *responses]),
        lengths=lengths,
        namespaces=np.zeros(len(lengths), dtype=np.int64),
        names=(namespace,),
    )
