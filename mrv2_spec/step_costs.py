"""What a step costs by its number of tokens, as measured at start."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Tokens already computed for each request of a measured plain step.
CONTEXT_LEN = 512

# Without a measurement: the tokens of a step that costs twice a step of one, as seen
# with an 8 B model on an H200, and with a small one on a CPU.
_TOKENS_OF_TWICE_THE_COST = {"cuda": 200.0, "cpu": 8.0}


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Milliseconds by tokens.

    Args:
        tokens: [n] ascending token counts that were measured.
        ms: [n] what they cost, as measured: more tokens can take less, where a library
            has a better kernel for them.
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
            np.asarray(sizes, np.float64), np.asarray(ms, np.float64), max_graph_tokens
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
            # As from half the tokens on: the last two sizes may be of two kernels.
            half = np.searchsorted(self.tokens, self.tokens[-1] / 2)
            at_half = min(int(half), self.tokens.shape[0] - 2)
            more_ms = max(self.ms[-1] - self.ms[at_half], 0.0)
            slope = more_ms / (self.tokens[-1] - self.tokens[at_half])
            smooth = smooth + slope * np.maximum(tokens - self.tokens[-1], 0.0)
        return np.where(tokens <= self.max_graph_tokens, padded, smooth)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The costs of a step without drafts and of one that verifies some.

    A draft is one more row for its request, but reads the request's context no second
    time: what contexts cost goes by the number of requests, not of tokens.

    Args:
        plain: by requests of one token each, with a context of ``CONTEXT_LEN``;
            replays one-query graphs where they were captured.
        drafting: by tokens, without contexts; replays graphs that admit K + 1 tokens a
            request.
        bare: as ``plain``, without contexts.
    """

    plain: CostCurve
    drafting: CostCurve
    bare: CostCurve

    @classmethod
    def of(cls, plain: CostCurve, drafting: CostCurve, bare: CostCurve) -> "StepCosts":
        """Put curves together; a plain step is not dearer than one that drafts.

        Where the measurement says so it was disturbed, and so where a context costs
        less than none.
        """
        bare = replace(bare, ms=np.minimum(bare.ms, drafting(bare.tokens)))
        plain = replace(plain, ms=np.maximum(plain.ms, bare(plain.tokens)))
        return cls(plain, drafting, bare)

    @classmethod
    def without_contexts(cls, plain: CostCurve, drafting: CostCurve) -> "StepCosts":
        """Return costs for where nothing is known of what contexts cost."""
        return cls(plain, drafting, plain)

    def context(self, requests: Floats) -> Floats:
        """Return what the contexts of so many requests cost; [n] to [n]."""
        return np.maximum(self.plain(requests) - self.bare(requests), 0.0)

    def describe(self) -> str:
        """Return some of the costs, for the log."""
        sizes = np.array([1.0, 16.0, 64.0, 256.0])
        tokens = np.array([64.0, 256.0, 512.0, 1024.0])

        def said(ms: Floats) -> str:
            return " ".join(f"{one:.2f}" for one in ms)

        return (
            f"steps of 1 16 64 256 requests cost {said(self.plain(sizes))} ms, "
            f"{said(self.context(sizes))} of it for contexts, "
            f"64 256 512 1024 tokens with drafts {said(self.drafting(tokens))} ms"
        )
