"""What is timed in an engine's process, and what else is noted of each step."""

import sys
from typing import Any

from grid.stopwatch import Stopwatch

# (name, depth): what is timed, in the order of a table. Depth 0 is what a step of the
# engine consists of; what is deeper lies within the one above it. Some rows are of one
# runner only. Where V1 does not schedule ahead, it waits for the device in
# ``bookkeeping``.
ROWS = (
    ("schedule", 0),
    ("execute_model", 0),
    ("choose", 1),
    ("without_drafts", 1),
    ("update_requests", 1),
    ("gather_state", 1),
    ("prepare_inputs", 1),
    ("compact_batch", 2),
    ("reallocate_drafts", 2),
    ("prepare_attn", 1),
    ("attn_metadata", 1),
    ("replay_graph", 1),
    ("model_forward", 1),
    ("sample_tokens", 0),
    ("sample", 1),
    ("async_output", 1),
    ("postprocess", 1),
    ("bookkeeping", 1),
    ("propose", 1),
    ("draft", 2),
    ("value_drafts", 2),
    ("book_counts", 2),
    ("record_confidences", 1),
    ("set_drafts", 1),
    ("get_output", 0),
    ("event_wait", 1),
    ("update_from_output", 0),
    ("process_outputs", 0),
)
TOP = tuple(name for name, depth in ROWS if depth == 0)
# V1's methods by the names above.
V1 = (
    ("update_requests", "_update_states"),
    ("prepare_inputs", "_prepare_inputs"),
    ("attn_metadata", "_build_attention_metadata"),
    ("model_forward", "_model_forward"),
    ("sample", "_sample"),
    ("bookkeeping", "_bookkeeping_sync"),
    ("propose", "propose_draft_token_ids"),
)
# The outputs of steps that the scheduler does not wait for, of V2 and of V1.
OUTPUTS = (
    ("vllm.v1.worker.gpu.async_utils", "AsyncOutput"),
    ("vllm.v1.worker.gpu_model_runner", "AsyncGPUModelRunnerOutput"),
)
# What this project adds on the host beside its hooks' own time.
OURS = ("propose", "compact_batch", "reallocate_drafts", "record_confidences")
# Where this project replaces functions that every step calls.
HOOKS = (
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "execute_model"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "sample_tokens"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "sample"),
    ("vllm.v1.worker.gpu.async_utils", "AsyncOutput", "__init__"),
    ("vllm.v1.worker.gpu.async_utils", "AsyncOutput", "get_output"),
    ("vllm.v1.core.sched.scheduler", "Scheduler", "update_from_output"),
    (
        "vllm.v1.core.sched.async_scheduler",
        "AsyncScheduler",
        "_update_after_schedule",
    ),
)


class Watches:
    """Times an engine that runs in this process.

    Args:
        engine: an ``LLMEngine`` whose scheduler and worker are in this process.

    Attributes:
        facts: what is noted of the step in progress: ``graph``, ``drafting`` (requests
            with scheduled drafts) and, with a trimmer, ``budget``.
    """

    def __init__(self, engine: Any) -> None:
        self.facts: dict[str, Any] = {}
        self._watch = Stopwatch()
        core = engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        self._watch_hooks()
        self._watch_engine(engine, core)
        self._watch_runner(runner)
        self._note_steps(runner)

    def _watch_hooks(self) -> None:
        for module, owner, attribute in HOOKS:
            if module in sys.modules:
                self._watch.watch_hook(
                    f"{owner}.{attribute}",
                    getattr(sys.modules[module], owner),
                    attribute,
                )
        widths = sys.modules.get("mrv2_spec.integration.widths")
        self._watch.watch("without_drafts", widths, "_without_drafts")

    def _watch_engine(self, engine: Any, core: Any) -> None:
        import torch

        watch = self._watch.watch
        watch("schedule", core.scheduler, "schedule")
        watch("update_from_output", core.scheduler, "update_from_output")
        watch("process_outputs", engine.output_processor, "process_outputs")
        for module, name in OUTPUTS:
            output = getattr(sys.modules.get(module), name, None)
            watch("get_output", output, "get_output")
            watch("async_output", output, "__init__")
        if torch.cuda.is_available():
            watch("event_wait", torch.cuda.Event, "synchronize")

    def _watch_runner(self, runner: Any) -> None:
        watch = self._watch.watch
        for name, attribute in V1:
            watch(name, runner, attribute)
        watch("execute_model", runner, "execute_model")
        watch("update_requests", runner, "update_requests")
        watch("gather_state", runner, "gather_batch_req_state")
        watch("prepare_inputs", runner, "prepare_inputs")
        watch("prepare_attn", runner, "prepare_attn")
        model_state = getattr(runner, "model_state", None)
        watch("attn_metadata", model_state, "prepare_attn")
        graphs = getattr(runner, "cudagraph_manager", None)
        watch("replay_graph", graphs, "run_fullgraph")
        watch("sample_tokens", runner, "sample_tokens")
        watch("sample", runner, "sample")
        watch("postprocess", runner, "postprocess_sampled")
        handler = getattr(runner, "draft_tokens_handler", None)
        watch("set_drafts", handler, "set_draft_tokens")
        speculator = getattr(runner, "speculator", None)
        watch("propose", speculator, "propose")
        watch("draft", speculator, "draft")
        watch("value_drafts", getattr(speculator, "draft_values", None), "update")
        watch("book_counts", getattr(speculator, "counters", None), "book")
        manager = getattr(runner, "adaptive_verification", None)
        for name in (
            "choose", "compact_batch", "reallocate_drafts", "record_confidences"
        ):  # fmt: skip
            watch(name, manager, name)

    def _note_steps(self, runner: Any) -> None:
        facts = self.facts
        for holder in ("cudagraph_manager", "cudagraph_dispatcher"):
            graphs = getattr(runner, holder, None)
            if hasattr(graphs, "dispatch"):
                self._note_graphs(graphs)
        execute = runner.execute_model

        def noting_execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            facts["drafting"] = len(scheduler_output.scheduled_spec_decode_tokens)
            return execute(scheduler_output, *args, **kwargs)

        self._watch.put(runner, "execute_model", noting_execute)
        manager = getattr(runner, "adaptive_verification", None)
        choose = getattr(manager, "choose", None)
        if choose is not None:

            def noting_choose(*args: Any, **kwargs: Any) -> Any:
                facts["budget"] = budget = choose(*args, **kwargs)
                return budget

            self._watch.put(manager, "choose", noting_choose)

    def _note_graphs(self, graphs: Any) -> None:
        facts, dispatch = self.facts, graphs.dispatch

        def noting_dispatch(*args: Any, **kwargs: Any) -> Any:
            found = dispatch(*args, **kwargs)
            # V1 returns the mode beside the batch.
            mode, batch = found if isinstance(found, tuple) else (found.cg_mode, found)
            width = getattr(batch, "max_query_len", None)
            facts["graph"] = (mode.name, batch.num_tokens, width)
            return found

        self._watch.put(graphs, "dispatch", noting_dispatch)

    def take(self) -> tuple[dict[str, int], dict[str, Any]]:
        """Return the last step's nanoseconds by name, and its facts."""
        facts = dict(self.facts)
        self.facts.clear()
        return self._watch.take(), facts

    def close(self) -> None:
        """Leave the engine as it was."""
        self._watch.close()
