"""Inside each tensor-parallel rank: delays of its own, and checksums of its decisions.

Nothing here waits for the device, which would hide what it looks for: checksums are
made on the device, behind the kernels that they are about, and fetched at the end.
"""

import json
import random
import time
import zlib
from pathlib import Path
from typing import Any

import torch

from grid.worker import GridWorker

# What the tests of identity are made restless by, too.
RESTLESS = Path(__file__).resolve().parents[2] / "tests" / "data" / "restless.json"
# What is noted of every step, by rank: on the device, then on the host.
ON_DEVICE = ("drafts", "real drafts", "confidences", "widths", "boundaries", "sampled")
ON_HOST = ("requests", "rows", "budget", "scheduled", "asleep")
# Odd, so that different values of one place never give the same product.
_FACTOR = 0x9E3779B97F4A7C1
_MOST_STEPS = 8192


class Delays:
    """Makes a rank late, now and then, at random places.

    Args:
        seed: of the rank; every rank has another.
        longest_ms: of one delay; one in fifty is ten times as long.
        device: where work is held up; on the CPU only the host is.
    """

    # Steps of a phase, in half of which the rank is late more often.
    PHASE = 40

    def __init__(self, seed: int, longest_ms: float, device: torch.device) -> None:
        self._rng = random.Random(seed)
        self._longest_ms = longest_ms
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._cycles_per_ms = 0.0
        if self._stream is not None:
            self._cycles_per_ms = _cycles_per_ms()
        self._calls = 0
        self._often = False
        self.host_ms = 0.0
        self.device_ms = 0.0

    def _draw_ms(self) -> float:
        self._calls += 1
        if self._calls % self.PHASE == 0:
            self._often = self._rng.random() < 0.5
        if self._rng.random() > (0.5 if self._often else 0.1):
            return 0.0
        rare = 10.0 if self._rng.random() < 0.02 else 1.0
        return self._rng.random() * self._longest_ms * rare

    def host(self) -> None:
        """Hold up the host, perhaps."""
        ms = self._draw_ms()
        if ms:
            self.host_ms += ms
            time.sleep(ms / 1000)

    def device(self, held_up: Any) -> None:
        """Keep a side stream busy, perhaps, and let a stream wait for it.

        Args:
            held_up: the stream that waits; None: the work only takes up the device.
        """
        ms = self._draw_ms()
        if not ms or self._stream is None:
            return
        self.device_ms += ms
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(ms * self._cycles_per_ms))
        if held_up is not None:
            held_up.wait_stream(self._stream)


def _cycles_per_ms() -> float:
    """Return how many cycles of ``torch.cuda._sleep`` are a millisecond."""
    cycles = 20_000_000
    torch.cuda._sleep(cycles)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / float(begin.elapsed_time(end))


class RanksWorker(GridWorker):
    """Mixed into vLLM's worker."""

    rank: int
    _ranks: "Watch | None" = None

    def ranks_watch(self, seed: int, longest_ms: float) -> None:
        """Begin to note every step, with delays."""
        delays = Delays(seed * 1009 + self.rank, longest_ms, self.device)
        self._ranks = Watch(self.model_runner, delays)

    def ranks_restless(self) -> None:
        """Let drafting fall asleep and wake all the time from now on."""
        from mrv2_spec import policy, step_costs

        restless = json.loads(RESTLESS.read_text())
        for name, value in restless["policy"].items():
            setattr(policy, name, value)
        dear = step_costs.CostCurve.of(restless["ms_by_rows"], 0)
        costs = step_costs.StepCosts.without_contexts(dear, dear)
        self.model_runner.adaptive_verification.policy.use_costs(costs, ())

    def ranks_num_steps(self) -> int:
        """Return the number of steps noted."""
        assert self._ranks is not None
        return self._ranks.num_steps

    def ranks_collect(self) -> dict[str, Any]:
        """Return what was noted."""
        assert self._ranks is not None
        return self._ranks.collect()


class Watch:
    """Notes a rank's steps.

    Args:
        runner: the model runner.
        delays: the rank's own.
    """

    def __init__(self, runner: Any, delays: Delays) -> None:
        self.num_steps = 0
        self._runner = runner
        self._delays = delays
        device = runner.device
        self._sums = torch.zeros(
            _MOST_STEPS, len(ON_DEVICE), dtype=torch.int64, device=device
        )
        spec = runner.speculator
        most = max(spec.draft_tokens.numel(), spec.req_states.max_num_reqs + 1)
        self._weights = torch.arange(1, 2 * most, 2, device=device) * _FACTOR
        self._host: list[list[int]] = []
        self._chosen = (0, 0)
        self._wrap()

    def _wrap(self) -> None:
        runner, delays = self._runner, self._delays
        manager, speculator = runner.adaptive_verification, runner.speculator
        execute, sample = runner.execute_model, runner.sample_tokens
        propose, choose = speculator.propose, manager.choose
        record = manager.record_confidences

        def main_stream() -> Any:
            return torch.cuda.current_stream() if runner.device.type == "cuda" else None

        def late_execute(*args: Any, **kwargs: Any) -> Any:
            delays.host()
            delays.device(None)
            return execute(*args, **kwargs)

        def late_sample(*args: Any, **kwargs: Any) -> Any:
            delays.host()
            delays.device(main_stream())
            delays.device(getattr(runner, "output_copy_stream", None))
            return sample(*args, **kwargs)

        def late_propose(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            delays.host()
            delays.device(main_stream())
            drafts = propose(input_batch, *args, **kwargs)
            if not kwargs.get("dummy_run"):
                self._note(input_batch, args[4], drafts)
            return drafts

        def late_record(*args: Any, **kwargs: Any) -> Any:
            delays.device(main_stream())
            return record(*args, **kwargs)

        def noting_choose(scheduler_output: Any) -> Any:
            budget = choose(scheduler_output)
            drafts = scheduler_output.scheduled_spec_decode_tokens
            self._chosen = (budget, sum(map(len, drafts.values())))
            return budget

        runner.execute_model, runner.sample_tokens = late_execute, late_sample
        speculator.propose, manager.choose = late_propose, noting_choose
        manager.record_confidences = late_record

    @torch.inference_mode()
    def _note(self, input_batch: Any, num_sampled: Any, drafts: Any) -> None:
        if self.num_steps == _MOST_STEPS:
            raise RuntimeError(f"more than {_MOST_STEPS} steps")
        speculator = self._runner.speculator
        num_reqs = input_batch.num_reqs
        slots = input_batch.idx_mapping[:num_reqs]
        confidences = speculator.draft_token_confidence_probs[:num_reqs]
        noted = (
            drafts[:num_reqs],
            speculator.num_valid_drafts_for_trim[slots],
            confidences.contiguous().view(torch.int32),
            input_batch.cu_num_logits[: num_reqs + 1],
            input_batch.query_start_loc[: num_reqs + 1],
            num_sampled[:num_reqs],
        )
        row = self._sums[self.num_steps]
        for place, tensor in enumerate(noted):
            row[place] = self._checksum(tensor)
        names = zlib.crc32("\n".join(input_batch.req_ids).encode())
        policy = self._runner.adaptive_verification.policy
        self._host.append(
            [
                names,
                input_batch.num_tokens_after_padding,
                *self._chosen,
                int(policy.asleep),
            ]
        )
        self.num_steps += 1

    def _checksum(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.reshape(-1).to(torch.int64)
        return (flat * self._weights[: flat.shape[0]]).sum()

    def collect(self) -> dict[str, Any]:
        """Return each step's numbers, those on the device first, and the delays."""
        sums = self._sums[: self.num_steps].tolist()
        return {
            "steps": [a + b for a, b in zip(sums, self._host, strict=True)],
            "host_delay_ms": self._delays.host_ms,
            "device_delay_ms": self._delays.device_ms,
        }
