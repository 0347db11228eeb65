"""The comparison of ranks: what it notes, that it sees a difference, and a real run."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"


def module(name: str) -> Any:
    """Return a module of the benchmarks."""
    return importlib.import_module(name)


class Rank:
    """A runner with no model: its steps are what the test says."""

    def __init__(self, seed: int, longest_ms: float = 0.0) -> None:
        pytest.importorskip("vllm")
        worker = module("grid.ranks_worker")
        self.drafts = torch.tensor([[5, 6, 7], [8, 9, 1]])
        self.budget = 2
        speculator = SimpleNamespace(
            draft_tokens=torch.zeros(4, 3, dtype=torch.int64),
            num_valid_drafts_for_trim=torch.tensor([3, 1, 0, 2], dtype=torch.int32),
            draft_token_confidence_probs=torch.full((4, 3), 0.5),
            req_states=SimpleNamespace(max_num_reqs=4),
            propose=lambda *args, **kwargs: self.drafts,
        )
        manager = SimpleNamespace(
            choose=lambda scheduler_output: self.budget,
            record_confidences=lambda *args: None,
            policy=SimpleNamespace(asleep=False),
        )
        self.runner = SimpleNamespace(
            device=torch.device("cpu"),
            speculator=speculator,
            adaptive_verification=manager,
            execute_model=lambda: None,
            sample_tokens=lambda: None,
        )
        delays = worker.Delays(seed, longest_ms, torch.device("cpu"))
        self.watch = worker.Watch(self.runner, delays)
        self.batch = SimpleNamespace(
            num_reqs=2,
            idx_mapping=torch.tensor([3, 0]),
            cu_num_logits=torch.tensor([0, 2, 4], dtype=torch.int32),
            query_start_loc=torch.tensor([0, 2, 4, 4, 4], dtype=torch.int32),
            req_ids=["a", "b"],
            num_tokens_after_padding=4,
        )

    def step(self) -> None:
        """Do what vLLM's worker does in a step."""
        runner = self.runner
        manager = runner.adaptive_verification
        scheduled = {"a": [0, 0, 0], "b": [0, 0, 0]}
        manager.choose(SimpleNamespace(scheduled_spec_decode_tokens=scheduled))
        runner.execute_model()
        runner.sample_tokens()
        num_sampled = torch.tensor([1, 2], dtype=torch.int32)
        args = (None, None, None, None, num_sampled)
        runner.speculator.propose(self.batch, *args, dummy_run=True)
        drafts = runner.speculator.propose(self.batch, *args)
        assert drafts is self.drafts
        manager.record_confidences()


def change(rank: Rank, what: str) -> None:
    """Let a rank decide something else than the other."""
    speculator = rank.runner.speculator
    if what == "drafts":
        rank.drafts = torch.tensor([[5, 7, 6], [8, 9, 1]])
    elif what == "real drafts":
        speculator.num_valid_drafts_for_trim[3] = 1
    elif what == "confidences":
        speculator.draft_token_confidence_probs[1, 2] += 1e-6
    elif what == "widths":
        rank.batch.cu_num_logits[1] = 1
    elif what == "boundaries":
        rank.batch.query_start_loc[1] = 1
    elif what == "requests":
        rank.batch.req_ids = ["b", "a"]
    elif what == "rows":
        rank.batch.num_tokens_after_padding = 8
    elif what == "budget":
        rank.budget = 3
    elif what == "asleep":
        rank.runner.adaptive_verification.policy.asleep = True


@pytest.mark.parametrize(
    "what",
    [
        "drafts", "real drafts", "confidences", "widths", "boundaries", "requests",
        "rows", "budget", "asleep",
    ],
)  # fmt: skip
def test_whatever_ranks_decide_differently_is_seen(what: str) -> None:
    ranks = [Rank(0), Rank(1)]
    first_difference = module("grid.ranks").first_difference

    def steps() -> list[Any]:
        return [rank.watch.collect()["steps"] for rank in ranks]

    for rank in ranks:
        rank.step()
        rank.step()
    assert first_difference(steps()) is None
    change(ranks[1], what)
    for rank in ranks:
        rank.step()
    assert first_difference(steps()).startswith(f"step 2, {what}:")


def test_a_rank_that_stops_early_is_seen() -> None:
    first_difference = module("grid.ranks").first_difference
    step = list(range(11))
    assert first_difference([[step, step], [step, step]]) is None
    assert first_difference([[step, step], [step]]) == "numbers of steps: 2, 1"


def test_unused_places_of_a_batch_are_not_compared() -> None:
    ranks = [Rank(0), Rank(1)]
    ranks[1].runner.speculator.draft_token_confidence_probs[2:] = 0.9
    ranks[1].batch.query_start_loc[3:] = 9
    for rank in ranks:
        rank.step()
    steps = [rank.watch.collect()["steps"] for rank in ranks]
    assert steps[0] == steps[1]


def test_every_rank_is_late_in_its_own_way() -> None:
    ranks = [Rank(seed, longest_ms=0.2) for seed in (1, 2)]
    for rank in ranks:
        for _ in range(60):
            rank.step()
    late = [rank.watch.collect()["host_delay_ms"] for rank in ranks]
    assert all(ms > 1 for ms in late)
    assert late[0] != late[1]


def test_figures_are_those_of_the_first_rank() -> None:
    ranks = module("grid.ranks")
    place = {name: i for i, name in enumerate(ranks.COLUMNS)}
    steps = [[0] * len(ranks.COLUMNS) for _ in range(4)]
    for step, (budget, asleep) in zip(
        steps, [(5, 0), (0, 1), (5, 0), (2, 1)], strict=True
    ):
        step[place["budget"]], step[place["asleep"]] = budget, asleep
    notes = {"steps": steps, "host_delay_ms": 1.0, "device_delay_ms": 2.0}
    figures = ranks.figures([notes, notes], plain_steps=3)
    assert figures["difference"] is None
    assert (figures["steps"], figures["plain_steps"], figures["ranks"]) == (4, 3, 2)
    assert (figures["budgets"], figures["steps_with_budget"]) == (3, 3)
    assert (figures["steps_asleep"], figures["naps"]) == (2, 2)
    line = module("tp_ranks").verdict("ngram:8", {**figures, "seconds": 1.0})
    assert "AGREE in 4 steps" in line
    differing = {**figures, "difference": "step 1, widths: 1, 2", "seconds": 1.0}
    assert "DIFFER at step 1, widths" in module("tp_ranks").verdict("x", differing)


def test_rounds_mix_texts_of_several_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: Any
) -> None:
    module("test_engine_grid").write_texts(tmp_path, rng)
    monkeypatch.setenv("MRV2_SPEC_SHARED", str(tmp_path))
    rounds = module("grid.workloads").mixed_rounds(3, 10, 2048)
    assert [len(items) for items in rounds] == [10, 10, 10]
    assert len({len(item.output) for item in rounds[0]}) == 4


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny run is for a CPU")
@pytest.mark.timeout(900)
def test_two_ranks_on_the_cpu(
    tmp_path: Path, rng: Any, tiny_run: Callable[..., str]
) -> None:
    module("test_engine_grid").write_texts(tmp_path, rng)
    printed = tiny_run(
        "tp_ranks.py", "--arms", "ngram:3", "--steps", "10", "--requests", "4",
        "--length", "8", "--point-limit", "400", "--time-limit", "800",
        shared=tmp_path,
    )  # fmt: skip
    assert "ngram:3: ranks AGREE" in printed
    found = json.loads((tmp_path / "tp_ranks.json").read_text())["arms"]["ngram:3"]
    assert found["ranks"] == 2
    assert found["steps"] >= 15 > 10 <= found["plain_steps"]
    assert found["steps_with_budget"] > 0
    assert found["draft_shapes"] > 5
    assert all(ms > 0 for ms in found["host_delay_ms"])
