"""Cost tables on disk: for the same GPU and model only, whole or not at all."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrv2_spec.cost_file import CostFileError, read_costs, write_costs
from mrv2_spec.step_costs import CostCurve, StepCosts

IDENTITY = {"gpu": "H200", "model": "llama", "num_speculative_tokens": 16}
COSTS = StepCosts(
    CostCurve.of([(1, 1.25), (8, 2.5), (64, 4.0)], 8),
    CostCurve.of([(1, 1.5), (4, 3.5), (8, 3.0), (64, 4.25)], 8),
    CostCurve.of([(1, 1.0), (8, 2.0), (64, 3.0)], 8),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    write_costs(path, IDENTITY, COSTS, [1, 8])
    return path


def test_comes_back_as_it_was(path: Path) -> None:
    costs, sizes = read_costs(path, IDENTITY)
    assert sizes == [1, 8]
    tokens = np.array([1.0, 5.0, 8.0, 9.0, 64.0, 100.0])
    for curve in ("plain", "drafting", "bare"):
        want, got = getattr(COSTS, curve), getattr(costs, curve)
        assert got(tokens).tolist() == want(tokens).tolist()
    assert [p.name for p in path.parent.iterdir()] == ["costs.json"]


@pytest.mark.parametrize("name", IDENTITY)
def test_of_something_else(path: Path, name: str) -> None:
    other = {**IDENTITY, name: "other"}
    with pytest.raises(CostFileError) as caught:
        read_costs(path, other)
    assert f"was measured for {name} {IDENTITY[name]!r}, not 'other'" in str(
        caught.value
    )
    assert "\n" not in str(caught.value)


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 1},
        {"version": 2},
        {"graph_sizes": None},
        {"graph_sizes": ["x"]},
        {"plain": {}},
        {"plain": {"tokens": [], "ms": [], "max_graph_tokens": 8}},
        {"plain": {"tokens": [1, 2], "ms": [1.0], "max_graph_tokens": 8}},
        {"plain": {"tokens": [2, 1], "ms": [1.0, 2.0], "max_graph_tokens": 8}},
        {"plain": {"tokens": [1, 2], "ms": [1.0, -2.0], "max_graph_tokens": 8}},
        {"plain": {"tokens": [1], "ms": ["no"], "max_graph_tokens": 8}},
        {"drafting": 3},
        {"bare": {}},
        {"graph_sizes": [float("inf")]},
        {"plain": {"tokens": [1], "ms": [1.0], "max_graph_tokens": float("inf")}},
        {"plain": {"tokens": [1, float("inf")], "ms": [1, 2], "max_graph_tokens": 1}},
        {"plain": {"tokens": [10**400], "ms": [1.0], "max_graph_tokens": 1}},
        {"measured_for": 3},
    ],
)
def test_broken(path: Path, changes: dict[str, Any]) -> None:
    change(path, **changes)
    with pytest.raises(CostFileError) as caught:
        read_costs(path, IDENTITY)
    assert "\n" not in str(caught.value)


def test_cut_off_anywhere(path: Path, rng: random.Random) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: rng.randrange(len(whole) - 1)])
    with pytest.raises(CostFileError):
        read_costs(path, IDENTITY)


def test_nested_too_deep(path: Path) -> None:
    path.write_text("[" * 100_000)
    with pytest.raises(CostFileError):
        read_costs(path, IDENTITY)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_costs(tmp_path / "none.json", IDENTITY)


def test_not_writable(tmp_path: Path) -> None:
    with pytest.raises(CostFileError, match="cannot be written"):
        write_costs(tmp_path / "none" / "costs.json", IDENTITY, COSTS, [1])
    assert list(tmp_path.iterdir()) == []
