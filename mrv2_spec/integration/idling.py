"""Spares a step in which nothing is drafted what a speculator costs the runner.

While drafting sleeps, most steps neither verify drafts nor make any. vLLM's runner
asks its speculator all the same, marks every draft place as empty, stores the places
and reads them back: a few launches for nothing, which a batch of many requests feels
where the host is the limit. For such a step the runner gets no speculator to ask.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mrv2_spec.integration.patching import Patch


def _nothing_to_draft(runner: Any, row_speculator: Any) -> bool:
    """Tell whether the step in progress has no drafts, and none will be made in it."""
    state = runner.execute_model_state
    return (
        state is not None
        and isinstance(runner.speculator, row_speculator)
        and state.input_batch.num_draft_tokens == 0
        # A grammar's drafts travel to the scheduler, and so does that there are none.
        and not state.input_batch.has_structured_output_reqs
        and runner.adaptive_verification is not None
        and runner.speculator.passes_by(
            state.num_spec_tokens_to_schedule, state.input_batch.idx_mapping_np
        )
    )


@contextmanager
def _without_speculator(runner: Any) -> Iterator[None]:
    speculator, num_steps = runner.speculator, runner.num_speculative_steps
    runner.speculator, runner.num_speculative_steps = None, 0
    try:
        yield
    finally:
        runner.speculator, runner.num_speculative_steps = speculator, num_steps


def _wrap_sample_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    # It imports of vLLM what is there once the runner is.
    from mrv2_spec.speculator import RowSpeculator

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        if not _nothing_to_draft(self, RowSpeculator):
            return original(self, grammar_output)
        input_batch = self.execute_model_state.input_batch
        with _without_speculator(self):
            output = original(self, grammar_output)
        # What the runner tells of a step without drafts.
        none = self.speculator.draft_tokens[: input_batch.num_reqs, :0]
        self.draft_tokens_handler.set_draft_tokens(input_batch, none)
        # Steps count, whether they bring anything or not.
        self.adaptive_verification.record_confidences(None, input_batch)
        return output

    return sample_tokens


PATCHES = (
    Patch(
        "GPUModelRunner.sample_tokens",
        (("self", "grammar_output"),),
        _wrap_sample_tokens,
    ),
)
