"""What can go wrong between the scheduler, the grammars and the worker.

Put in place for a whole run; ``["fault", name]`` among a job's actions switches one on
and ``["fault", None]`` all off.
"""

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

# A grammar that passes every check and then cannot be compiled has this in it.
POISON = "poison"


def compile_no_poison(original: Any) -> Any:
    """Return a backend's ``compile_grammar`` that fails on such a grammar."""

    def compile_grammar(
        backend: Any, request_type: Any, grammar_spec: str, *args: Any, **kwargs: Any
    ) -> Any:
        if POISON in grammar_spec:
            raise RuntimeError("this grammar cannot be compiled")
        return original(backend, request_type, grammar_spec, *args, **kwargs)

    return compile_grammar


@dataclasses.dataclass
class Faults:
    """Which fault is on, and how often it struck."""

    active: str | None = None
    struck: dict[str, int] = dataclasses.field(default_factory=dict)

    def switch(self, name: str | None) -> None:
        """Switch one on, or all off."""
        self.active = name

    def strike(self, *names: str) -> str | None:
        """Return the fault that is on if it is one of these, and count it."""
        if self.active not in names:
            return None
        assert self.active is not None
        self.struck[self.active] = self.struck.get(self.active, 0) + 1
        return self.active

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put all of them in place."""
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.executor.uniproc_executor import UniProcExecutor
        from vllm.v1.structured_output.backend_guidance import GuidanceBackend
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        with ExitStack() as stack:
            for owner, name, wrap in (
                (UniProcExecutor, "take_draft_token_ids", self._take_drafts),
                (Scheduler, "get_grammar_bitmask", self._grammar_masks),
                (Scheduler, "update_from_output", self._step_counts),
                (GuidanceBackend, "compile_grammar", compile_no_poison),
                (XgrammarBackend, "compile_grammar", compile_no_poison),
            ):
                original = getattr(owner, name)
                stack.enter_context(mock.patch.object(owner, name, wrap(original)))
            yield

    def _take_drafts(self, original: Any) -> Any:
        earlier: list[Any] = [None]

        def take_draft_token_ids(executor: Any) -> Any:
            taken = original(executor)
            before, earlier[0] = earlier[0], copy.deepcopy(taken)
            match self.strike("lost", "empty", "stranger's", "late"):
                case "lost":
                    return None
                case "empty":
                    return dataclasses.replace(taken, req_ids=[], draft_token_ids=[])
                case "stranger's":
                    taken.req_ids = [f"not {req_id}" for req_id in taken.req_ids]
                case "late":
                    return before
            return taken

        return take_draft_token_ids

    def _grammar_masks(self, original: Any) -> Any:
        def get_grammar_bitmask(scheduler: Any, scheduler_output: Any) -> Any:
            output = original(scheduler, scheduler_output)
            if output is None:
                return None
            match self.strike("one mask", "no counts", "few counts"):
                case "one mask":
                    output.grammar_bitmask = output.grammar_bitmask[:1]
                case "no counts":
                    output.num_acceptable_drafts = None
                case "few counts":
                    output.num_acceptable_drafts = []
            return output

        return get_grammar_bitmask

    def _step_counts(self, original: Any) -> Any:
        from mrv2_spec.integration.counting import STEP_COUNTS

        def update_from_output(scheduler: Any, step: Any, output: Any) -> Any:
            if hasattr(output, STEP_COUNTS) and self.strike("no step counts"):
                delattr(output, STEP_COUNTS)
            return original(scheduler, step, output)

        return update_from_output
