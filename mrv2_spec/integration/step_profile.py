"""Measures at start what steps cost, with and without drafts."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mrv2_spec.integration.graphs import widest_only
from mrv2_spec.step_costs import CostCurve, StepCosts

# Medians are taken of so many runs of each size.
_REPEATS = 3
# Tokens already computed for each request of a measured step. More context makes every
# step dearer, and drafts pay more than was reckoned.
_CONTEXT_LEN = 512
# Rows of logits whose cost is measured; between them it is interpolated.
_LOGIT_ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048)


class StepProfile:
    """Yields dummy steps to the runner, and makes curves of their timings.

    Args:
        runner: the model runner, once its graphs are known.
        max_total_logits: the most logits rows of a step.
    """

    def __init__(self, runner: Any, max_total_logits: int) -> None:
        self._runner = runner
        self._max_total_logits = max_total_logits
        # (plain, tokens) of each dummy step, in order.
        self._runs: list[tuple[bool, int]] = []
        self._graph_sizes: list[int] = []

    def batches(self, capture_sizes: Sequence[int]) -> Iterator[dict[str, int]]:
        """Yield the arguments of dummy steps: one-query graphs, then the widest."""
        self._runs.clear()
        self._graph_sizes = sorted(capture_sizes)
        graph_manager = self._runner.cudagraph_manager
        max_num_reqs = self._runner.max_num_reqs
        sizes = self._sizes()
        yield from self._run([n for n in sizes if n <= max_num_reqs], plain=True)
        with widest_only(graph_manager):
            yield from self._run(sizes, plain=False)

    def _sizes(self) -> list[int]:
        # Steps beyond the graphs are measured too: they are launched one by one.
        sizes = list(self._graph_sizes)
        largest = sizes[-1] if sizes else 1
        most = self._runner.max_num_tokens
        while largest < most:
            largest = min(largest * 3 // 2 + 1, most)
            sizes.append(largest)
        return sizes

    def _run(self, sizes: Sequence[int], *, plain: bool) -> Iterator[dict[str, int]]:
        for num_tokens in sizes:
            for _ in range(_REPEATS):
                self._runs.append((plain, num_tokens))
                yield {"num_tokens": num_tokens, "context_len": _CONTEXT_LEN}

    def costs(self, samples: Sequence[Any]) -> tuple[StepCosts, list[int]]:
        """Return the costs, the same on all ranks, and the sizes of the graphs.

        Args:
            samples: the runner's timings of the dummy steps, in order.
        """
        from vllm.distributed.parallel_state import get_tp_group

        timed = [
            (plain, num_tokens, sample.forward_ms)
            for (plain, num_tokens), sample in zip(self._runs, samples, strict=True)
        ]
        timed, logits = get_tp_group().broadcast_object(
            (timed, self._time_logits()), src=0
        )
        most_graph_tokens = self._graph_sizes[-1] if self._graph_sizes else 0
        max_num_reqs = self._runner.max_num_reqs

        def curve(points: list[tuple[int, float]]) -> CostCurve:
            forward = CostCurve.of(points, most_graph_tokens)
            rows = CostCurve.of(logits, 0)
            return CostCurve(
                forward.tokens, forward.ms + rows(forward.tokens), most_graph_tokens
            )

        drafting = [(n, ms) for plain, n, ms in timed if not plain]
        plain = [(n, ms) for plain, n, ms in timed if plain]
        plain += [(n, ms) for n, ms in drafting if n > max_num_reqs]
        return StepCosts(curve(plain), curve(drafting)), self._graph_sizes

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
