"""Budgets by value, and when drafting sleeps."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from mrv2_spec.kernels.value_drafts import (
    ROUNDS,
    TALLY_WIDTH,
    TOKENS,
    bin_edges,
)
from mrv2_spec.policy import DraftPolicy
from mrv2_spec.speculator import looks
from mrv2_spec.step_clock import CostRatios
from mrv2_spec.step_costs import CostCurve, StepCosts

GRAPHS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
K = 16


def costs(base: float, row: float, surcharge: float = 0.0) -> StepCosts:
    """Return linear costs, padded to the graphs."""

    def curve(base: float) -> CostCurve:
        return CostCurve.of([(n, base + row * n) for n in (*GRAPHS, 2048)], 512)

    return StepCosts.without_contexts(curve(base), curve(base + surcharge))


def tally(num_requests: int, values: Sequence[float], share: float = 1.0) -> np.ndarray:
    """Return a step's tally where a share of the drafts has places of such values."""
    counts = np.zeros(TALLY_WIDTH, np.int32)
    counts[ROUNDS] = counts[TOKENS] = num_requests
    for value in values:
        counts[sum(value < edge for edge in bin_edges())] += round(share * num_requests)
    return counts


def policy(costs: StepCosts, may_sleep: bool = True) -> DraftPolicy:
    made = DraftPolicy(costs, may_sleep)
    made.use_costs(costs, GRAPHS)
    return made


def settle(made: DraftPolicy, num_requests: int, tallies: np.ndarray) -> int:
    for _ in range(200):
        made.observe(tallies)
    return made.choose(num_requests, num_requests, num_requests * K, 4096)


def test_nothing_is_verified_that_costs_more_than_it_brings() -> None:
    # 64 requests: a step costs 6.06 ms and 0.0228 a row; a place pays from 0.25 on.
    made = policy(costs(4.6, 0.0228))
    assert settle(made, 64, tally(64, [0.2, 0.04])) == 0
    made = policy(costs(4.6, 0.0228))
    assert settle(made, 64, tally(64, [0.9, 0.04])) == 64


def test_few_requests_verify_what_many_do_not() -> None:
    values = [0.3, 0.1, 0.03]
    few = settle(policy(costs(4.6, 0.0228)), 1, tally(1, values))
    many = settle(policy(costs(4.6, 0.0228)), 256, tally(256, values))
    assert few >= 3 and many == 0


def test_budgets_fill_graphs() -> None:
    made = policy(costs(4.6, 0.0228))
    budget = settle(made, 40, tally(40, [0.95, 0.9, 0.8]))
    assert 40 + budget in GRAPHS and budget >= 88


def test_a_size_that_a_library_is_slow_at_is_passed_over(rng: random.Random) -> None:
    # As on an H200, where 448 rows take 16.4 ms and 480 take 12.9.
    sizes = [1, 2, 4, 8, *range(16, 513, 16)]
    for round_ in range(60):
        n = rng.choice([16, 48, 100])
        # Of every third batch few drafts are worth anything: budgets are small.
        most, kept = (0.4, 0.3) if round_ % 3 == 0 else (1.0, 1.0)
        drawn = [most * rng.random() for _ in range(K) if rng.random() < kept]
        values = sorted(drawn, reverse=True)
        ms = {size: (4.6 + 0.0228 * size) * rng.choice([1, 1, 1.5]) for size in sizes}
        measured = CostCurve.of([*ms.items(), (4096, 100.0)], sizes[-1])
        costs = StepCosts.without_contexts(measured, measured)
        made = DraftPolicy(costs, may_sleep=True)
        made.use_costs(costs, sizes)
        for _ in range(50):
            made.observe(tally(n, values))
        budget = made.choose(n, n, n * K, sizes[-1] - n)
        rates = {}
        for size in (size for size in sizes if size > n):
            whole, part = divmod(size - n, n)
            worth = n * sum(values[:whole]) + part * sum(values[whole : whole + 1])
            rates[size - n] = (n + worth) / ms[size]
        rates[0] = n / ms[next(size for size in sizes if size >= n)]
        # Values are known by bins.
        assert rates[budget] > 0.95 * max(rates.values()), (n, values, ms)


def test_a_batch_on_a_slow_size_takes_a_larger_one() -> None:
    # 112 rows take half as long again as 128: a batch padded to 112 drafts to 128 even
    # if hardly anything comes of it.
    sizes = [1, 16, 96, 112, 128, 256]
    ms = {size: 4.6 + 0.0228 * size for size in sizes} | {112: 10.7}
    measured = CostCurve.of([*ms.items(), (4096, 100.0)], 256)
    made = DraftPolicy(StepCosts.without_contexts(measured, measured), may_sleep=True)
    made.use_costs(StepCosts.without_contexts(measured, measured), sizes)
    for _ in range(50):
        made.observe(tally(100, [0.1]))
        assert made.choose(100, 100, 100 * K, 4096) == 28
    assert not made.asleep
    assert made.gain == pytest.approx((100 + 2.8) / ms[128] * ms[112] / 100, rel=0.02)


def test_a_size_that_was_measured_too_dear_stops_no_drafts() -> None:
    sizes = [16, 64, 80, 96, 128, 256]
    right = {size: 4.6 + 0.0228 * size for size in sizes}
    plain = CostCurve.of([*right.items(), (4096, 100.0)], 256)
    dear = CostCurve.of([*(right | {64: 9.0}).items(), (4096, 100.0)], 256)
    costs = StepCosts.of(plain, dear, plain)
    made = DraftPolicy(costs, may_sleep=True)
    made.use_costs(costs, sizes)
    for _ in range(200):
        made.observe(tally(64, [0.5, 0.3]))
        budget = made.choose(64, 64, 64 * K, 4096)
    assert budget == 64 and not made.asleep


def test_beside_prompts_that_are_slow_by_themselves_drafts_count_as_free() -> None:
    ms = [(n, 4.6 + 0.0228 * n) for n in (*GRAPHS, 2048)]
    dear = dict(ms) | {128: 40.0}
    measured = CostCurve.of(list(dear.items()), 512)
    made = policy(StepCosts.without_contexts(measured, measured))
    for _ in range(50):
        made.observe(tally(16, [0.9]))
    # 112 tokens of a prompt: with 128 tokens the step takes 40 ms, with 256 a quarter.
    budget = made.choose(128, 16, 16 * K, 4096)
    assert budget >= 128
    # What its decodes alone would gain, if drafts cost them nothing.
    assert made.gain == pytest.approx(1.9, rel=0.05)


def test_prompts_in_a_step_make_its_drafts_no_cheaper(rng: random.Random) -> None:
    # Beyond the first rows every token costs the same: the best budget of a step is
    # that of its decodes alone, however many prompt tokens it has.
    base, row = 4.6, rng.uniform(0.01, 0.05)
    linear = CostCurve.of([(n, base + row * n) for n in (1, 16384)], 0)
    values = sorted((rng.random() for _ in range(4)), reverse=True)
    seen = tally(48, values)
    budgets = []
    for prompt_tokens in (0, 40, 2000, 8000):
        made = DraftPolicy(StepCosts.without_contexts(linear, linear), False)
        for _ in range(200):
            made.observe(seen)
        budgets.append(made.choose(48 + prompt_tokens, 48, 48 * K, 4096))
    assert len(set(budgets)) == 1, (row, values, budgets)


def test_prompts_are_charged_what_their_rows_cost_beside_drafts() -> None:
    # In wide graphs rows cost four times as much, and the prompt's rows with them: they
    # are the same with a budget and without.
    plain = CostCurve.of([(n, 4.6 + 0.005 * n) for n in (1, 16384)], 0)
    wide = CostCurve.of([(n, 4.6 + 0.02 * n) for n in (1, 16384)], 0)
    gains = []
    for prompt_tokens in (0, 4000):
        made = DraftPolicy(StepCosts.without_contexts(plain, wide), False)
        for _ in range(50):
            made.observe(tally(64, [0.9]))
        made.choose(64 + prompt_tokens, 64, 64 * K, 4096)
        gains.append(made.gain)
    assert gains[0] == pytest.approx(gains[1])


@pytest.mark.parametrize("host", [0.0, 1.2, 1.3])
@pytest.mark.parametrize("drafts", [0.5, 0.7, 1.0])
def test_beside_prompts_the_device_waits_for_no_host(
    host: float, drafts: float
) -> None:
    # A prompt of 1000 tokens takes it far longer than what the host takes: no row of a
    # draft is free, and only those are verified that pay for theirs.
    linear = CostCurve.of([(n, 4.0 + 0.02 * n) for n in (1, 16384)], 0)
    made = DraftPolicy(StepCosts.without_contexts(linear, linear), False)
    seen = np.zeros(TALLY_WIDTH, np.int32)
    for value, places in ((0.9, 40), (0.05, 400)):
        seen[sum(value < edge for edge in bin_edges())] += places
    seen[ROUNDS] = 100
    for _ in range(50):
        made.observe(seen)
    made.cost_ratios = CostRatios(drafts=drafts, host=host)
    # Beside decodes alone they are free, up to what the host takes.
    free = max(host * made.cost_of(100, 0) / drafts - made.cost_of(100, 40), 0.0) / 0.02
    beside = made.choose(1100, 100, 100 * K, 4096)
    assert beside <= 60
    if free > 40:
        assert made.choose(100, 100, 100 * K, 4096) >= 40 + 0.5 * free


def test_a_few_steps_of_large_gain_do_not_decide() -> None:
    # One step in six gains tenfold: by itself that would be a mean of 2.5.
    made = woken_in_vain()
    for _ in range(100):
        made.gain = 10.0
        made._maybe_wake(256)
        for _ in range(5):
            made.gain = 1.0
            made._maybe_wake(256)
        assert made.asleep


def test_small_batches_that_come_and_go_wake_it(rng: random.Random) -> None:
    made = woken_in_vain()
    num_requests = 4
    for step in range(400):
        if step % 4 == 0:
            num_requests = min(max(num_requests + rng.choice((-1, 0, 1)), 1), 7)
        made.observe(tally(num_requests, [0.9, 0.8]))
        made.pass_by(num_requests, num_requests, K * num_requests)
        if not made.asleep:
            break
    assert not made.asleep


def test_prompts_do_not_wake_drafting_that_does_not_pay() -> None:
    made = policy(costs(4.6, 0.0228))
    settle(made, 256, tally(256, [0.1, 0.03]))
    for _ in range(100):
        made.choose(256, 256, 256 * K, 4096)
    assert made.asleep
    for _ in range(100):
        made.pass_by(8000, 256, 4096)
    assert made.asleep


def test_best_of_all_budgets(rng: random.Random) -> None:
    # Against trying every budget, without graphs to round to.
    base, row = 4.6, rng.uniform(0.005, 0.05)
    num_requests = rng.randint(20, 200)
    values = sorted((rng.random() for _ in range(4)), reverse=True)
    linear = CostCurve.of([(n, base + row * n) for n in (1, 4096)], 0)
    made = DraftPolicy(StepCosts.without_contexts(linear, linear), False)
    budget = settle(made, num_requests, tally(num_requests, values))

    def rate(drafts: int) -> float:
        worth = sum(
            value * min(max(drafts - i * num_requests, 0), num_requests)
            for i, value in enumerate(values)
        )
        return (num_requests + worth) / (base + row * (num_requests + drafts))

    best = max(rate(b) for b in range(num_requests * len(values) + 1))
    # Values are known to within half a bin.
    assert rate(budget) >= 0.93 * best, (num_requests, row, values, budget)


def test_a_surcharge_must_be_earned() -> None:
    values = tally(256, [0.9])
    assert settle(policy(costs(4.6, 0.001)), 256, values) == 256
    assert settle(policy(costs(4.6, 0.001, surcharge=5.0)), 256, values) == 0


def test_drafts_read_no_context_of_their_own() -> None:
    # Rows cost 0.005 ms, a request's context 0.02: a place pays from 0.05 on, where one
    # charged for a context would need 0.26.
    base, row, context = 4.6, 0.005, 0.02
    plain = CostCurve.of([(n, base + (row + context) * n) for n in (1, 4096)], 0)
    rows = CostCurve.of([(n, base + row * n) for n in (1, 4096)], 0)
    values = tally(64, [0.15, 0.02])
    made = DraftPolicy(StepCosts(plain, rows, rows), False)
    assert 60 <= settle(made, 64, values) <= 76
    assert made.cost_of(64, 64) == pytest.approx(base + 128 * row + 64 * context)
    assert made.cost_of(64, 0) == pytest.approx(base + 64 * (row + context))
    # Eight times the context: places gain less of a longer step, and still gain.
    made.context_ratio = 8.0
    assert made.cost_of(64, 0) == pytest.approx(base + 64 * (row + 8 * context))
    gain = made.gain
    assert made.choose(64, 64, 64 * K, 4096) >= 60
    assert made.gain > gain
    # Beyond sixteen times, nobody knows.
    made.context_ratio = 100.0
    assert made.cost_of(64, 0) == pytest.approx(base + 64 * (row + 16 * context))
    made = DraftPolicy(StepCosts(plain, plain, plain), False)
    assert settle(made, 64, values) == 0


def test_steps_that_were_dearer_than_reckoned() -> None:
    values = tally(64, [0.6] * 3)
    made = policy(costs(4.6, 0.0228))
    assert settle(made, 64, values) > 0
    assert made.gain > 1.05
    made.cost_ratios = CostRatios(drafts=2.0)
    assert made.choose(64, 64, 64 * K, 4096) == 0


def test_places_that_are_there_already_are_not_paid_for_again() -> None:
    values = tally(64, [0.6] * 3)
    made = policy(costs(4.6, 0.0228))
    budget = settle(made, 64, values)
    gain = made.gain
    assert budget > 0 and 1.1 < gain < 1.9
    # Nearly all that drafts cost more than they should are their places.
    made.cost_ratios = CostRatios(drafts=2.0, places=1.9)
    assert made.choose(64, 64, 64 * K, 4096) == budget
    assert made.gain == pytest.approx(gain / 2)
    # As many steps as it takes, and it leaves them out.
    for _ in range(100):
        made.choose(64, 64, 64 * K, 4096)
    assert made.asleep


def test_places_that_bring_nothing_put_drafting_to_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of the steps gain a tenth: that pays if places cost nothing."""
    # A step's values are not those of the mean.
    monkeypatch.setattr("mrv2_spec.policy._MIN_STEPS_AVERAGED", 1)
    monkeypatch.setattr("mrv2_spec.policy._MAX_STEPS_AVERAGED", 1)
    pays, nothing = tally(64, [0.6] * 3), tally(64, [])
    asleep = {}
    for places in (1.0, 1.2):
        made = policy(costs(4.6, 0.0228))
        made.cost_ratios = CostRatios(drafts=places, places=places)
        for step in range(200):
            made.observe(pays if step % 2 else nothing)
            made.choose(64, 64, 64 * K, 4096)
        asleep[places] = made.asleep
    assert asleep == {1.0: False, 1.2: True}


def test_costs_of_steps() -> None:
    made = policy(costs(4.0, 0.5, surcharge=1.0))
    assert made.cost_of(64, 0) == 4 + 32
    # Padded to the graph of 128.
    assert made.cost_of(64, 10) == 5 + 64


def test_bounds() -> None:
    made = policy(costs(4.6, 0.0001))
    settle(made, 8, tally(8, [0.99] * K))
    assert made.choose(8, 8, 8 * K, 5) == 5
    assert made.choose(8, 8, 3, 4096) == 3
    assert made.choose(8, 8, 8 * K, 0) == 0
    assert made.choose(8, 8, 8 * K, -3) == 0


def test_the_first_steps_are_verified_where_that_is_free() -> None:
    made = policy(costs(4.6, 0.0228))
    assert made.choose(2, 2, 2 * K, 4096) == 14
    assert made.choose(40, 40, 40 * K, 4096) == 0
    # Nothing was sampled: still nothing is known.
    made.observe(np.zeros(TALLY_WIDTH, np.int32))
    assert made.choose(2, 2, 2 * K, 4096) == 14


def steps_until(made: DraftPolicy, asleep: bool, step: np.ndarray) -> int:
    """Return after how many such steps it sleeps, or wakes."""
    for steps in range(1000):
        if made.asleep == asleep:
            return steps
        made.observe(step)
        if made.asleep:
            made.pass_by(256, 256, 4096)
        else:
            made.choose(256, 256, 256 * K, 4096)
    raise AssertionError(f"asleep is still {made.asleep}")


BAD = tally(256, [0.1])
GOOD = tally(256, [0.99] * K, share=0.2)


def test_sleeps_when_nothing_pays_and_wakes_when_it_would() -> None:
    made = policy(costs(4.6, 0.0228))
    assert 3 < steps_until(made, True, BAD) < 10
    for _ in range(300):
        made.observe(BAD)
        made.pass_by(256, 256, 4096)
        # Places that were scheduled before it fell asleep are not verified.
        assert made.asleep and made.choose(256, 256, 256 * K, 4096) == 0
    assert steps_until(made, False, GOOD) < 40
    assert made.choose(256, 256, 256 * K, 4096) > 0


def test_waking_for_nothing_makes_it_sleep_deeper() -> None:
    made = policy(costs(4.6, 0.0228))
    steps_until(made, True, BAD)
    naps = []
    for _ in range(6):
        naps.append(steps_until(made, False, GOOD))
        steps_until(made, True, BAD)
    assert naps == [6, 12, 12, 12, 12, 12]
    # Having been of use it is as easily woken as ever.
    steps_until(made, False, GOOD)
    for _ in range(200):
        made.observe(GOOD)
        made.choose(256, 256, 256 * K, 4096)
    steps_until(made, True, BAD)
    assert steps_until(made, False, GOOD) < 40


def woken_in_vain() -> DraftPolicy:
    """Return a policy that sleeps, after waking three times for nothing."""
    made = policy(costs(4.6, 0.0228))
    steps_until(made, True, BAD)
    for _ in range(3):
        steps_until(made, False, GOOD)
        steps_until(made, True, BAD)
    return made


def run(made: DraftPolicy, step: np.ndarray, steps: int) -> int:
    """Return how many of some such steps found it asleep."""
    asleep = 0
    for _ in range(steps):
        asleep += made.asleep
        made.observe(step)
        if made.asleep:
            made.pass_by(256, 256, 4096)
        else:
            made.choose(256, 256, 256 * K, 4096)
    return asleep


def test_bad_moments_of_a_text_that_pays_change_nothing() -> None:
    # Long enough that no budget pays in some steps, and often.
    made = policy(costs(4.6, 0.0228))
    run(made, GOOD, 50)
    budgets = []
    for _ in range(40):
        assert run(made, GOOD, 10) == 0
        assert run(made, BAD, 9) == 0
        budgets.append(made.choose(256, 256, 256 * K, 4096))
    assert budgets == [0] * 40


def test_it_stirs_while_more_of_what_it_saw_last_would_wake_it() -> None:
    made = woken_in_vain()
    assert not made.stirring
    # What is known about values is a mean of some steps.
    run(made, GOOD, 4)
    assert made.asleep and made.stirring
    run(made, BAD, 4)
    assert made.asleep and not made.stirring
    steps_until(made, False, GOOD)
    # Awake every step drafts anyway; asleep again, nothing was seen yet.
    assert not made.stirring
    steps_until(made, True, BAD)
    assert not made.stirring


@pytest.mark.parametrize(
    ("looks_on", "least", "most"), [(True, 48, 105), (False, 165, 195)]
)
def test_steps_until_text_that_begins_to_pay_wakes_it(
    looks_on: bool, least: int, most: int
) -> None:
    # However deep it sleeps: it takes twelve looks, and only steps that look tell,
    # three steps late.
    found = []
    for begin in range(192, 192 + 64):
        made = woken_in_vain()
        on_their_way = [False] * 3
        steps = 0
        while made.asleep:
            stirring = made.stirring and looks_on
            on_their_way.append(looks(begin + steps, stirring))
            if on_their_way.pop(0):
                made.observe(GOOD)
                made.pass_by(256, 256, 4096)
            steps += 1
        found.append(steps)
    assert (min(found), max(found)) == (least, most)


def test_good_moments_of_a_text_that_does_not_pay_change_nothing() -> None:
    made = woken_in_vain()
    for _ in range(40):
        assert run(made, GOOD, 2) == 2
        assert run(made, BAD, 30) == 30


def test_it_wakes_for_a_text_that_pays_though_not_in_every_step() -> None:
    made = woken_in_vain()
    asleep = [run(made, GOOD, 8) + run(made, BAD, 4) for _ in range(20)]
    assert sum(asleep[10:]) == 0, asleep


def test_a_batch_that_fills_up_keeps_it_awake_no_longer() -> None:
    # Values of which a few requests are worth it, many are not.
    made = policy(costs(4.6, 0.0228))
    values = [0.3, 0.1]
    for num_requests in (4, 8, 12, 16):
        for _ in range(30):
            made.observe(tally(num_requests, values))
            assert made.choose(num_requests, num_requests, 4 * num_requests, 4096) > 0
    steps = 0
    while not made.asleep:
        made.observe(tally(256, values))
        made.choose(256, 256, 4 * 256, 4096)
        steps += 1
    assert 3 < steps < 12


def test_a_batch_that_fills_up_does_not_wake_it() -> None:
    made = policy(costs(4.6, 0.0228))
    values = [0.3, 0.1]
    for _ in range(30):
        made.observe(tally(256, values))
        made.choose(256, 256, 4 * 256, 4096)
    assert made.asleep
    for num_requests in (4, 16, 40, 72, 128, 200, *[256] * 200):
        for _ in range(2):
            made.observe(tally(num_requests, values))
            made.pass_by(num_requests + 2000, num_requests, 4096)
            assert made.asleep, num_requests
    # Few that stay few do.
    for _ in range(30):
        made.observe(tally(4, values))
        made.pass_by(4, 4, 4096)
    assert not made.asleep


def test_never_sleeps_where_it_could_not_wake() -> None:
    made = policy(costs(4.6, 0.0228), may_sleep=False)
    for _ in range(200):
        made.observe(tally(256, [0.1]))
        made.choose(256, 256, 256 * K, 4096)
    assert not made.asleep


def test_ranks_agree(rng: random.Random) -> None:
    ranks = [policy(costs(4.6, 0.0228)) for _ in range(2)]
    for _ in range(300):
        num_requests = rng.randint(1, 256)
        values = [rng.random() for _ in range(rng.randrange(K))]
        tallies = tally(num_requests, values, rng.random())
        chosen = set()
        for made in ranks:
            made.observe(tallies.copy())
            if made.asleep:
                made.pass_by(num_requests, num_requests, num_requests * K)
                chosen.add((made.asleep, -1))
            else:
                budget = made.choose(num_requests, num_requests, num_requests * K, 4096)
                chosen.add((made.asleep, budget))
        assert len(chosen) == 1


@pytest.mark.parametrize("num_prefill", [512, 8000])
def test_beside_a_prefill(num_prefill: int) -> None:
    made = policy(costs(4.6, 0.0228))
    settle(made, 8, tally(8, [0.9] * 4))
    assert 0 <= made.choose(8 + num_prefill, 8, 8 * K, 4096) <= 8 * K


def test_large_batches_adapt_in_a_few_steps() -> None:
    made = policy(costs(4.6, 0.0228))
    assert settle(made, 256, tally(256, [0.99] * K, share=0.5)) > 500
    for _ in range(10):
        made.observe(tally(256, [0.1]))
    assert made.choose(256, 256, 256 * K, 4096) == 0
