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
    assert point.time_ms == pytest.approx(8 * (1.0 + 0.5 * 2 * (1 + K)))
    assert point.ratio == pytest.approx((1.0 + 0.5 * 2) * 5 / (1.0 + 0.5 * 2 * 5))


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
        point = sim.run("low", "ngram-latest", "curve", requests, 16, sim.GRAPHS)
        assert point.ratio > 0.97


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
