"""Suffix decoding: votes over all earlier copies of a request's last tokens.

The algorithm is described in docs/suffix.md; its tensors in kernels/suffix_state.py.
"""

import logging
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.states import RequestState

from mrv2_spec.corpus.engine import fingerprint_of, load_memory, read_for, save_memory
from mrv2_spec.corpus.namespaces import Namespace, Namespaces
from mrv2_spec.corpus.saved import SavedMemory
from mrv2_spec.kernels import suffix_state as layout
from mrv2_spec.kernels.suffix_counts import CountRules
from mrv2_spec.kernels.suffix_state import SuffixSettings, make_state
from mrv2_spec.placeholders import find_placeholder_ids
from mrv2_spec.speculator import RowSpeculator
from mrv2_spec.suffix_backend import make_backend
from mrv2_spec.views import NewRequest, StepInputs

logger = logging.getLogger("vllm.mrv2_spec")

# A request's own arguments (``extra_args``, over HTTP ``vllm_xargs``).
NAMESPACE_ARG = "mrv2_spec_namespace"
READ_ARG = "mrv2_spec_read"
CONTRIBUTE_ARG = "mrv2_spec_contribute"


class SuffixSpeculator(RowSpeculator):
    """Drafts by votes over the own row and the responses of other requests.

    A request reads and feeds only the memory of its namespace: its LoRA adapter, its
    ``cache_salt`` and, if given, a name of its own. What a request leaves behind stays
    in the memory however it ended; a preempted one goes on as a new response that
    begins where it was cut.
    """

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        super().__init__(vllm_config, device, req_states)
        spec_config = vllm_config.speculative_config
        assert spec_config is not None
        self.max_cached_requests: int = spec_config.suffix_decoding_max_cached_requests
        self.suffix_settings = SuffixSettings(
            num_speculative_tokens=self.num_speculative_steps,
            max_model_len=req_states.max_model_len,
            corpus_tokens=self.settings.corpus_tokens,
            max_cached_requests=max(1, self.max_cached_requests),
        )
        # Read before anything is allocated, and kept: a reset goes back to it.
        self._initial_memory = (
            read_for(vllm_config.model_config, self.settings.memory_file)
            if self.settings.memory_file is not None
            else None
        )
        self.state = make_state(self.suffix_settings, req_states.max_num_reqs, device)
        rules = CountRules(
            max_tree_depth=spec_config.suffix_decoding_max_tree_depth,
            max_spec_factor=spec_config.suffix_decoding_max_spec_factor,
            min_token_prob=spec_config.suffix_decoding_min_token_prob,
        )
        self._backend = make_backend(
            self.suffix_settings,
            rules if self.settings.scoring == "reference" else None,
            req_states.max_num_reqs,
            device,
        )
        self._begin_memory()
        self._placeholder_ids = torch.tensor(
            find_placeholder_ids(vllm_config.model_config.hf_config),
            dtype=torch.int32,
            device=device,
        )
        self.warm_up()

    def describe(self) -> str:
        """Return the settings in force, for the start-up line."""
        memory = (
            f"memory of {self.suffix_settings.corpus_tokens} tokens and "
            f"{self.max_cached_requests} requests"
            if self.max_cached_requests
            else "no memory across requests"
        )
        memory = f"{self.settings.scoring} scoring, {memory}"
        return f"{memory}, {self.state.nbytes() / 2**20:.1f} MiB"

    def persistent_bytes(self) -> int:
        """Return the device bytes held for the whole run."""
        return self.state.nbytes()

    def reset(self) -> None:
        """Forget all requests, and go back to the memory of the start."""
        super().reset()
        max_num_reqs = self.req_states.max_num_reqs
        fresh = make_state(self.suffix_settings, max_num_reqs, "cpu")
        for field in fields(fresh):
            getattr(self.state, field.name).copy_(getattr(fresh, field.name))
        self._begin_memory()

    def _begin_memory(self) -> None:
        self.namespaces = Namespaces()
        self._next_uid = 0
        if self._initial_memory is not None:
            load_memory(
                self.state,
                self.suffix_settings,
                self.namespaces,
                self._initial_memory,
            )
            self._next_uid = self._initial_memory.documents.num_documents

    def add_requests(self, requests: Sequence[NewRequest]) -> None:
        """Begin anew in the slots of requests that were just admitted."""
        rows = []
        for request in requests:
            namespace, flags = self._rights(request)
            row = list(layout.NEW_SLOT)
            row[layout.UID] = self._next_uid
            row[layout.NAMESPACE] = self.namespaces.id_of(namespace)
            row[layout.FLAGS] = flags
            if request.prefill_len > request.prompt_len:
                # Back after a preemption: what it had emitted is in the memory.
                row[layout.COMMITTED] = request.prefill_len
            self._next_uid += 1
            rows.append(row)
        slots = self._to_device([request.slot for request in requests], torch.int64)
        self.state.slots[slots] = self._to_device(rows, torch.int32)

    def _rights(self, request: NewRequest) -> tuple[Namespace, int]:
        args = request.extra_args
        name = args.get(NAMESPACE_ARG)
        flags = 0
        if self.max_cached_requests:
            flags |= layout.FLAG_READ if _is_true(args, READ_ARG) else 0
            flags |= layout.FLAG_CONTRIBUTE if _is_true(args, CONTRIBUTE_ARG) else 0
        if name is not None and not isinstance(name, str):
            logger.warning(
                "%s=%r is no string: the request neither reads nor feeds the memory",
                NAMESPACE_ARG,
                name,
            )
            return (None, None, None), 0
        return (request.adapter, request.cache_salt, name), flags

    def _to_device(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        pinned = self.device.type == "cuda"
        staged = torch.tensor(values, dtype=dtype, pin_memory=pinned)
        return staged.to(self.device, non_blocking=True)

    def purge(self, namespace: Namespace | None = None) -> None:
        """Forget the memory: all of it, or that of one namespace."""
        pages = self.state.pages
        if namespace is None:
            pages[:, layout.PAGE_SEQ] = -1
            return
        number = self.namespaces.find(namespace)
        if number is not None:
            mine = pages[:, layout.PAGE_NAMESPACE] == number
            pages[:, layout.PAGE_SEQ].masked_fill_(mine, -1)

    def save_memory(self, path: str) -> SavedMemory:
        """Write what the memory holds to a file; waits for the device.

        Raises:
            CorpusError: the path cannot be written, the memory is empty, or the
                tokenizer cannot be identified.
        """
        return save_memory(
            self.state,
            self.suffix_settings,
            self.namespaces,
            fingerprint_of(self.vllm_config.model_config),
            path,
        )

    def draft(self, step: StepInputs) -> None:
        """Learn from what was emitted, then draft; see :meth:`RowSpeculator.draft`."""
        self._backend.step(
            self.state,
            step,
            self.req_states.prompt_len.gpu,
            self._placeholder_ids,
            self,
        )


def _is_true(args: Any, name: str) -> bool:
    value = args.get(name, True)
    # Over HTTP a flag may come as a number or a word.
    if value in (True, False, "true", "false", "1", "0"):
        return value in (True, "true", "1")
    logger.warning("%s=%r is neither true nor false: taken as false", name, value)
    return False
