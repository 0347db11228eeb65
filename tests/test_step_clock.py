"""What the scheduler's clock says of the costs measured at start."""

import pytest

from mrv2_spec.step_clock import StepClock


def run(
    clock: StepClock,
    steps: int,
    ms: float,
    *,
    drafts: bool,
    requests: int = 64,
    expected: float = 10.0,
    now: float = 0.0,
) -> float:
    for _ in range(steps):
        now += ms
        clock.note(now, requests, drafts, expected)
    return now


def test_steps_with_drafts_that_cost_more_than_they_should() -> None:
    clock = StepClock()
    now = run(clock, 20, 11.0, drafts=False)
    assert clock.ratio(64) == 1.0
    run(clock, 20, 15.0, drafts=True, expected=12.0, now=now)
    assert clock.ratio(64) == pytest.approx((15 / 12) / (11 / 10), rel=0.01)
    # Of other numbers of requests nothing is known.
    assert clock.ratio(8) == 1.0
    assert clock.ratio(100) == clock.ratio(64)


def test_too_little_is_nothing() -> None:
    clock = StepClock()
    now = run(clock, 20, 11.0, drafts=False)
    run(clock, 5, 30.0, drafts=True, now=now)
    assert clock.ratio(64) == 1.0


def test_what_waited_or_cannot_be_reckoned_is_left_out() -> None:
    clock = StepClock()
    now = run(clock, 20, 10.0, drafts=False)
    now = run(clock, 20, 12.0, drafts=True, now=now)
    before = clock.ratio(64)
    now = run(clock, 20, 500.0, drafts=True, now=now)
    now = run(clock, 20, 20.0, drafts=True, expected=0.0, now=now)
    for requests in range(65, 100):
        # A batch that changes: the step before was another's.
        now = run(clock, 1, 20.0, drafts=True, requests=requests, now=now)
    assert clock.ratio(64) == before


def test_costs_without_a_unit() -> None:
    # Where nothing could be measured a step is guessed to cost about one.
    clock = StepClock()
    now = run(clock, 20, 20.0, drafts=False, expected=1.0)
    run(clock, 20, 60.0, drafts=True, expected=1.5, now=now)
    assert clock.ratio(64) == pytest.approx(2.0, rel=0.01)


def test_fades_while_the_other_kind_runs() -> None:
    clock = StepClock()
    now = run(clock, 40, 10.0, drafts=False)
    now = run(clock, 40, 30.0, drafts=True, now=now)
    dear = clock.ratio(64)
    now = run(clock, 1000, 10.0, drafts=False, now=now)
    faded = clock.ratio(64)
    assert 1.5 < faded < dear - 0.5
    run(clock, 20000, 10.0, drafts=False, now=now)
    assert clock.ratio(64) == pytest.approx(1.0, abs=0.01)
