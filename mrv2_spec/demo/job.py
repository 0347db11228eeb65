"""What the demo asks of a worker process, and what it hears back."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Set in the worker before vLLM is imported, whatever the user's shell says: both runs
# of the comparison must use the same engine.
ENVIRONMENT: Mapping[str, str] = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


@dataclass(frozen=True, slots=True)
class Job:
    """One run of all prompts."""

    model: str
    prompt_token_ids: list[list[int]]
    max_tokens: int
    max_model_len: int
    num_speculative_tokens: int
    """0 runs without speculation."""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one run."""

    output_token_ids: list[list[int]]
    steps: list[int]
    """Per prompt: engine steps that gave it tokens, the first one included."""
    seconds: float
    """From the first request to the last token; loading is not in it."""
    counters: dict[str, int] | None
    """The plug-in's totals (fields of ``Totals``); None when nothing was drafted."""


def encode(value: Job | Result) -> dict[str, Any]:
    """Return a form that JSON can carry."""
    return asdict(value)
