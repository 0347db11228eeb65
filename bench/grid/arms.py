"""What is compared: each arm is a runner, a drafter and whether drafts are trimmed."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

# The match lengths of every n-gram arm.
PROMPT_LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}


@dataclass(frozen=True, slots=True)
class Kind:
    """How an arm is set up, for any k."""

    runner: str
    method: str
    trimmed: bool = False
    # Whether this project's plugin is in the engine's process.
    plugin: bool = False
    # Whether the scheduler goes ahead of the device, which it does not on V1 beside a
    # drafter that needs the last step's tokens on the host.
    ahead: bool = True
    # Whether finished replies are remembered for later requests.
    memory: bool = False
    # A package that vLLM imports for this arm.
    package: str | None = None
    # Why the arm cannot run on a CPU, where it cannot.
    not_on_cpu: str | None = None


KINDS = {
    "v2-none": Kind("v2", "none"),
    "v2-intree-ngram": Kind(
        "v2", "ngram", not_on_cpu="its kernel fails in Triton's interpreter"
    ),
    "ngram": Kind("v2", "ngram", trimmed=True, plugin=True),
    "ngram-untrimmed": Kind("v2", "ngram", plugin=True),
    "suffix": Kind("v2", "suffix", trimmed=True, plugin=True, memory=True),
    "suffix-untrimmed": Kind("v2", "suffix", plugin=True, memory=True),
    "v2-oracle": Kind("v2", "oracle", trimmed=True, plugin=True),
    "v1-none": Kind("v1", "none"),
    "v1-ngram-gpu": Kind("v1", "ngram_gpu", not_on_cpu="it needs a CUDA device"),
    "v1-suffix": Kind(
        "v1", "suffix", ahead=False, memory=True, package="arctic_inference"
    ),
}


@dataclass(frozen=True, slots=True)
class Arm:
    """One engine to start.

    Attributes:
        name: of its kind.
        k: how many tokens it drafts, 0 for none.
        most: requests at a time of the largest point that is taken of it, None for any.
            A choice of the run, no part of what the arm is.
    """

    name: str
    k: int
    most: int | None = field(default=None, compare=False)

    @property
    def kind(self) -> Kind:
        """How it is set up."""
        return KINDS[self.name]

    @property
    def label(self) -> str:
        """Return the arm as the command line names it."""
        return f"{self.name}:{self.k}" if self.k else self.name

    def takes(self, c: int) -> bool:
        """Return whether points of so many requests at a time are taken of it."""
        return self.most is None or c <= self.most

    def environment(self) -> dict[str, str]:
        """Return the variables that choose the runner and the plugin."""
        kind = self.kind
        chosen = {"VLLM_USE_V2_MODEL_RUNNER": "1" if kind.runner == "v2" else "0"}
        # The other arms must be vLLM as it is: no plugin of any kind.
        return chosen if kind.plugin else {**chosen, "VLLM_PLUGINS": ""}

    def engine_args(self, trim_explain: bool = False) -> dict[str, Any]:
        """Return the engine arguments that make the arm."""
        kind = self.kind
        args: dict[str, Any] = {}
        if kind.runner == "v2":
            args["logits_processors"] = ["grid.force:ForcedTokens"]
        if kind.plugin:
            settings = {"trim": kind.trimmed, "trim_explain": trim_explain}
            args["additional_config"] = {"mrv2_spec": settings}
        if kind.method == "none":
            return args
        method: dict[str, Any] = {"method": kind.method}
        if kind.method in ("ngram", "ngram_gpu"):
            method |= PROMPT_LOOKUP
        if kind.method == "oracle":
            method = {
                "method": "custom_class",
                "model": "grid.oracle.OracleSpeculator",
            }
        args["speculative_config"] = {**method, "num_speculative_tokens": self.k}
        return args

    def why_not_as_meant(self, described: dict[str, Any]) -> str | None:
        """Return what an engine does otherwise than the arm stands for, or None.

        Args:
            described: what its worker says to be in force.
        """
        # On a CPU vLLM never schedules ahead.
        if described["device"] == "cpu" or not self.kind.ahead:
            return None
        if described["async_scheduling"]:
            return None
        return f"{self.label} does not schedule asynchronously, which it stands for"

    def why_not_here(self, on_cpu: bool) -> str | None:
        """Return what this machine lacks to run the arm, or None."""
        kind = self.kind
        if on_cpu and kind.not_on_cpu:
            return kind.not_on_cpu
        if kind.package and find_spec(kind.package) is None:
            return f"the package {kind.package} is not installed"
        if not on_cpu and kind.plugin and kind.method == "suffix":
            return None if find_spec("cupy") else "the package cupy is not installed"
        return None


def parse_arms(text: str) -> list[Arm]:
    """Parse ``ngram:16,v2-intree-ngram:16@64,v2-none``.

    What follows an ``@`` is the arm's ``most``.

    Raises:
        ValueError: an unknown name, or a number that is missing or not wanted.
    """
    arms = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        whole, limited, most = part.partition("@")
        name, _, number = whole.partition(":")
        if name not in KINDS:
            raise ValueError(f"unknown arm {name!r}: one of {', '.join(KINDS)}")
        drafts = KINDS[name].method != "none"
        if drafts != number.isdigit() or (drafts and int(number) < 1):
            wanted = f"{name}:K, K being at least 1" if drafts else f"{name} without k"
            raise ValueError(f"arm {part!r} must be {wanted}")
        if limited and not (most.isdigit() and int(most) >= 1):
            raise ValueError(f"arm {part!r}: after @ comes a number, at least 1")
        arms.append(Arm(name, int(number or 0), int(most) if limited else None))
    if not arms or len(set(arms)) != len(arms):
        raise ValueError("name at least one arm, and each arm once")
    return arms
