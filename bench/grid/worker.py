"""Calls that the benchmark makes into the engine's worker, by ``collective_rpc``."""

from dataclasses import asdict
from typing import Any

import torch
import vllm.envs as envs

from grid.force import Process, Trajectories
from grid.forced_budgets import ForcedBudgets
from grid.steps_seen import StepsSeen

if not envs.VLLM_USE_V2_MODEL_RUNNER:
    # Loaded in the engine's process before its runner is built.
    from grid import force_v1

    force_v1.install()


class GridWorker:
    """Mixed into vLLM's worker."""

    device: Any
    model_runner: Any
    _grid_steps: StepsSeen | None = None
    _grid_counted: Any = None
    _grid_forced: ForcedBudgets | None = None

    def grid_load(self, outputs: list[list[int]], prompt_lens: list[int]) -> None:
        """Take the texts of the next run."""
        Process.trajectories = Trajectories(outputs, prompt_lens, self.device)
        if self._grid_steps is not None:
            self._grid_steps.begin_round()

    def grid_forget(self) -> bool:
        """Forget finished replies in vLLM's own suffix decoding; tell if it runs."""
        drafter = getattr(self.model_runner, "drafter", None)
        cache = getattr(drafter, "suffix_cache", None)
        if drafter is None or cache is None:
            return False
        drafter.suffix_cache = type(cache)(
            max_tree_depth=cache.max_tree_depth,
            max_cached_requests=cache.max_cached_requests,
        )
        return True

    def grid_steps(self) -> dict[str, int]:
        """Return what kinds of steps this project's trimmer has seen; none without it.

        Returns:
            What :class:`grid.steps_seen.StepsSeen` counts.
        """
        manager = getattr(self.model_runner, "adaptive_verification", None)
        if not hasattr(manager, "policy"):
            return {}
        if self._grid_steps is None:
            self._grid_steps = StepsSeen(manager)
        return dict(self._grid_steps.counts)

    def grid_verified(self) -> dict[str, int]:
        """Return what V1's steps have verified so far."""
        from grid import force_v1

        return asdict(force_v1.VERIFIED)

    def grid_count(self, counted: bool) -> None:
        """Count drafts or leave it: nothing else is switched off by this."""
        from mrv2_spec.integration import counting

        if self._grid_counted is None:
            self._grid_counted = counting._counted
        counting._counted = self._grid_counted if counted else lambda runner: None

    def grid_force_budgets(self, budgets: list[int], block: int) -> None:
        """Verify so many places in a step, until :meth:`grid_free_budgets`."""
        self._grid_forced = ForcedBudgets(self.model_runner, budgets, block)

    def grid_free_budgets(self) -> list[dict[str, float]]:
        """Let the trimmer choose again; return what steps took until now."""
        assert self._grid_forced is not None
        return self._grid_forced.stop()

    def grid_measure_costs(self) -> dict[str, Any] | None:
        """Measure what steps cost once more, now that no other engine is starting.

        Returns:
            ``words`` about the costs; ``curves``, (tokens, ms) by the name of each; and
            ``max_graph_tokens``, up to which graphs are replayed. None for an engine
            that measures none.
        """
        runner = self.model_runner
        manager = getattr(runner, "adaptive_verification", None)
        sizes = runner.cudagraph_manager.captured_token_counts()
        if not hasattr(manager, "policy") or not sizes:
            return None
        with runner.step_timing.collect() as timings:
            for batch in manager.batches_to_profile(sizes):
                runner._dummy_run(**batch)
        costs, graph_sizes = manager.profile.costs(timings)
        manager.policy.use_costs(costs, graph_sizes)
        curves = {
            name: list(zip(curve["tokens"].tolist(), curve["ms"].tolist(), strict=True))
            for name, curve in asdict(costs).items()
        }
        return {
            "words": costs.describe(),
            "curves": curves,
            "max_graph_tokens": costs.drafting.max_graph_tokens,
        }

    def grid_describe(self) -> dict[str, Any]:
        """Return what is in force, for the log."""
        config = self.model_runner.vllm_config
        sizes = config.compilation_config.cudagraph_capture_sizes or ()
        return {
            "runner": type(self.model_runner).__module__,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "capture_sizes": len(sizes),
            "graph_mib": _graph_mib(),
            "device": self.device.type,
        }


def _graph_mib() -> float | None:
    """Return the memory that CUDA graphs hold, of this process alone; None without."""
    if not torch.cuda.is_available():
        return None
    segments = torch.cuda.memory_snapshot()
    # The allocator's own pool has the id (0, 0), each graph pool another.
    held = [
        segment["total_size"]
        for segment in segments
        if tuple(segment["segment_pool_id"]) != (0, 0)
    ]
    return float(sum(held)) / 2**20
