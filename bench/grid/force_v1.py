"""Forces recorded texts on vLLM's V1 runner, in the benchmark only.

V1 takes no custom logits processor beside speculation, so the runner's ``_sample`` is
wrapped: it has the logits of the step, and the runner knows their positions.
"""

from typing import Any

import torch

from grid.force import TRAJECTORY_ARG, Followers, Process, followers, force


def install() -> None:
    """Wrap ``GPUModelRunner._sample`` of V1 in this process."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner._sample

    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        if logits is not None and Process.trajectories is not None:
            _force(self, logits, spec_decode_metadata)
        return original(self, logits, spec_decode_metadata)

    GPUModelRunner._sample = _sample


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
