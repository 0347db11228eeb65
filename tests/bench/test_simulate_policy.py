"""The simulator counts what it says, and its policies keep their promises."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
K = 4


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("simulate_policy")


def trajectories(outputs: list[list[int]]) -> list[object]:
    workloads = sys.modules["policies.workloads"]
    return [workloads.Trajectory([1, 2, 3, 4, 5, 6], out, "x") for out in outputs]


def never_right(sim: ModuleType, positions: int = 40) -> object:
    """Records whose drafts are all wrong."""
    drafts = sys.modules["policies.drafts"]
    made = drafts.empty(trajectories([[9] * positions]))
    made.num[:] = K
    made.run[:] = 2
    return made


def test_ngram_records_are_those_of_the_reference(sim: ModuleType) -> None:
    from mrv2_spec.kernels.propose_ngram import propose_ngram_ref

    drafts = sys.modules["policies.drafts"]
    rng = np.random.default_rng(0)
    made_of = trajectories([rng.integers(1, 7, 60).tolist() for _ in range(4)])
    for latest in (False, True):
        made = drafts.ngram(made_of, latest)
        for t, first in zip(made_of, made.first, strict=True):
            for position in range(1, len(t.output)):
                text = [*t.prompt, *t.output[:position]]
                draft, match = propose_ngram_ref(
                    text,
                    num_steps=drafts.MAX_DRAFTS,
                    min_n=drafts.MIN_N,
                    max_n=drafts.MAX_N,
                    max_model_len=10**6,
                    latest=latest,
                )
                right = 0
                for a, b in zip(draft, t.output[position:], strict=False):
                    if a != b:
                        break
                    right += 1
                at = first + position
                assert (made.num[at], made.match[at]) == (len(draft), match)
                assert made.right[at] == right


def test_perfect_drafts_take_a_step_for_each_k_plus_one_tokens(
    sim: ModuleType,
) -> None:
    drafts = sys.modules["policies.drafts"]
    made = drafts.empty(trajectories([[9] * 41]))
    made.num[:] = K
    made.right[:] = np.minimum(K, 41 - np.arange(41))
    point = sim.simulate(made, sim.Valid(), 2, K, sim.StepCost(1.0, 0.5), 8, 0)
    # The first token is the prefill's: 40 are left, 5 a step.
    assert (point.steps, point.tokens) == (8, 2 * 40)
    assert point.turns == 8 * 2
    assert point.time_ms == pytest.approx(8 * (1.0 + 0.5 * 2 * (1 + K)))
    assert point.ratio == pytest.approx((1.0 + 0.5 * 2) * 5 / (1.0 + 0.5 * 2 * 5))


def test_rounds_are_not_refilled_and_the_ratio_is_that_of_the_requests(
    sim: ModuleType,
) -> None:
    drafts = sys.modules["policies.drafts"]
    made = drafts.empty(trajectories([[9] * 41, [9] * 41]))
    made.num[:] = K
    # The first request's drafts all come true, the second's never.
    made.right[:41] = np.minimum(K, 41 - np.arange(41))
    point = sim.simulate_rounds(
        made, sim.Valid(), [np.array([0, 1])], K, sim.StepCost(1.0, 0.5)
    )
    both, alone = 1.0 + 0.5 * 2 * (1 + K), 1.0 + 0.5 * (1 + K)
    assert (point.steps, point.turns, point.tokens) == (40, 8 + 40, 80)
    assert point.time_ms == pytest.approx(8 * both + 32 * alone)
    tpot = [8 * both / 40, (8 * both + 32 * alone) / 40]
    assert point.ratio == pytest.approx((1.0 + 0.5 * 2) / (sum(tpot) / 2))


def test_costs_of_rows_lie_on_lines_between_points(sim: ModuleType) -> None:
    cost = sim.StepCost(
        base_by_requests=((1, 4.0), (11, 6.0)),
        rows_ms=((1, 0.0), (11, 1.0), (21, 3.0)),
        wide_ms=((1, 0.25),),
    )
    assert cost(6, 0) == pytest.approx(5.0)
    assert cost(6, 10) == pytest.approx(5.0 + 0.25 + (2.0 - 0.5))
    # The last line goes on.
    assert cost(11, 20) == pytest.approx(6.0 + 0.25 + (5.0 - 1.0))


def grid_line(
    arm: str, k: int, c: int, tpot: float, **more: object
) -> dict[str, object]:
    return {
        "run_id": "r", "workload": "low", "arm": arm, "k": k, "c": c, "tpot_ms": tpot,
        "tokens_per_step": 2.0 if k else 1.0, "asleep": None, "awake_without": None,
        "mean_budget": None, "model": "llama-8b", **more,
    }  # fmt: skip


def test_a_fit_finds_the_costs_that_points_were_made_of(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fitted = sys.modules["policies.fitted"]
    slopes = (0.003, 0.008, 0.015, 0.02, 0.03, 0.025, 0.022)
    ms = np.concatenate([[0.0], np.cumsum(np.diff(fitted.EDGES) * slopes)])
    true = sim.StepCost(
        base_by_requests=((1, 4.7), (256, 12.0)),
        rows_ms=tuple(zip(fitted.EDGES, ms, strict=True)),
        wide_ms=((1, 0.2),),
    )
    rng = np.random.default_rng(5)
    lines = []
    for c in (1, 16, 64, 128, 256):
        lines.append(grid_line("v2-none", 0, c, true(c, 0)))
        if c <= 64:
            lines.append(grid_line("v2-intree-ngram", 5, c, true(c, 5 * c) / 2))
        for arm in ("ngram", "suffix", "v2-oracle"):
            budget = int(rng.integers(1, min(15 * c, 1700)))
            asleep = float(rng.choice([0.0, 0.3]))
            step = asleep * true(c, 0) + (1 - asleep) * true(c, budget)
            shares = {"asleep": asleep, "awake_without": 0.0, "mean_budget": budget}
            lines.append(grid_line(arm, 16, c, step / 2, **shares))
    # What says nothing of a graph's step, or of a full one, is left out.
    shares = {"asleep": 0.0, "awake_without": 0.0, "mean_budget": 9.0}
    lines += [
        grid_line("v2-intree-ngram", 5, 256, 99.0),
        grid_line("v2-none", 0, 16, 5.0, workload="high"),
        grid_line("ngram", 16, 16, 99.0, workload="high", **shares),
        grid_line("ngram", 16, 16, 99.0, workload="shift", **shares),
        grid_line("ngram", 16, 16, 99.0, workload="low", run_id="no base", **shares),
    ]
    found = fitted.fit(lines)
    assert found.points == 18
    assert np.array(found.rows_ms) == pytest.approx(np.array(true.rows_ms), abs=1e-6)
    assert found.wide_ms == pytest.approx(0.2)
    assert found.plain_ms["high"] == ((16, 5.0),)
    assert all(abs(e) < 1e-9 for of in found.errors.values() for e in of.values())

    # The command keeps the same, and the simulator reads it back.
    (tmp_path / "engine_grid.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = (
        f"fit_step_cost.py --run r --results {tmp_path} --out {tmp_path} --commit abc"
    )
    monkeypatch.setattr(sys, "argv", command.split())
    importlib.import_module("fit_step_cost").main()
    record = json.loads((tmp_path / "step_cost.json").read_text())
    assert record["runs"] == ["r"]
    cost = fitted.Fitted.of_json(record).cost("low")
    assert cost(64, 192) == pytest.approx(true(64, 192))
    # A workload that was not measured takes the mean of those that were.
    mean = fitted.Fitted.of_json(record).cost("mid")(16, 0)
    assert mean == pytest.approx((true(16, 0) + 5.0) / 2)
    with pytest.raises(ValueError, match="too few"):
        fitted.fit(lines[:4])


def test_requests_of_a_round_do_not_see_what_comes_later(sim: ModuleType) -> None:
    drafts = sys.modules["policies.drafts"]
    text = np.random.default_rng(2).integers(7, 900, 60).tolist()
    together = drafts.suffix([trajectories([text, text])], memory=True)
    apart = drafts.suffix([[t] for t in trajectories([text, text])], memory=True)
    # One after the other, the second finds all of the first; side by side they are
    # equally far, and nothing that either has said is news to the other.
    assert apart.right[60:].sum() > 200
    assert together.right.sum() == apart.right[:60].sum()


def test_fixed_pays_for_places_without_a_draft(sim: ModuleType) -> None:
    drafts = sys.modules["policies.drafts"]
    made = drafts.empty(trajectories([[9] * 41]))
    point = sim.simulate(made, sim.Fixed(), 3, K, sim.LINEAR, 10, 0)
    assert (point.rows, point.verified) == (10 * 3 * K, 0)
    assert point.ratio < 1


@pytest.mark.parametrize("requests", [1, 64])
def test_curve_stops_verifying_what_is_never_right(
    sim: ModuleType, requests: int
) -> None:
    policy = sim.Curve(sim.Hazards(sim.run_classes))
    made = never_right(sim)
    sim.simulate(made, policy, requests, K, sim.LINEAR, 200, 0)
    after = sim.simulate(made, policy, requests, K, sim.LINEAR, 50, 0)
    # One request: a row is so cheap that one chance in 200 would pay for it.
    assert after.ratio > (0.99 if requests == 1 else 0.9999)


def test_curve_wakes_when_drafts_come_true_again(sim: ModuleType) -> None:
    policy = sim.Curve(sim.Hazards(sim.run_classes))
    made = never_right(sim)
    sim.simulate(made, policy, 64, K, sim.LINEAR, 300, 0)
    made.right[:] = np.minimum(K, 40 - np.arange(40))
    sim.simulate(made, policy, 64, K, sim.LINEAR, 100, 0)
    after = sim.simulate(made, policy, 64, K, sim.LINEAR, 50, 0)
    assert after.accepted > 0.9 * after.verified > 0
    assert after.ratio > 1.5


def test_without_shadow_acceptance_it_never_wakes(sim: ModuleType) -> None:
    # What the shadow is for: nothing verified means nothing learned.
    policy = sim.Curve(sim.Hazards(sim.run_classes, shadow=False))
    made = never_right(sim)
    sim.simulate(made, policy, 64, K, sim.LINEAR, 300, 0)
    made.right[:] = np.minimum(K, 40 - np.arange(40))
    after = sim.simulate(made, policy, 64, K, sim.LINEAR, 100, 0)
    assert after.rows == 0


def engine_costs(tmp_path: Path, slope: float = 0.0228) -> Path:
    """Write what engines with k=K and k=5 measured; those with K like ``LINEAR``."""
    sizes = [1, 2, 4, 8, *range(16, 513, 16)]
    curve = [[size, 4.6 + slope * size] for size in (*sizes, 8192)]
    names = ("plain", "bare", "drafting")
    right = {name: curve for name in names}
    wrong = {name: [[1, 99.0]] for name in names}
    path = tmp_path / "engine_costs.jsonl"
    lines = [
        {"k": K, "max_graph_tokens": 512, **wrong},
        {"k": K, "max_graph_tokens": 512, **right},
        {"k": 5, "max_graph_tokens": 512, **wrong},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def engine_policy(sim: ModuleType, tmp_path: Path, slope: float = 0.0228) -> object:
    engine = importlib.import_module("policies.engine")
    costs, sizes = engine.measured_costs(engine_costs(tmp_path, slope), K)
    assert sizes[-1] == 512 and float(costs.drafting(np.array([8192.0]))[0]) > 99
    return engine.Engine(sim.Hazards(sim.run_classes, limit=64.0), K, costs, sizes)


def test_the_plugins_own_policy_sleeps_and_wakes(
    sim: ModuleType, tmp_path: Path
) -> None:
    policy = engine_policy(sim, tmp_path)
    made = never_right(sim)
    sim.simulate(made, policy, 64, K, sim.LINEAR, 300, 0)
    asleep = sim.simulate(made, policy, 64, K, sim.LINEAR, 100, 0)
    assert asleep.rows == 0 and asleep.ratio == pytest.approx(1)
    made.right[:] = np.minimum(K, 40 - np.arange(40))
    sim.simulate(made, policy, 64, K, sim.LINEAR, 200, 0)
    before = policy.expected  # type: ignore[attr-defined]
    awake = sim.simulate(made, policy, 64, K, sim.LINEAR, 100, 0)
    assert awake.ratio > 1.5
    expected = policy.expected - before  # type: ignore[attr-defined]
    assert awake.accepted == pytest.approx(expected, rel=0.1)


def test_wrong_beliefs_make_the_plugins_policy_slower(
    sim: ModuleType, tmp_path: Path
) -> None:
    made = never_right(sim)
    # Half of the drafts come true.
    made.right[::2] = np.minimum(K, 40 - np.arange(40))[::2]
    ratios = []
    for slope in (0.0228, 0.5):
        policy = engine_policy(sim, tmp_path, slope)
        sim.simulate(made, policy, 64, K, sim.LINEAR, 300, 0)
        ratios.append(sim.simulate(made, policy, 64, K, sim.LINEAR, 100, 0).ratio)
    assert ratios[0] > ratios[1] + 0.05


def test_tallies_are_the_kernels(sim: ModuleType) -> None:
    from mrv2_spec.kernels.value_drafts import NUM_BINS, ROUNDS, bin_edges

    rng = np.random.default_rng(7)
    values = np.cumprod(rng.uniform(0.2, 1.0, (9, K)), axis=1)
    values[4, 2:] = 0.0
    tally = importlib.import_module("policies.engine")._tally(values)
    bins = [sum(v < edge for edge in bin_edges()) for v in values[values > 0].tolist()]
    assert tally[:NUM_BINS].tolist() == [bins.count(i) for i in range(NUM_BINS)]
    assert tally[ROUNDS] == 9


def test_without_costs_of_an_engine_its_policy_is_refused(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sim, "MEASURED", tmp_path / "none.jsonl")
    with pytest.raises(SystemExit, match=r"none\.jsonl has no engine with k=4"):
        sim.POLICIES["engine"]("ngram-latest", K)


def test_budgets_fill_graphs(sim: ModuleType) -> None:
    curve = sys.modules["policies.curve"]
    assert curve.candidates(60, 60 * 16, (1, 32, 64, 96)).tolist()[:3] == [0, 4, 36]
    assert curve.candidates(1, 4, (1, 2, 4, 8)).tolist() == [0, 1, 3, 4]
    assert curve.candidates(1, 4, ()).tolist() == [0, 1, 2, 3, 4]


def test_fill_is_the_device_rule(sim: ModuleType) -> None:
    from mrv2_spec.kernels.fill_draft_budget import fill_draft_budget_ref

    fill = sys.modules["policies.confidence"].fill
    rng = np.random.default_rng(3)
    for budget in range(0, 20):
        # Few levels far apart, so that both see the same ties.
        chances = rng.choice([0.9, 0.5, 0.1], (5, K))
        num = rng.integers(0, K + 1, 5)
        values = np.where(np.arange(K) < num[:, None], np.cumprod(chances, axis=1), 0.0)
        total = min(budget, int(num.sum()))
        expected = fill_draft_budget_ref(
            list(range(5)), num.tolist(), [K] * 5, chances.tolist(), draft_budget=total
        )
        got = fill(values, total)
        assert got.sum() == sum(expected)
        assert values_of(values, got) == pytest.approx(values_of(values, expected))


def values_of(values: np.ndarray, widths: object) -> float:
    return float(sum(values[i, :w].sum() for i, w in enumerate(widths)))


def test_the_recorded_texts_are_never_slower(sim: ModuleType) -> None:
    workloads = sys.modules["policies.workloads"]
    if not workloads.data_folder().exists():
        pytest.skip("the recorded texts are not here")
    for requests in (16, 256):
        cost = sim.Fitted.of_json(json.loads(sim.FITTED.read_text())).cost("low")
        point = sim.run("low", "ngram-latest", "curve", requests, 16, cost)
        assert point.ratio > 0.97
        again = sim.run_rounds("low", "ngram-latest", "curve", requests, 16, cost)
        assert again.ratio > 0.97
        # Its 128 tokens each, but the prefill's.
        assert again.tokens == 127 * requests


def test_the_command_saves_its_points(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sim, "find", lambda workload, drafter: never_right(sim))
    command = (
        "simulate_policy.py --policy fixed --drafter ngram-latest --workload low "
        f"--requests 2 --k {K} --commit abc --out {tmp_path}"
    )
    monkeypatch.setattr(sys, "argv", command.split())
    sim.main()
    record = json.loads((tmp_path / "simulate_policy.json").read_text())
    assert record["commit"] == "abc"
    (point,) = record["points"]
    assert (point["drafter"], point["workload"], point["k"]) == (
        "ngram-latest", "low", K,
    )  # fmt: skip
    # All places are verified and none comes true.
    assert point["rows"] == 2 * K * point["steps"]
    assert point["accepted"] == 0
    assert point["ratio"] < 1
