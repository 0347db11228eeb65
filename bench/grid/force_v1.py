"""Forces recorded texts on vLLM's V1 runner, in the benchmark only.

V1 takes no custom logits processor beside speculation, so the runner's ``_sample`` is
wrapped: it has the logits of the step, and the runner knows their positions. It also
knows which drafts the step verifies, which are counted: vLLM's own metrics count what
was scheduled, and V1 drops the places that ``ngram_gpu`` did not fill after that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grid.force import TRAJECTORY_ARG, Followers, Process, followers, force


@dataclass(slots=True)
class Verified:
    """What the steps of this process have verified; one engine a process.

    With asynchronous scheduling this has the steps too that were on their way for
    requests that had just ended.

    Attributes:
        verified: drafts.
        rounds: requests of all steps, but for those whose prompt a step was for.
        rounds_with_draft: those of them that had drafts.
    """

    verified: int = 0
    rounds: int = 0
    rounds_with_draft: int = 0

    def add(self, num_decoding: int, num_drafts: Sequence[int]) -> None:
        """Count a step.

        Args:
            num_decoding: its requests that were past their prompts.
            num_drafts: each request's drafts; empty where no request had any.
        """
        self.rounds += num_decoding
        self.verified += sum(num_drafts)
        self.rounds_with_draft += sum(number > 0 for number in num_drafts)


VERIFIED = Verified()


def install() -> None:
    """Wrap ``GPUModelRunner._sample`` of V1 in this process."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner._sample

    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        if self.speculative_config is not None:
            _count(self.input_batch, spec_decode_metadata)
        if logits is not None and Process.trajectories is not None:
            _force(self, logits, spec_decode_metadata)
        return original(self, logits, spec_decode_metadata)

    GPUModelRunner._sample = _sample


def _count(batch: Any, spec_decode_metadata: Any) -> None:
    n = batch.num_reqs
    decoding = batch.num_computed_tokens_cpu[:n] >= batch.num_prompt_tokens[:n]
    drafts = spec_decode_metadata.num_draft_tokens if spec_decode_metadata else ()
    VERIFIED.add(int(decoding.sum()), drafts)


def _force(runner: Any, logits: torch.Tensor, spec_decode_metadata: Any) -> None:
    assert Process.trajectories is not None
    of_batch = followers(runner.max_num_reqs, logits.device)
    _follow(runner, of_batch)
    # [num_reqs], one past each request's last row
    ends = runner.query_start_loc.gpu[1 : runner.input_batch.num_reqs + 1]
    if spec_decode_metadata is None:
        rows = ends - 1
    else:
        rows = spec_decode_metadata.logits_indices.to(ends.dtype)
    batch_idx = torch.searchsorted(ends, rows, right=True)
    force(
        logits,
        batch_idx,
        runner.positions[rows],
        of_batch.numbers,
        Process.trajectories,
    )


def _follow(runner: Any, of_batch: Followers) -> None:
    """Note the trajectories by batch index; free while the batch is the same."""
    req_ids = runner.input_batch.req_ids
    if getattr(runner, "_grid_req_ids", None) == req_ids:
        return
    runner._grid_req_ids = list(req_ids)
    for i, req_id in enumerate(req_ids):
        params = runner.requests[req_id].sampling_params
        number = (params.extra_args or {}).get(TRAJECTORY_ARG, -1)
        of_batch.stage(i, number)
    of_batch.flush()
