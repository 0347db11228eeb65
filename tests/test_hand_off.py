"""Masks and drafts that come late, come short, or come from another step."""

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.v1.core.sched.output")

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import DraftTokenIds

from mrv2_spec.integration import hand_off

# What vLLM 0.32 and 0.33 tell of their masks.
BY_WIDTH = SimpleNamespace(mask_stride=5, num_bonus_tokens=1)
BY_STRIDE = SimpleNamespace(mask_stride=5)


def masks(num_rows: int, passed: list[int] | None) -> GrammarOutput:
    """Return masks of two words whose rows are numbered."""
    rows = np.arange(1, num_rows + 1, dtype=np.int32)[:, None].repeat(2, axis=1)
    return GrammarOutput(["a", "b"], rows, passed)


@pytest.mark.parametrize(
    ("masks_of", "rows"), [(BY_WIDTH, [3, 1]), (BY_STRIDE, [5] * 2)]
)
def test_rows_that_are_due(masks_of: Any, rows: list[int]) -> None:
    batch = SimpleNamespace(
        req_ids=["b", "free", "a"], num_draft_tokens_per_req=np.array([0, 4, 2])
    )
    found = hand_off._mask_rows(masks_of, batch, masks(0, None))
    assert found == rows
    batch.num_draft_tokens_per_req = None
    if masks_of is BY_WIDTH:
        assert hand_off._mask_rows(masks_of, batch, masks(0, None)) == [1, 1]


@pytest.mark.parametrize("passed", [[4, 2], None])
def test_complete_masks_are_passed_on_as_they_are(passed: list[int] | None) -> None:
    output = masks(10, passed)
    assert hand_off.completed(output, [5, 5]) is output


@pytest.mark.parametrize(
    ("num_rows", "passed", "want"),
    [
        (9, [4, 2], [4, 0]),
        (5, [4, 2], [4, 0]),
        (4, [4, 2], [0, 0]),
        (0, [4, 2], [0, 0]),
        (7, None, [0, 0]),
        (10, [3], [3, 0]),
        (10, [], [0, 0]),
        # Too many: nobody can say whose they are.
        (11, [4, 2], [0, 0]),
    ],
)
def test_no_draft_passes_without_its_masks(
    num_rows: int, passed: list[int] | None, want: list[int]
) -> None:
    output = masks(num_rows, passed)
    found = hand_off.completed(output, [5, 5])
    assert found.num_acceptable_drafts == want
    assert found.grammar_bitmask.shape == (10, 2)
    assert found.grammar_bitmask.dtype == np.int32
    there = min(num_rows, 10)
    assert (found.grammar_bitmask[:there] == output.grammar_bitmask[:there]).all()
    # A row that is missing rules nothing out: the grammar is asked about its token.
    assert (found.grammar_bitmask[there:] == -1).all()
    assert output.num_acceptable_drafts == passed


class Scheduler:
    """Notes the drafts that reach it."""

    def __init__(self, served: bool) -> None:
        spec_config = SimpleNamespace(method="ngram" if served else "eagle")
        self.vllm_config = SimpleNamespace(
            speculative_config=spec_config,
            use_v2_model_runner=True,
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        )
        self.requests: dict[str, Any] = {}
        self.got: list[Any] = []

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Take drafts."""
        self.got.append(draft_token_ids)


@pytest.mark.parametrize("served", [True, False])
def test_drafts_of_the_step_that_was_taken_in(served: bool) -> None:
    scheduler, runner = Scheduler(served), SimpleNamespace()
    schedule = hand_off._wrap_after_schedule(lambda self, step: None)
    take_in = hand_off._wrap_update(lambda self, step, output: {})
    hand_over = hand_off._wrap_hand_over(Scheduler.update_draft_token_ids)
    execute = hand_off._wrap_execute(lambda self, step: None)
    sample = hand_off._wrap_sample_tokens(lambda self, grammar_output: object())
    take = hand_off._wrap_take(lambda self: DraftTokenIds(["a"], [[1]]))

    def new_step(num_tokens: int = 1) -> Any:
        step = SimpleNamespace(
            total_num_scheduled_tokens=num_tokens, has_structured_output_requests=False
        )
        schedule(scheduler, step)
        execute(runner, step)
        return step

    first = new_step()
    sample(runner, None)
    # The next step has begun, and one without tokens is taken in meanwhile.
    second = new_step()
    take_in(scheduler, first, None)
    take_in(scheduler, new_step(0), None)
    due = take(runner)
    hand_over(scheduler, due)
    assert scheduler.got == [due]
    execute(runner, second)
    sample(runner, None)
    # Too early, then in time; what was due before is late by then.
    hand_over(scheduler, take(runner))
    assert len(scheduler.got) == (1 if served else 2)
    take_in(scheduler, second, None)
    hand_over(scheduler, take(runner))
    assert len(scheduler.got) == (2 if served else 3)
    hand_over(scheduler, due)
    assert len(scheduler.got) == (2 if served else 4)


def test_numbers_survive_the_way_to_another_process() -> None:
    for sent in (SchedulerOutput.make_empty(), DraftTokenIds(["a"], [[1]])):
        setattr(sent, hand_off.STEP, 7)
        assert getattr(pickle.loads(pickle.dumps(sent)), hand_off.STEP) == 7


def test_only_requests_that_wait_for_no_step_lose_their_places() -> None:
    def request(grammar: bool, in_flight: int) -> Any:
        return SimpleNamespace(
            use_structured_output=grammar,
            num_output_placeholders=in_flight,
            spec_token_ids=[-1, -1],
        )

    requests = {
        "idle": request(True, 0),
        "in a step": request(True, 3),
        "free": request(False, 0),
    }
    hand_off._leave_out_unjudged(requests, [*requests, "gone"])
    assert [len(r.spec_token_ids) for r in requests.values()] == [0, 2, 2]
