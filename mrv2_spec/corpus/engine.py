"""What an engine does with memory files: check, load, save."""

import logging
from pathlib import Path
from typing import Any

import numpy as np

from mrv2_spec.corpus.documents import Documents
from mrv2_spec.corpus.errors import CorpusError
from mrv2_spec.corpus.fingerprint import identify_tokenizer
from mrv2_spec.corpus.memory_file import Memory, read_memory, write_memory
from mrv2_spec.corpus.namespaces import Namespaces
from mrv2_spec.corpus.packing import Kept, pack, unpack
from mrv2_spec.corpus.saved import SavedMemory
from mrv2_spec.kernels.suffix_state import SuffixSettings, SuffixState

logger = logging.getLogger("vllm.mrv2_spec")


def fingerprint_of(model_config: Any) -> str:
    """Return the fingerprint of a model's tokenizer.

    Args:
        model_config: vLLM's.

    Raises:
        CorpusError: the tokenizer has no files that say what its tokens are.
    """
    name = model_config.tokenizer or model_config.model
    return identify_tokenizer(name, model_config.tokenizer_revision).fingerprint


def read_for(model_config: Any, path: str) -> Memory:
    """Read a memory file for a model.

    Raises:
        CorpusError: it is not one that this model can use.
    """
    return read_memory(
        Path(path),
        tokenizer=fingerprint_of(model_config),
        vocab_size=model_config.get_vocab_size(),
    )


def load_memory(
    state: SuffixState,
    settings: SuffixSettings,
    namespaces: Namespaces,
    memory: Memory,
) -> Kept:
    """Put a file's newest responses in an empty memory, and say so if not all fit."""
    documents = memory.documents
    counts = np.bincount(documents.namespaces, minlength=len(documents.names))
    numbers = namespaces.restore(memory.salt_key, documents.names, counts.tolist())
    kept = pack(state, settings, documents, numbers)
    logger.info(
        "mrv2-spec: memory of %d responses, %d tokens loaded",
        kept.num_documents,
        kept.num_tokens,
    )
    if kept.num_tokens < documents.num_tokens:
        logger.warning(
            "mrv2-spec: the memory file has %d responses of %d tokens, more than fit; "
            "the newest %d of %d tokens are kept (corpus_tokens=%d, of which all would "
            "need %d; suffix_decoding_max_cached_requests=%d)",
            documents.num_documents,
            documents.num_tokens,
            kept.num_documents,
            kept.num_tokens,
            settings.corpus_tokens,
            documents.page_tokens(),
            settings.max_cached_requests,
        )
    return kept


def save_memory(
    state: SuffixState,
    settings: SuffixSettings,
    namespaces: Namespaces,
    fingerprint: str,
    path: str,
) -> SavedMemory:
    """Write what the memory holds to a file; waits for the device.

    Raises:
        CorpusError: the path cannot be written, or there is nothing to write.
    """
    responses = unpack(state, settings)
    # A forgotten namespace has no requests any more that could read its responses.
    stored = namespaces.stored()
    known = np.isin(responses.namespaces.numpy(), list(stored))
    lengths = responses.lengths.numpy()
    numbers = responses.namespaces.numpy()[known]
    used = set(numbers.tolist())
    order = [number for number in stored if number in used]
    place = np.zeros(max(order, default=-1) + 1, dtype=np.int64)
    place[order] = np.arange(len(order))
    documents = Documents(
        tokens=responses.tokens.numpy()[np.repeat(known, lengths)],
        lengths=lengths[known],
        namespaces=place[numbers],
        names=tuple(stored[number] for number in order),
    )
    if documents.num_documents == 0:
        raise CorpusError("the memory is empty: nothing was saved")
    nbytes = write_memory(
        Path(path), Memory(documents, fingerprint, namespaces.salt_key)
    )
    return SavedMemory(path, documents.num_documents, documents.num_tokens, nbytes)
