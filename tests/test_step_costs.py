"""What steps cost: the least, padding to graphs, lines between measured sizes."""

import numpy as np
import pytest

from mrv2_spec.step_costs import CostCurve, StepCosts


def test_padded_to_the_next_graph_and_smooth_above() -> None:
    curve = CostCurve.of([(8, 2.0), (1, 1.0), (24, 6.0), (16, 4.0)], 16)
    tokens = np.array([1.0, 2.0, 8.0, 9.0, 16.0, 20.0, 24.0, 32.0])
    assert curve(tokens).tolist() == [1, 2, 2, 4, 4, 5, 6, 8]


def test_the_least_counts_and_a_dear_size_says_nothing_of_larger_ones() -> None:
    curve = CostCurve.of([(1, 9.0), (1, 3.0), (1, 4.0), (4, 7.5), (8, 5.0)], 8)
    assert curve(np.array([1.0, 4.0, 8.0])).tolist() == [3, 7.5, 5]


def test_beyond_what_was_measured_costs_never_fall() -> None:
    tokens = np.array([8.0, 16.0])
    dear = CostCurve.of([(1, 1.0), (4, 3.0), (7, 9.0), (8, 5.0)], 0)
    assert dear(tokens).tolist() == [5, 9]
    falling = CostCurve.of([(1, 1.0), (4, 7.0), (8, 5.0)], 0)
    assert falling(tokens).tolist() == [5, 5]


def test_a_plain_step_is_not_dearer_than_one_that_drafts() -> None:
    disturbed = CostCurve.of([(1, 9.0), (8, 9.5), (64, 12.0)], 64)
    drafting = CostCurve.of([(1, 4.0), (8, 5.0), (64, 13.0)], 64)
    bare = CostCurve.of([(1, 8.5), (8, 9.0), (64, 11.0)], 64)
    costs = StepCosts.of(disturbed, drafting, bare)
    sizes = np.array([1.0, 8.0, 64.0])
    assert costs.bare(sizes).tolist() == [4, 5, 11]
    assert costs.context(sizes).tolist() == [5, 4.5, 1]


def test_a_dear_size_makes_no_other_step_dear() -> None:
    bare = CostCurve.of([(1, 4.0), (8, 9.0), (16, 5.0)], 16)
    plain = CostCurve.of([(1, 4.5), (8, 9.5), (16, 6.0)], 16)
    costs = StepCosts.of(plain, bare, bare)
    sizes = np.array([1.0, 8.0, 16.0])
    assert costs.plain(sizes).tolist() == [4.5, 9.5, 6]
    assert costs.bare(sizes).tolist() == [4, 9, 5]
    assert costs.context(sizes).tolist() == [0.5, 0.5, 1]


def test_contexts_cost_by_requests_and_never_less_than_nothing() -> None:
    plain = CostCurve.of([(1, 3.0), (8, 4.0), (64, 9.0)], 64)
    bare = CostCurve.of([(1, 3.1), (8, 3.5), (64, 5.0)], 64)
    costs = StepCosts.of(plain, CostCurve.of([(1, 3.2), (64, 5.5)], 64), bare)
    sizes = np.array([1.0, 8.0, 64.0])
    assert costs.context(sizes).tolist() == [0, 0.5, 4]
    assert costs.plain(sizes).tolist() == [3.1, 4, 9]
    nothing = StepCosts.without_contexts(plain, plain)
    assert nothing.context(sizes).tolist() == [0, 0, 0]


def test_one_size_only() -> None:
    assert CostCurve.of([(4, 2.0)], 0)(np.array([1.0, 9.0])).tolist() == [2, 2]


@pytest.mark.parametrize("ms", [0.0, -1.0, float("nan"), float("inf")])
def test_refuses_what_is_no_cost(ms: float) -> None:
    with pytest.raises(ValueError, match="no positive number"):
        CostCurve.of([(1, 1.0), (2, ms)], 0)


def test_refuses_nothing() -> None:
    with pytest.raises(ValueError, match="no step"):
        CostCurve.of([], 0)


def test_guess() -> None:
    tokens = np.array([0.0, 200.0, 400.0])
    assert CostCurve.guess("cuda")(tokens).tolist() == pytest.approx([1, 2, 3])
    assert CostCurve.guess("cpu")(tokens).tolist() == pytest.approx([1, 26, 51])
