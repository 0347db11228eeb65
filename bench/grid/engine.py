"""One arm's engine, and how rounds of requests are put through it."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grid.arms import Arm
from grid.force import TRAJECTORY_ARG
from grid.measure import IN_FORCE, Round
from grid.shapes import Shape, engine_args
from grid.workloads import Item

_SECONDS_TO_REST = 0.1


class Mismatch(RuntimeError):
    """An engine said something else than its trajectory."""


class GridEngine:
    """A running engine.

    Args:
        arm: what drafts.
        shape: the model's shape.
        model: its configuration's folder.
        kv_gib: the KV cache's size.
        trim_explain: whether this project's trimmer tells the log what it does.
        forced: whether the model is made to say recorded texts; otherwise it says what
            it likes, to the same lengths.
    """

    def __init__(
        self,
        arm: Arm,
        shape: Shape,
        model: Path,
        kv_gib: float,
        trim_explain: bool = False,
        forced: bool = True,
    ) -> None:
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.llm_engine import LLMEngine

        self.arm = arm
        self.max_num_seqs: int = shape.engine["max_num_seqs"]
        args = {**engine_args(shape, model, kv_gib), **arm.engine_args(trim_explain)}
        self._forced = forced
        self.said: dict[int, list[int]] = {}
        self.in_force: dict[str, Any] = {}
        if not forced:
            args.pop("logits_processors", None)
        self.engine = LLMEngine.from_engine_args(EngineArgs(**args))
        self._params = SamplingParams
        self._kind = RequestOutputKind.FINAL_ONLY
        self._number = 0
        self._round = Round(0.0)
        self._watch()

    def _watch(self) -> None:
        """Note what every step brings as it arrives from the engine's process."""
        client = self.engine.engine_core
        get_output = client.get_output

        def noting() -> Any:
            outputs = get_output()
            new = {
                int(output.request_id.partition("-")[0]): len(output.new_token_ids)
                for output in outputs.outputs
                if output.new_token_ids
            }
            if new:
                self._round.steps.append((outputs.timestamp, new))
            stats = getattr(outputs.scheduler_stats, "spec_decoding_stats", None)
            if stats is not None:
                self._round.draft_tokens += stats.num_draft_tokens
                self._round.accepted_tokens += stats.num_accepted_tokens
            return outputs

        client.get_output = noting

    def _scheduler(self, method: str, *args: Any) -> None:
        client = self.engine.engine_core
        if hasattr(client, "call_utility"):
            client.call_utility(method, *args)
        else:
            getattr(client.engine_core, method)(*args)

    def describe(self) -> dict[str, Any]:
        """Return what is in force in the engine's process, and note it.

        Raises:
            RuntimeError: it is not what the arm stands for.
        """
        described: dict[str, Any] = self.engine.collective_rpc("grid_describe")[0]
        why_not = self.arm.why_not_as_meant(described)
        if why_not is not None:
            raise RuntimeError(why_not)
        self.in_force = {name: described[name] for name in IN_FORCE}
        return described

    def measure_costs(self) -> dict[str, Any] | None:
        """Let a trimmed engine measure its costs again; return what its worker says."""
        if not (self.arm.kind.plugin and self.arm.kind.trimmed):
            return None
        costs: dict[str, Any] | None
        costs = self.engine.collective_rpc("grid_measure_costs")[0]
        return costs

    def round(self, items: list[Item]) -> Round:
        """Let requests start together, run them out, and check what they ``said``.

        Raises:
            Mismatch: an output is not its trajectory.
        """
        outputs = [item.output for item in items]
        lens = [len(item.prompt) for item in items]
        if self._forced:
            self.engine.collective_rpc("grid_load", args=(outputs, lens))
        # With async scheduling a step more is on its way for requests that just ended,
        # as after a warm lesson with many drafts: its time is none of this round's.
        time.sleep(_SECONDS_TO_REST)
        # Queued while the scheduler is paused: all are there when it goes on.
        self._scheduler("pause_scheduler", "keep", False)
        for i, item in enumerate(items):
            self.engine.add_request(
                str(i),
                {"prompt_token_ids": item.prompt},
                self._params(
                    temperature=0.0,
                    max_tokens=len(item.output),
                    ignore_eos=True,
                    detokenize=False,
                    extra_args={TRAJECTORY_ARG: i},
                    output_kind=self._kind,
                ),
            )
        self._round = Round(time.monotonic(), sum(lens))
        self._scheduler("resume_scheduler")
        self.said = {}
        while self.engine.has_unfinished_requests():
            for output in self.step():
                self.said[int(output.request_id)] = list(output.outputs[0].token_ids)
        if self._forced:
            _check(items, self.said)
        return self._round

    def step(self) -> list[Any]:
        """Let the engine go on; return the requests that finished."""
        finished: list[Any] = self.engine.step()
        return finished

    def forget(self) -> None:
        """Forget finished replies, where the arm remembers any, and prefix caches."""
        deadline = time.monotonic() + 5
        # With async scheduling a step may still be on its way.
        while not self.engine.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise RuntimeError("the prefix cache was not reset: requests still run")
            time.sleep(0.02)
        self.forget_replies()

    def forget_replies(self) -> None:
        """Forget finished replies, where the arm remembers any."""
        kind = self.arm.kind
        if not kind.memory:
            return
        if kind.plugin:
            from mrv2_spec.integration import purge_memory

            purge_memory(self.engine)
        elif not any(self.engine.collective_rpc("grid_forget")):
            raise RuntimeError("this engine keeps no replies that could be forgotten")

    def counters(self) -> dict[str, int]:
        """Return what was verified, with this plugin its counters and kinds of steps.

        Nothing without drafts, nor for vLLM's own drafters on V2.
        """
        if self.arm.k and self.arm.kind.runner == "v1":
            verified: dict[str, int] = self.engine.collective_rpc("grid_verified")[0]
            return verified
        if not self.arm.kind.plugin:
            return {}
        from mrv2_spec.integration import read_counters

        totals = read_counters(self.engine)
        if totals is None:
            return {}
        steps: dict[str, int] = self.engine.collective_rpc("grid_steps")[0]
        return {**asdict(totals), **steps}

    def stop(self) -> None:
        """End the engine's process."""
        self.engine.engine_core.shutdown()


def _check(items: list[Item], said: dict[int, list[int]]) -> None:
    for i, item in enumerate(items):
        got = said.get(i)
        if got == item.output:
            continue
        if got is None:
            raise Mismatch(f"request {i} of {len(items)} gave no output")
        pairs = zip(got, item.output, strict=False)
        shared = min(len(got), len(item.output))
        place = next((j for j, (a, b) in enumerate(pairs) if a != b), shared)
        raise Mismatch(
            f"request {i} of {len(items)}, output token {place}: said "
            f"{got[place : place + 3]}, its trajectory has "
            f"{item.output[place : place + 3]} ({len(got)} and {len(item.output)} "
            "tokens in all)"
        )
