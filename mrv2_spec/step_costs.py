"""What a step costs by its number of tokens, as measured at start."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Without a measurement: the tokens of a step that costs twice a step of one, as seen
# with an 8 B model on an H200, and with a small one on a CPU.
_TOKENS_OF_TWICE_THE_COST = {"cuda": 200.0, "cpu": 8.0}


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Milliseconds by tokens.

    Args:
        tokens: [n] ascending token counts that were measured.
        ms: [n] what they cost, never falling.
        max_graph_tokens: up to here a step is padded to the next of ``tokens``; above
            it costs lie on the line between two of them.
    """

    tokens: Floats
    ms: Floats
    max_graph_tokens: int

    @classmethod
    def of(
        cls, samples: Sequence[tuple[int, float]], max_graph_tokens: int
    ) -> "CostCurve":
        """Build a curve of the least of each size's samples.

        The least: whatever else runs on the GPU meanwhile only makes steps longer.

        Raises:
            ValueError: no samples, or a cost that is no positive number.
        """
        if not samples:
            raise ValueError("no step was measured")
        sizes = sorted({size for size, _ in samples})
        ms = [min(float(cost) for s, cost in samples if s == size) for size in sizes]
        if not all(np.isfinite(cost) and cost > 0 for cost in ms):
            raise ValueError("a step cost is no positive number")
        return cls(
            np.asarray(sizes, np.float64),
            np.maximum.accumulate(np.asarray(ms)),
            max_graph_tokens,
        )

    @classmethod
    def guess(cls, device_type: str) -> "CostCurve":
        """Return a curve for where nothing was measured."""
        far = 2.0**20
        twice = _TOKENS_OF_TWICE_THE_COST.get(
            device_type, _TOKENS_OF_TWICE_THE_COST["cuda"]
        )
        return cls(
            np.array([0.0, far]),
            np.array([1.0, 1.0 + far / twice]),
            0,
        )

    def __call__(self, tokens: Floats) -> Floats:
        """Return what steps of so many tokens cost; [n] to [n]."""
        at = np.searchsorted(self.tokens, tokens)
        padded = self.ms[np.minimum(at, self.ms.shape[0] - 1)]
        smooth = np.interp(tokens, self.tokens, self.ms)
        if self.tokens.shape[0] > 1:
            slope = (self.ms[-1] - self.ms[-2]) / (self.tokens[-1] - self.tokens[-2])
            beyond = np.maximum(tokens - self.tokens[-1], 0.0)
            smooth = smooth + slope * beyond
        return np.where(tokens <= self.max_graph_tokens, padded, smooth)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The costs of a step without drafts and of one that verifies some.

    Args:
        plain: replays one-query graphs where they were captured.
        drafting: replays graphs that admit K + 1 tokens a request.
    """

    plain: CostCurve
    drafting: CostCurve

    @classmethod
    def of(cls, plain: CostCurve, drafting: CostCurve) -> "StepCosts":
        """Pair two curves; a plain step is not dearer than one that drafts.

        Where the measurement says so it was disturbed.
        """
        least = np.minimum(plain.ms, drafting(plain.tokens))
        return cls(replace(plain, ms=np.maximum.accumulate(least)), drafting)

    def describe(self) -> str:
        """Return some of the costs, for the log."""
        tokens = [1, 16, 64, 256, 512, 1024]
        plain, drafting = (
            " ".join(f"{ms:.2f}" for ms in curve(np.asarray(tokens, np.float64)))
            for curve in (self.plain, self.drafting)
        )
        sizes = " ".join(map(str, tokens))
        return f"steps of {sizes} tokens cost {plain} ms, with drafts {drafting} ms"
