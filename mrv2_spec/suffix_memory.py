"""The memory of suffix decoding across requests: who reads, who gives, what is kept.

Owns the device state and the kernels of one drafter. On a GPU the CUDA version runs, on
the CPU the tensor version with the same results. A step is `update` and then `draft`;
neither waits for the device nor allocates on a GPU. Everything else (new requests,
purging, loading) happens between steps, on the same stream.

What a request leaves behind is what it had committed at its last step: a finished,
aborted or never-finished one stays until it is overwritten or too old, like any other.
A preempted one comes back as a new request; `already_committed` keeps what it gave
before from being given twice.

Namespaces share the ring and nothing else: what a request is drafted follows from its
row and from what its namespace did, in that order, and is still in the ring. That holds
while fewer namespaces are in use than learn at the same time (`num_learners`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields

import torch

from mrv2_spec.config import Scoring
from mrv2_spec.corpus.namespaces import Namespace, Namespaces
from mrv2_spec.kernels import suffix_state as layout
from mrv2_spec.kernels.suffix_counts import CountRules, draft_by_counts
from mrv2_spec.kernels.suffix_draft import draft_suffix
from mrv2_spec.kernels.suffix_state import SuffixSettings, SuffixState, make_state
from mrv2_spec.kernels.suffix_update import update_suffix

EVERYBODY: Namespace = (None, None, None)


@dataclass(frozen=True, slots=True)
class RequestAccess:
    """What a request may do with the memory; requests meet only in one namespace."""

    namespace: Namespace = EVERYBODY
    read: bool = True
    contribute: bool = True


def settings_for(
    scoring: Scoring,
    *,
    num_speculative_tokens: int,
    max_model_len: int,
    corpus_tokens: int,
    max_cached_requests: int,
) -> SuffixSettings:
    """Return the layout for a scoring and a memory size.

    Args:
        scoring: "learned", or "reference" for the CPU implementation's rules.
        num_speculative_tokens: drafts a request, K.
        max_model_len: drafts end before this position.
        corpus_tokens: tokens that the memory holds; must be positive.
        max_cached_requests: newest requests whose tokens are read.
    """
    if scoring == "reference":
        # It reads every place of the ring and needs no hash entries.
        return SuffixSettings(
            num_speculative_tokens=num_speculative_tokens,
            max_model_len=max_model_len,
            corpus_tokens=corpus_tokens,
            max_cached_requests=max_cached_requests,
            key_masks=(),
            ways=1,
            num_buckets=1,
            prompt_tail=0,
        )
    ways = SuffixSettings.ways
    # A chain for every other token; a power of two, so for each at most.
    buckets = 1 << max(0, (max(1, corpus_tokens // ways // 2) - 1).bit_length())
    return SuffixSettings(
        num_speculative_tokens=num_speculative_tokens,
        max_model_len=max_model_len,
        corpus_tokens=corpus_tokens,
        max_cached_requests=max_cached_requests,
        num_buckets=buckets,
    )


class Learners:
    """Which row of what was learned each namespace has.

    A namespace without one takes a row never used or, failing that, the one that was
    used longest ago, but none that a request in some slot may still be using.

    Args:
        num_rows: rows there are; at least one a slot.
    """

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows))[::-1]
        self._row_of: OrderedDict[int, int] = OrderedDict()
        self._namespace_in: dict[int, int] = {}

    def take(self, slot: int, namespace: int) -> tuple[int, bool]:
        """Return the row for a request in a slot, and whether it must forget."""
        self._namespace_in[slot] = namespace
        if namespace in self._row_of:
            self._row_of.move_to_end(namespace)
            return self._row_of[namespace], False
        if self._free:
            self._row_of[namespace] = self._free.pop()
            return self._row_of[namespace], True
        used = set(self._namespace_in.values())
        oldest = next(known for known in self._row_of if known not in used)
        self._row_of[namespace] = self._row_of.pop(oldest)
        return self._row_of[namespace], True


class SuffixMemory:
    """Device state, kernels, and the host's book of namespaces.

    Args:
        settings: layout and constants.
        max_num_reqs: request slots.
        device: where the rows live.
        scoring: which rules draft.
        rules: limits of the reference's scoring.
    """

    def __init__(
        self,
        settings: SuffixSettings,
        max_num_reqs: int,
        device: torch.device,
        scoring: Scoring = "learned",
        rules: CountRules | None = None,
    ) -> None:
        self.settings = settings
        self.max_num_reqs = max_num_reqs
        self.device = device
        self.scoring = scoring
        self.rules = rules or CountRules()
        self.state: SuffixState = make_state(settings, max_num_reqs, device)
        self.namespaces = Namespaces()
        self.next_uid = 0
        self._learners = Learners(self.state.learned.shape[0])
        self._staged: dict[int, tuple[int, ...]] = {}
        # Rows of what was learned that go back to the start at `apply_staged`.
        self._unlearned: set[int] = set()
        self._prior = layout.prior().to(device)
        self._no_placeholders = torch.empty(0, dtype=torch.int32, device=device)
        if device.type == "cuda":
            from mrv2_spec.kernels.suffix_cuda import CudaCounts, CudaSuffix

            self._cuda: CudaSuffix | None = CudaSuffix(settings, max_num_reqs, device)
            self._cuda_counts = (
                CudaCounts(settings, self.rules, max_num_reqs, device)
                if scoring == "reference"
                else None
            )
        else:
            self._cuda = None
            self._cuda_counts = None

    def nbytes(self) -> int:
        """Persistent bytes of the state."""
        return self.state.nbytes()

    def reset(self) -> None:
        """Start anew: no requests, nothing remembered, nothing learned."""
        fresh = make_state(self.settings, self.max_num_reqs, "cpu")
        for field in fields(fresh):
            getattr(self.state, field.name).copy_(getattr(fresh, field.name))
        self.namespaces = Namespaces()
        self.next_uid = 0
        self._learners = Learners(self.state.learned.shape[0])
        self._staged.clear()
        self._unlearned.clear()

    def add_request(
        self, slot: int, access: RequestAccess, already_committed: int = 0
    ) -> None:
        """Put a request into a slot; takes effect at `apply_staged`.

        Args:
            slot: request slot; what its last occupant had pending is dropped.
            access: what the request may do.
            already_committed: row length that the memory holds from before a
                preemption, 0 for a new request.
        """
        flags = layout.FLAG_READ * access.read
        flags |= layout.FLAG_CONTRIBUTE * access.contribute
        namespace, number = self.namespaces.count(access.namespace)
        learner, is_new = self._learners.take(slot, namespace)
        if is_new:
            self._unlearned.add(learner)
        fields = (self.next_uid, namespace, flags, number, learner)
        row = [*layout.new_slot(*fields)]
        row[layout.COMMITTED] = already_committed
        self.next_uid += 1
        self._staged[slot] = tuple(row)

    def apply_staged(self) -> None:
        """Write the slots of the requests added since the last call."""
        if not self._staged:
            return
        for learner in sorted(self._unlearned):
            self.state.learned[learner].copy_(self._prior, non_blocking=True)
            self.state.steering[learner].zero_()
            steering = self.state.steering[learner, layout.THRESHOLD]
            steering.fill_(self.settings.first_threshold)
        self._unlearned.clear()
        slots = torch.tensor(list(self._staged), dtype=torch.int64)
        rows = torch.tensor(list(self._staged.values()), dtype=torch.int32)
        self._staged.clear()
        if self.device.type == "cuda":
            slots, rows = slots.pin_memory(), rows.pin_memory()
        self.state.slots.index_copy_(
            0,
            slots.to(self.device, non_blocking=True),
            rows.to(self.device, non_blocking=True),
        )

    def update(
        self,
        token_ids: torch.Tensor,
        idx_mapping: torch.Tensor,
        total_len: torch.Tensor,
        prompt_len: torch.Tensor,
        num_sampled: torch.Tensor,
    ) -> None:
        """Learn from and append what the rows gained; see `update_suffix`."""
        self.apply_staged()
        inputs = (token_ids, idx_mapping, total_len, prompt_len, num_sampled)
        if self._cuda is not None:
            self._cuda.update(self.state, *inputs)
        else:
            update_suffix(self.state, self.settings, *inputs)

    def draft(
        self,
        token_ids: torch.Tensor,
        idx_mapping: torch.Tensor,
        total_len: torch.Tensor,
        prompt_len: torch.Tensor,
        num_sampled: torch.Tensor,
        drafts: torch.Tensor,
        num_drafts: torch.Tensor,
        confidences: torch.Tensor,
        *,
        num_steps: int,
        placeholder_ids: torch.Tensor | None = None,
    ) -> None:
        """Draft for a batch; see `draft_suffix` for the arguments."""
        state, settings = self.state, self.settings
        outputs = (drafts, num_drafts, confidences)
        if self.scoring == "reference":
            rows = (token_ids, idx_mapping, total_len, num_sampled)
            if self._cuda_counts is not None:
                self._cuda_counts.draft(state, *rows, *outputs, num_steps=num_steps)
            else:
                draft_by_counts(
                    state, settings, self.rules, *rows, *outputs, num_steps=num_steps
                )
            return
        inputs = (token_ids, idx_mapping, total_len, prompt_len, num_sampled)
        ids = self._no_placeholders if placeholder_ids is None else placeholder_ids
        if self._cuda is not None:
            self._cuda.draft(state, *inputs, ids, *outputs, num_steps=num_steps)
        else:
            draft_suffix(state, settings, *inputs, ids, *outputs, num_steps=num_steps)

    def purge(self, namespace: Namespace | None = None) -> None:
        """Forget one namespace, or everything; what is forgotten is overwritten.

        Requests that run on start to contribute again from their next tokens.

        Args:
            namespace: the namespace to forget, or None for all of them.
        """
        pages = self.state.pages
        if namespace is None:
            self.state.tokens.zero_()
            pages[:, layout.PAGE_SEQ] = -1
            self.state.table.fill_(-1)
            return
        known = self.namespaces.find(namespace)
        if known is None:
            return
        gone = pages[:, layout.PAGE_NAMESPACE] == known
        self.state.tokens.masked_fill_(gone[:, None], 0)
        pages[:, layout.PAGE_SEQ].masked_fill_(gone, -1)
