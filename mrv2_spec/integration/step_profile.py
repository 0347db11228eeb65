"""Measures at start what steps cost, with and without drafts, or finds it in a file."""

import hashlib
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mrv2_spec.cost_file import CostFileError, Identity, read_costs, write_costs
from mrv2_spec.integration.graphs import no_one_query_graphs
from mrv2_spec.step_costs import CONTEXT_LEN, CostCurve, StepCosts

logger = logging.getLogger("vllm.mrv2_spec")

# The least of so many runs of each size counts.
_REPEATS = 3
# Rows of logits whose cost is measured; between them it is interpolated.
_LOGIT_ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048)


class StepProfile:
    """Yields dummy steps to the runner, and makes curves of their timings.

    Args:
        runner: the model runner, once its graphs are known.
        max_total_logits: the most logits rows of a step.
        cost_file: where the costs are kept, if anywhere.
    """

    def __init__(
        self, runner: Any, max_total_logits: int, cost_file: str | None
    ) -> None:
        self._runner = runner
        self._max_total_logits = max_total_logits
        self._cost_file = cost_file
        self._found: StepCosts | None = None
        self._logits: list[tuple[int, float]] = []
        # (curve, tokens) of each dummy step, in order.
        self._runs: list[tuple[str, int]] = []
        self._graph_sizes: list[int] = []

    def batches(self, capture_sizes: Sequence[int]) -> Iterator[dict[str, int]]:
        """Yield the arguments of dummy steps: one-query graphs, then wider ones.

        Up to the most requests, the dummy requests of a step have one token each. With
        a context, those of wider graphs would each be charged for one, where the drafts
        of a request share it.
        """
        self._runs.clear()
        self._graph_sizes = sorted(capture_sizes)
        self._found = self._on_first_rank(self._read)
        if self._found is not None:
            return
        graph_manager = self._runner.cudagraph_manager
        max_num_reqs = self._runner.max_num_reqs
        sizes = self._sizes()
        # Up to the graph that the most requests are padded to.
        narrow = sizes[: bisect_left(sizes, max_num_reqs) + 1]
        yield from self._run("plain", narrow, max_num_reqs, CONTEXT_LEN)
        yield from self._run("bare", narrow, max_num_reqs, 0)
        with no_one_query_graphs(graph_manager):
            yield from self._run("drafting", sizes, sizes[-1], 0)

    def _sizes(self) -> list[int]:
        # Steps beyond the graphs are measured too: they are launched one by one.
        sizes = list(self._graph_sizes)
        largest = sizes[-1] if sizes else 1
        most = self._runner.max_num_tokens
        while largest < most:
            largest = min(largest * 3 // 2 + 1, most)
            sizes.append(largest)
        return sizes

    def _run(
        self, curve: str, sizes: Sequence[int], most: int, context_len: int
    ) -> Iterator[dict[str, int]]:
        for size in sizes:
            for _ in range(_REPEATS):
                self._runs.append((curve, size))
                yield {"num_tokens": min(size, most), "context_len": context_len}

    def costs(self, samples: Sequence[Any]) -> tuple[StepCosts, list[int]]:
        """Return the costs, the same on all ranks, and the sizes of the graphs.

        Args:
            samples: the runner's timings of the dummy steps, in order.
        """
        if self._found is not None:
            return self._found, self._graph_sizes
        # On all ranks: the projection is a collective operation.
        self._logits = self._time_logits()
        costs: StepCosts = self._on_first_rank(lambda: self._measured(samples))
        return costs, self._graph_sizes

    def _on_first_rank(self, work: Callable[[], Any]) -> Any:
        """Return what one rank finds to all of them."""
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        return group.broadcast_object(work() if group.is_first_rank else None, src=0)

    def _measured(self, samples: Sequence[Any]) -> StepCosts:
        timed: dict[str, list[tuple[int, float]]] = {}
        for (name, num_tokens), sample in zip(self._runs, samples, strict=True):
            timed.setdefault(name, []).append((num_tokens, sample.forward_ms))
        most_graph_tokens = self._graph_sizes[-1] if self._graph_sizes else 0
        rows = CostCurve.of(self._logits, 0)

        def curve(name: str) -> CostCurve:
            forward = CostCurve.of(timed[name], most_graph_tokens)
            return CostCurve(
                forward.tokens, forward.ms + rows(forward.tokens), most_graph_tokens
            )

        costs = StepCosts.of(curve("plain"), curve("drafting"), curve("bare"))
        if self._cost_file is not None:
            try:
                write_costs(self._cost_file, self._identity(), costs, self._graph_sizes)
            except CostFileError as error:
                logger.warning("mrv2-spec: %s; measured again at the next start", error)
        return costs

    def _read(self) -> StepCosts | None:
        if self._cost_file is None:
            return None
        try:
            costs, graph_sizes = read_costs(self._cost_file, self._identity())
        except FileNotFoundError:
            return None
        except CostFileError as error:
            logger.warning("mrv2-spec: %s; measuring anew", error)
            return None
        if graph_sizes != self._graph_sizes:
            logger.warning(
                "mrv2-spec: %s was measured with other graph sizes; measuring anew",
                self._cost_file,
            )
            return None
        return costs

    def _identity(self) -> Identity:
        import vllm

        config = self._runner.vllm_config
        return {
            "gpu": torch.cuda.get_device_name(self._runner.device),
            "vllm": vllm.__version__,
            "model": config.model_config.model,
            "model_config": hashlib.sha256(
                config.model_config.hf_config.to_json_string().encode()
            ).hexdigest()[:16],
            "dtype": str(config.model_config.dtype),
            "quantization": str(config.model_config.quantization),
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "attention": ", ".join(
                sorted(
                    {
                        group.backend.get_name()
                        for groups in self._runner.attn_groups
                        for group in groups
                    }
                )
            ),
            "num_speculative_tokens": config.num_speculative_tokens,
        }

    def _time_logits(self) -> list[tuple[int, float]]:
        """Time what a step does for each row of logits: project, and find the best."""
        runner = self._runner
        model_config = runner.model_config
        timed = []
        for num_rows in _LOGIT_ROWS:
            if num_rows > self._max_total_logits:
                break
            hidden = torch.zeros(
                num_rows,
                model_config.get_hidden_size(),
                dtype=model_config.dtype,
                device=runner.device,
            )

            def rows(hidden: torch.Tensor = hidden) -> None:
                logits = runner.model.compute_logits(hidden)
                if logits is not None:
                    logits.to(torch.float32).argmax(dim=-1)

            timed.append((num_rows, _time(rows)))
        return timed


@torch.inference_mode()
def _time(work: Callable[[], None]) -> float:
    """Return the milliseconds that the device takes for some work."""
    work()
    begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(_REPEATS):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / _REPEATS
