"""What every test shares: the device, fresh seeds and the reference data."""

import gzip
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
# Repeats a failed run: the failure report names the value.
SEED_VARIABLE = "MRV2_SPEC_TEST_SEED"

# Without a GPU, kernels run in Triton's interpreter. Triton reads the variable when a
# kernel is defined: a fixture, or even a hook, would come too late.
_environment = pytest.MonkeyPatch()
if not torch.cuda.is_available():
    _environment.setenv("TRITON_INTERPRET", "1")

# The interpreter's first call of a kernel is slow, later ones are not.
settings.register_profile("mrv2_spec", deadline=None, print_blob=True)
settings.load_profile("mrv2_spec")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Give the environment back as it was."""
    _environment.undo()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return where the kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Return a generator with a fresh seed, which the report of a failure shows."""
    given = os.environ.get(SEED_VARIABLE)
    seed = random.SystemRandom().randrange(1 << 32) if given is None else int(given)
    request.node.add_report_section("call", "seed", f"{SEED_VARIABLE}={seed}")
    return random.Random(seed)


@pytest.fixture(scope="session")
def load_golden() -> Callable[[str], Iterator[dict[str, Any]]]:
    """Return a reader of the recorded outputs beside the checkout, a dict a line."""

    def load(name: str) -> Iterator[dict[str, Any]]:
        shared = os.environ.get("MRV2_SPEC_SHARED", ROOT.parent / "shared")
        path = Path(shared) / "golden" / name
        if not path.is_file():
            pytest.skip(f"no {path}; MRV2_SPEC_SHARED names the folder that has it")
        with gzip.open(path, "rt") as lines:
            yield from map(json.loads, lines)

    return load
