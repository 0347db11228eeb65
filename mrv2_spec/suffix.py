"""Suffix decoding: votes over all earlier copies of a request's last tokens.

The algorithm is described in docs/suffix.md; its tensors in kernels/suffix_state.py.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.states import RequestState

from mrv2_spec.config import SettingsError
from mrv2_spec.corpus.engine import fingerprint_of, load_memory, read_for, save_memory
from mrv2_spec.corpus.namespaces import Namespace
from mrv2_spec.corpus.saved import SavedMemory
from mrv2_spec.kernels.suffix_counts import CountRules
from mrv2_spec.kernels.suffix_state import SuffixSettings
from mrv2_spec.speculator import RowSpeculator
from mrv2_spec.suffix_memory import RequestAccess, SuffixMemory, settings_for
from mrv2_spec.views import (
    CONTRIBUTE_ARG,
    NAMESPACE_ARG,
    READ_ARG,
    NewRequest,
    StepInputs,
)

logger = logging.getLogger("vllm.mrv2_spec")


class SuffixSpeculator(RowSpeculator):
    """Drafts by votes over the own row and the responses of other requests.

    A request reads and feeds only the memory of its namespace: its LoRA adapter, its
    ``cache_salt`` and, if given, a name of its own. What a request leaves behind stays
    in the memory however it ended; a preempted one goes on as a new response that
    begins where it was cut.

    Attributes:
        draft_sources: [max_num_reqs] int32, by slot, where its draft came from: 0 the
            own row, 1 the memory. The first token decides: it is the memory's if the
            own row would not have predicted it from a match as good or, with the
            reference scoring, if the memory's draft won. 0 where nothing was drafted.
    """

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        super().__init__(vllm_config, device, req_states)
        spec_config = vllm_config.speculative_config
        assert spec_config is not None
        self.max_cached_requests: int = spec_config.suffix_decoding_max_cached_requests
        # Read before anything is allocated, and kept: a reset goes back to it.
        self._initial_memory = (
            read_for(vllm_config.model_config, self.settings.memory_file)
            if self.settings.memory_file is not None
            else None
        )
        memory_settings = settings_for(
            self.settings.scoring,
            num_speculative_tokens=self.num_speculative_steps,
            max_model_len=req_states.max_model_len,
            corpus_tokens=self.settings.corpus_tokens,
            max_cached_requests=max(1, self.max_cached_requests),
        )
        _check_room(memory_settings, device)
        self.memory = SuffixMemory(
            memory_settings,
            req_states.max_num_reqs,
            device,
            self.settings.scoring,
            CountRules(
                max_tree_depth=spec_config.suffix_decoding_max_tree_depth,
                max_spec_factor=spec_config.suffix_decoding_max_spec_factor,
                min_token_prob=spec_config.suffix_decoding_min_token_prob,
            ),
        )
        # The same tensor for the whole run: the memory's state stays where it is.
        self.draft_sources = self.memory.state.draft_sources
        self._begin_memory()
        self.warm_up()

    def describe(self) -> str:
        """Return the settings in force, for the start-up line."""
        memory = (
            f"memory of {self.settings.corpus_tokens} tokens and "
            f"{self.max_cached_requests} requests"
            if self.max_cached_requests
            else "no memory across requests"
        )
        memory = f"{self.settings.scoring} scoring, {memory}"
        return f"{memory}, {self.memory.nbytes() / 2**20:.1f} MiB"

    def persistent_bytes(self) -> int:
        """Return the device bytes held for the whole run."""
        return self.memory.nbytes()

    def reset(self) -> None:
        """Forget all requests, and go back to the memory of the start."""
        super().reset()
        self.memory.reset()
        self._begin_memory()

    def _begin_memory(self) -> None:
        if self._initial_memory is not None:
            memory = self.memory
            load_memory(
                memory.state, memory.settings, memory.namespaces, self._initial_memory
            )
            memory.next_uid = self._initial_memory.documents.num_documents

    def add_requests(self, requests: Sequence[NewRequest]) -> None:
        """Begin anew in the slots of requests that were just admitted."""
        for request in requests:
            # Back after a preemption: what it had emitted is in the memory.
            resumed = request.prefill_len > request.prompt_len
            self.memory.add_request(
                request.slot,
                self._access(request),
                already_committed=request.prefill_len if resumed else 0,
            )

    def _access(self, request: NewRequest) -> RequestAccess:
        args = request.extra_args
        name = args.get(NAMESPACE_ARG)
        if name is not None and not isinstance(name, str):
            logger.warning(
                "%s=%r is no string: the request neither reads nor feeds the memory",
                NAMESPACE_ARG,
                name,
            )
            nameless = (request.adapter, request.cache_salt, None)
            return RequestAccess(nameless, read=False, contribute=False)
        remembers = self.max_cached_requests > 0
        return RequestAccess(
            (request.adapter, request.cache_salt, name),
            read=remembers and _is_true(args, READ_ARG),
            contribute=remembers and _is_true(args, CONTRIBUTE_ARG),
        )

    def purge(self, namespace: Namespace | None = None) -> None:
        """Forget the memory: all of it, or that of one namespace."""
        self.memory.purge(namespace)

    def save_memory(self, path: str) -> SavedMemory:
        """Write what the memory holds to a file; waits for the device.

        Raises:
            CorpusError: the path cannot be written, the memory is empty, or the
                tokenizer cannot be identified.
        """
        return save_memory(
            self.memory.state,
            self.memory.settings,
            self.memory.namespaces,
            fingerprint_of(self.vllm_config.model_config),
            path,
        )

    def draft(self, step: StepInputs) -> None:
        """Learn from what was emitted, then draft; see :meth:`RowSpeculator.draft`."""
        rows = step.rows
        inputs = (
            rows.token_ids,
            step.idx_mapping,
            rows.total_len,
            self.req_states.prompt_len.gpu,
            step.num_sampled,
        )
        self.memory.update(*inputs)
        self.memory.draft(
            *inputs,
            self.draft_tokens,
            self.num_valid_drafts_for_trim,
            self.draft_token_confidence_probs,
            num_steps=step.num_speculative_tokens,
            placeholder_ids=self.placeholder_ids,
        )


def _check_room(settings: SuffixSettings, device: torch.device) -> None:
    if device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(device)
    if settings.memory_bytes > free:
        raise SettingsError(
            f"mrv2_spec.corpus_tokens={settings.corpus_tokens} needs "
            f"{settings.memory_bytes / 2**30:.1f} GiB, {free / 2**30:.1f} GiB of the "
            "device are free; lower it"
        )


def _is_true(args: Any, name: str) -> bool:
    value = args.get(name, True)
    # Over HTTP a flag may come as a number or a word.
    if value in (True, False, "true", "false", "1", "0"):
        return value in (True, "true", "1")
    logger.warning("%s=%r is neither true nor false: taken as false", name, value)
    return False
