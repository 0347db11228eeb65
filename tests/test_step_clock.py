"""What the scheduler's clock says of the costs measured at start."""

import numpy as np
import pytest

from mrv2_spec.kernels.value_drafts import ROUNDS, TALLY_WIDTH, bin_edges
from mrv2_spec.policy import DraftPolicy
from mrv2_spec.step_clock import CostRatios, StepClock, StepKind
from mrv2_spec.step_costs import CostCurve, StepCosts


def run(
    clock: StepClock,
    steps: int,
    ms: float,
    *,
    drafts: bool = False,
    places: bool = False,
    requests: int = 64,
    expected: float = 10.0,
    plain: float = 10.0,
    waited: bool = False,
    now: float = 0.0,
) -> float:
    kind = StepKind.PLACES if places else StepKind.PLAIN
    kind = StepKind.DRAFTS if drafts else kind
    for _ in range(steps):
        now += ms
        clock.note(now, requests, kind, expected, plain, waited)
    return now


def test_steps_with_drafts_that_cost_more_than_they_should() -> None:
    clock = StepClock()
    now = run(clock, 20, 11.0, drafts=False)
    assert clock.ratios(64, True).drafts == 1.0
    run(clock, 20, 15.0, drafts=True, expected=12.0, now=now)
    assert clock.ratios(64, True).drafts == pytest.approx(
        (15 / 12) / (11 / 10), rel=0.01
    )
    # Of quite other numbers of requests nothing is known.
    assert clock.ratios(8, True).drafts == 1.0
    for near in (32, 63, 100, 128, 255):
        assert clock.ratios(near, True).drafts == clock.ratios(64, True).drafts


def test_a_few_long_steps_say_nothing_of_the_others() -> None:
    # As the first ones do, which compile, and those in which a host looks elsewhere.
    clock, now = StepClock(), 0.0
    for i in range(9):
        now = run(clock, 1, 60.0 if i == 1 else 12.0, drafts=True, now=now)
    for i in range(40):
        now = run(clock, 1, 35.0 if i % 5 == 0 else 10.0, drafts=False, now=now)
    assert clock.ratios(64, True).drafts == pytest.approx(1.2, rel=0.02)


def test_a_shrinking_batch_goes_by_what_the_larger_one_told() -> None:
    clock = StepClock()
    now = run(clock, 20, 10.0, drafts=False, requests=130)
    now = run(clock, 20, 13.0, drafts=True, requests=130, now=now)
    assert clock.ratios(100, True).drafts == pytest.approx(1.3, rel=0.01)
    # By its own steps as soon as it has some, beside plain ones of the larger.
    run(clock, 20, 15.0, drafts=True, requests=100, now=now)
    assert clock.ratios(100, True).drafts == pytest.approx(1.5, rel=0.02)
    assert clock.ratios(130, True).drafts == pytest.approx(1.3, rel=0.02)


def test_places_that_nobody_verifies_are_a_kind_of_their_own() -> None:
    clock = StepClock()
    now = run(clock, 20, 13.0, places=True)
    # Beside plain steps that nobody saw.
    assert clock.ratios(64, True) == CostRatios()
    now = run(clock, 20, 10.0, now=now)
    now = run(clock, 20, 18.0, drafts=True, expected=15.0, now=now)
    ratios = clock.ratios(64, True)
    assert ratios.places == pytest.approx(1.3, rel=0.01)
    assert ratios.drafts == pytest.approx(1.2, rel=0.01)
    # A host that was busier while drafting slept: places never bring anything.
    run(clock, 40, 20.0, now=now)
    assert clock.ratios(64, True).places == 1.0


def test_drafts_that_the_host_is_too_slow_for() -> None:
    clock = StepClock()
    now = run(clock, 20, 10.0)
    # The device waits in all of them: nobody knows what it would take.
    now = run(clock, 20, 15.0, drafts=True, expected=12.0, waited=True, now=now)
    assert clock.ratios(64, True) == CostRatios(
        drafts=pytest.approx(1.0, rel=0.01), host=pytest.approx(1.5, rel=0.02)
    )
    # Larger budgets, for which it is busy: a tenth dearer than they should be.
    now = run(clock, 16, 22.0, drafts=True, expected=20.0, now=now)
    assert clock.ratios(64, True) == CostRatios(
        drafts=pytest.approx(1.1, rel=0.01), host=pytest.approx(1.5, rel=0.02)
    )
    # A few accidents among those are none of the host's doing.
    for _ in range(4):
        now = run(clock, 9, 22.0, drafts=True, expected=20.0, now=now)
        now = run(clock, 1, 50.0, drafts=True, expected=20.0, waited=True, now=now)
    assert clock.ratios(64, True).host == 0.0


def test_plain_steps_that_the_host_is_too_slow_for() -> None:
    clock = StepClock()
    now = run(clock, 20, 13.0, waited=True)
    now = run(clock, 20, 15.6, drafts=True, expected=11.0, waited=True, now=now)
    # What the device has to do for drafts costs nothing until the host is done.
    assert clock.ratios(64, True) == CostRatios(
        drafts=pytest.approx(1 / 1.3, rel=0.01), host=pytest.approx(1.2, rel=0.01)
    )


def test_what_the_host_takes_does_not_grow_with_contexts() -> None:
    clock = StepClock()
    now = run(clock, 20, 13.0, waited=True)
    now = run(clock, 20, 15.6, drafts=True, expected=11.0, waited=True, now=now)
    # Contexts grew: a plain step should take as long as the host does, and more.
    run(clock, 1, 21.0, drafts=True, expected=21.0, plain=20.0, now=now)
    ratios = clock.ratios(64, True)
    assert ratios.drafts == pytest.approx(1.0, rel=0.01)
    assert ratios.host == pytest.approx(15.6 / 20.0, rel=0.01)


def test_a_larger_batch_is_compared_with_its_own_costs() -> None:
    def told_of_a_larger_batch() -> tuple[StepClock, float]:
        clock = StepClock()
        now = run(clock, 32, 12.0, requests=300, waited=True)
        now = run(
            clock, 32, 15.0, drafts=True, requests=300, expected=11.0, waited=True,
            now=now,
        )  # fmt: skip
        return clock, now

    clock, _ = told_of_a_larger_batch()
    assert clock.ratios(140, True).host == pytest.approx(1.25, rel=0.02)
    # Of half the batch those with drafts become known, and plain ones are not.
    clock, now = told_of_a_larger_batch()
    run(
        clock, 12, 7.5, drafts=True, requests=140, expected=5.5, plain=5.0,
        waited=True, now=now,
    )  # fmt: skip
    assert clock.ratios(140, True).host == pytest.approx(1.25, rel=0.02)
    # And the other way round.
    clock, now = told_of_a_larger_batch()
    run(clock, 12, 6.0, requests=140, expected=5.0, plain=5.0, waited=True, now=now)
    assert clock.ratios(140, True).host == pytest.approx(1.25, rel=0.02)


def test_host_and_device_keep_their_relation_however_old_plain_steps_are() -> None:
    clock = StepClock()
    now = run(clock, 20, 15.0, waited=True)
    now = run(clock, 20, 15.0, drafts=True, expected=12.0, waited=True, now=now)
    fresh = clock.ratios(64, True)
    run(clock, 5000, 15.0, drafts=True, expected=12.0, waited=True, now=now)
    late = clock.ratios(64, True)
    assert fresh.host == pytest.approx(1.0, rel=0.01)
    assert late.host / late.drafts == pytest.approx(fresh.host / fresh.drafts)
    # They may have become cheaper.
    assert max(late.host, late.drafts) == pytest.approx(1.25, rel=0.01)


def test_so_they_do_while_no_plain_step_was_seen() -> None:
    clock = StepClock()
    now = run(clock, 20, 15.0, drafts=True, expected=12.0, waited=True)
    ratios = clock.ratios(64, True)
    assert ratios.host == pytest.approx(1.5 * 1.25, rel=0.01)
    assert ratios.host / ratios.drafts == pytest.approx(1.5)
    run(clock, 1200, 15.0, drafts=True, expected=12.0, waited=True, now=now)
    ratios = clock.ratios(64, True)
    assert ratios.host == pytest.approx(1.0)
    assert ratios.host / ratios.drafts == pytest.approx(1.5)


def test_a_host_that_is_late_now_and_then_is_not_what_steps_wait_for() -> None:
    clock = StepClock()
    now = run(clock, 32, 10.0)
    for _ in range(20):
        now = run(clock, 2, 12.0, drafts=True, expected=12.0, now=now)
        now = run(clock, 1, 20.0, drafts=True, expected=12.0, waited=True, now=now)
    assert clock.ratios(64, True).host == 0.0
    now = run(clock, 32, 10.0, now=now)
    # Late in two of three steps, more or less: the median of all is what it takes.
    for _ in range(10):
        now = run(clock, 2, 12.0, drafts=True, expected=11.0, now=now)
        now = run(clock, 2, 14.0, drafts=True, expected=11.0, waited=True, now=now)
        now = run(clock, 2, 20.0, drafts=True, expected=11.0, waited=True, now=now)
    assert clock.ratios(64, True).host == pytest.approx(1.4, rel=0.05)


def test_the_device_takes_no_longer_than_the_steps_that_it_waits_in() -> None:
    # Costs that are far too high, and costs without a unit.
    clock = StepClock()
    now = run(clock, 20, 4.0, waited=True)
    run(clock, 20, 6.0, drafts=True, expected=20.0, waited=True, now=now)
    ratios = clock.ratios(64, True)
    assert ratios.drafts == pytest.approx(6 / 20 / (4 / 10), rel=0.02)
    assert ratios.host == pytest.approx(1.5, rel=0.02)
    clock = StepClock()
    now = run(clock, 20, 20.0, expected=1.0, plain=1.0, waited=True)
    run(clock, 20, 30.0, drafts=True, expected=1.2, plain=1.0, waited=True, now=now)
    ratios = clock.ratios(64, False)
    assert ratios.drafts == pytest.approx(1.0, rel=0.02)
    assert ratios.host == pytest.approx(1.5, rel=0.02)


def test_too_little_is_nothing() -> None:
    clock = StepClock()
    now = run(clock, 20, 11.0, drafts=False)
    run(clock, 5, 30.0, drafts=True, now=now)
    assert clock.ratios(64, True).drafts == 1.0


def test_what_waited_or_cannot_be_reckoned_is_left_out() -> None:
    clock = StepClock()
    now = run(clock, 20, 10.0, drafts=False)
    now = run(clock, 20, 12.0, drafts=True, now=now)
    before = clock.ratios(64, True).drafts
    now = run(clock, 20, 500.0, drafts=True, now=now)
    now = run(clock, 20, 20.0, drafts=True, expected=0.0, now=now)
    for requests in range(65, 100):
        # A batch that changes: the step before was another's.
        now = run(clock, 1, 20.0, drafts=True, requests=requests, now=now)
    assert clock.ratios(64, True).drafts == before


def test_costs_without_a_unit() -> None:
    # Where nothing could be measured a step is guessed to cost about one.
    clock = StepClock()
    now = run(clock, 20, 20.0, drafts=False, expected=1.0)
    run(clock, 20, 60.0, drafts=True, expected=1.5, now=now)
    assert clock.ratios(64, False).drafts == pytest.approx(2.0, rel=0.03)


def test_plain_steps_not_seen_yet_are_doubted() -> None:
    # Only if costs were measured: else they say nothing of milliseconds.
    clock = StepClock()
    now = run(clock, 20, 15.0, drafts=True, expected=12.0)
    assert clock.ratios(64, True).drafts == pytest.approx(15 / 12 * 1.25, rel=0.02)
    assert clock.ratios(64, False).drafts == 1.0
    now = run(clock, 4, 13.0, drafts=False, now=now)
    assert clock.ratios(64, True).drafts == pytest.approx(15 / 12 * 1.25, rel=0.02)
    run(clock, 4, 13.0, drafts=False, now=now)
    # They, too, were dearer.
    assert clock.ratios(64, True).drafts == pytest.approx(
        (15 / 12) / (13 / 10), rel=0.01
    )


def test_drafting_that_costs_less_than_it_should_is_doubted_too() -> None:
    clock = StepClock()
    run(clock, 20, 9.0, drafts=True, expected=12.0)
    assert clock.ratios(64, True).drafts == pytest.approx(1.25, rel=0.02)


def test_the_doubt_fades_where_no_plain_step_ever_tells() -> None:
    clock = StepClock()
    now = run(clock, 20, 14.4, drafts=True, expected=12.0)
    assert clock.ratios(64, True).drafts == pytest.approx(1.2 * 1.25, rel=0.02)
    # A prompt in every step.
    now = run(clock, 500, 20.0, drafts=False, expected=0.0, now=now)
    assert 1.1 < clock.ratios(64, True).drafts < 1.3
    run(clock, 600, 20.0, drafts=False, expected=0.0, now=now)
    assert clock.ratios(64, True).drafts == 1.0


def decode(
    policy: DraftPolicy,
    clock: StepClock,
    tally: np.ndarray,
    steps: int,
    times: dict[StepKind, float],
    now: float = 0.0,
) -> tuple[int, float]:
    """Let 120 requests decode, each step so many times as long as it should take.

    Returns:
        The steps that verified drafts, and what the clock says then.
    """
    verifying = 0
    for _ in range(steps):
        policy.cost_ratios = clock.ratios(120, True)
        policy.observe(tally)
        if asleep := policy.asleep:
            budget = 0
            policy.pass_by(120, 120, 4096)
        else:
            budget = policy.choose(120, 120, 120 * 4, 4096)
        kind = StepKind.DRAFTS if budget else StepKind.PLACES
        kind = StepKind.PLAIN if asleep else kind
        expected = policy.cost_of(120, budget)
        now += expected * times[kind]
        clock.note(now, 120, kind, expected, policy.cost_of(120, 0), False)
        verifying += budget > 0
    return verifying, now


@pytest.mark.parametrize(
    ("plain_ms", "drafting_ms", "pays"),
    [
        # As they should be; twice as dear, both, as with long contexts; a host that
        # cannot keep up with what drafts take, scheduled or verified; and short
        # contexts, which make plain steps cheaper by more than those with drafts.
        (1.0, 1.0, True),
        (2.0, 2.0, True),
        (1.0, 1.25, False),
        (0.8, 1.0, False),
    ],
)
def test_drafting_goes_on_where_the_clock_says_that_it_pays(
    plain_ms: float, drafting_ms: float, pays: bool
) -> None:
    linear = CostCurve.of([(1, 4.6), (16384, 4.6 + 0.0228 * 16384)], 0)
    policy = DraftPolicy(StepCosts.without_contexts(linear, linear), True)
    # A tenth of the requests has a draft of one place, and nearly all come true.
    tally = np.zeros(TALLY_WIDTH, np.int32)
    tally[[0, ROUNDS]] = 12, 120
    times = {
        StepKind.DRAFTS: drafting_ms, StepKind.PLACES: drafting_ms,
        StepKind.PLAIN: plain_ms,
    }  # fmt: skip
    verifying, _ = decode(policy, StepClock(), tally, 1000, times)
    assert (verifying > 900) if pays else (verifying < 100), verifying


@pytest.mark.parametrize("paying", [300, 3000])
@pytest.mark.parametrize("faster", [1.0, 1.3])
def test_drafting_stops_where_it_loses_however_long_it_paid(
    paying: int, faster: float
) -> None:
    # Where plain steps were told of by a host that was slower then, too.
    linear = CostCurve.of([(1, 4.6), (16384, 4.6 + 0.0228 * 16384)], 0)
    policy = DraftPolicy(StepCosts.without_contexts(linear, linear), True)
    clock, now, verifying = StepClock(), 0.0, 0
    for share, steps in ((0.02, 140), (1.5, paying), (0.3, 4000)):
        host = faster if share == 0.02 else 1.0
        tally = np.zeros(TALLY_WIDTH, np.int32)
        tally[[0, ROUNDS]] = int(120 * share), 120
        times = {
            StepKind.DRAFTS: 1.25 * host, StepKind.PLACES: 1.1 * host,
            StepKind.PLAIN: host,
        }  # fmt: skip
        verifying, now = decode(policy, clock, tally, steps, times, now)
        if share == 1.5:
            assert verifying > 0.7 * paying
    assert verifying < (1000 if faster == 1.0 else 2000), verifying


def test_a_host_that_is_the_limit_makes_larger_budgets_the_better_ones() -> None:
    # Places worth less than a row costs, from the 40th on: free while the host is busy.
    linear = CostCurve.of([(n, 4.0 + 0.02 * n) for n in (1, 16384)], 0)
    tally = np.zeros(TALLY_WIDTH, np.int32)
    for value, places in ((0.9, 40), (0.25, 160)):
        tally[sum(value < edge for edge in bin_edges())] += places
    tally[ROUNDS] = 100
    budgets = []
    for host_ms in (0.0, 8.0, 9.0, 12.0):
        policy = DraftPolicy(StepCosts.without_contexts(linear, linear), False)
        policy.cost_ratios = CostRatios(host=host_ms / policy.cost_of(100, 0))
        for _ in range(20):
            policy.observe(tally)
        budgets.append(policy.choose(100, 100, 1600, 4096))
    assert budgets == [
        pytest.approx(40, rel=0.2),
        pytest.approx(100, rel=0.2),
        pytest.approx(150, rel=0.2),
        # More than all drafts together are good for.
        0,
    ]


def test_fades_while_the_other_kind_runs() -> None:
    clock = StepClock()
    now = run(clock, 40, 10.0, drafts=False)
    now = run(clock, 40, 30.0, drafts=True, now=now)
    dear = clock.ratios(64, True).drafts
    now = run(clock, 400, 10.0, drafts=False, now=now)
    faded = clock.ratios(64, True).drafts
    assert 1.5 < faded < dear - 0.5
    run(clock, 20000, 10.0, drafts=False, now=now)
    assert clock.ratios(64, True).drafts == pytest.approx(1.0, abs=0.01)


def test_what_few_steps_told_fades_sooner() -> None:
    # As the first ones of an engine, which took far too long; then drafting slept.
    left = []
    for steps in (8, 32):
        clock = StepClock()
        now = run(clock, steps, 28.0, drafts=True)
        run(clock, 300, 10.0, drafts=False, now=now)
        left.append(clock.ratios(64, True).drafts)
    assert left[0] < 1.3 < 1.6 < left[1]


def test_a_kind_that_comes_back_is_learned_anew() -> None:
    clock = StepClock()
    now = run(clock, 32, 28.0, drafts=True)
    now = run(clock, 200, 10.0, drafts=False, now=now)
    now = run(clock, 8, 12.0, drafts=True, now=now)
    assert clock.ratios(64, True).drafts == pytest.approx(1.2, rel=0.02)
    # Not one that was away for a moment.
    now = run(clock, 50, 10.0, drafts=False, now=now)
    run(clock, 1, 30.0, drafts=True, now=now)
    assert clock.ratios(64, True).drafts == pytest.approx(1.2, rel=0.05)
