"""A real vLLM engine on the CPU, in a child process, and what every run must show."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.engine.harness import Texts, Worker


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Return the engines' process; it starts with the first job."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    if torch.cuda.is_available():
        pytest.skip("these engines run on the CPU build of vLLM")
    worker = Worker(tmp_path_factory.mktemp("engine"))
    yield worker
    worker.stop()


@pytest.fixture
def texts(worker: Worker) -> Texts:
    """Return the source of prompts and texts."""
    return Texts(worker)


@pytest.fixture
def run(worker: Worker) -> Callable[..., dict[str, Any]]:
    """Return a function that runs a job and checks what holds for every run."""

    def run(actions: list[list[Any]], **job: Any) -> dict[str, Any]:
        result = worker.run({"engine": {}, **job, "actions": actions})
        assert "error" not in result, result["traceback"]
        assert result["async_scheduling"] is bool(job.get("async_scheduling"))
        totals = result.get("counters")
        if totals is not None:
            assert totals["proposed"] == (
                totals["verified"] + totals["invalid"] + totals["never_issued"]
            )
            assert 0 <= totals["accepted"] <= totals["verified"]
            assert 0 <= totals["rounds_with_draft"] <= totals["rounds"]
            assert min(totals.values()) >= 0
        return result

    return run
