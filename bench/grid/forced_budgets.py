"""Makes a trimmer verify a chosen number of places, and times its steps."""

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from grid.steps_seen import Launches


class ForcedBudgets:
    """Goes through budgets, a block of steps each, until ``stop``.

    Args:
        runner: the model runner, with a trimmer.
        budgets: draft places of a step; where it has fewer, all of these.
        block: steps of each in a row.
    """

    def __init__(self, runner: Any, budgets: Sequence[int], block: int) -> None:
        from mrv2_spec.integration.sleeping import _GPU_WAITED

        self._runner, self._manager = runner, runner.adaptive_verification
        self._gpu_waited = _GPU_WAITED
        self._budgets, self._block = list(budgets), block
        self._steps = 0
        self._launches = Launches()
        self._ms: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._reckoned_ms: dict[tuple[int, int], list[float]] = defaultdict(list)
        self._waited: dict[tuple[int, int], list[bool]] = defaultdict(list)
        policy = self._manager.policy
        self._originals = policy.choose, self._manager.choose
        policy.asleep = False
        policy.choose = self._choose_budget
        self._manager.choose = self._choose

    def _choose_budget(
        self, num_non_draft: int, num_drafting: int, num_drafts: int, most: int
    ) -> int:
        wanted = self._budgets[self._steps // self._block % len(self._budgets)]
        return max(0, min(wanted, num_drafts, most))

    def _choose(self, scheduler_output: Any) -> int:
        now = time.perf_counter()
        manager = self._manager
        budget: int = self._originals[1](scheduler_output)
        kind = (manager.num_requests, budget)
        # Beside prompts nothing is reckoned.
        decodes = manager.expected_ms > 0
        self._steps += decodes
        alike = kind if decodes else None
        known = self._launches.note(now, alike, manager.expected_ms)
        if known is not None:
            took_ms, reckoned_ms = known
            self._ms[kind].append(took_ms)
            self._reckoned_ms[kind].append(reckoned_ms)
            waited = getattr(self._runner, self._gpu_waited, False)
            self._waited[kind].append(bool(waited))
        return budget

    def stop(self) -> list[dict[str, float]]:
        """Let the trimmer choose again; return what steps took.

        Returns:
            By ``requests`` and ``places``: the number of ``steps``, their median
            ``ms``, what they should have taken by the costs measured at start
            (``reckoned_ms``), and in which share of them the device waited for the
            host (``waited``).
        """
        self._manager.policy.choose, self._manager.choose = self._originals
        return [
            {
                "requests": requests,
                "places": places,
                "steps": len(ms),
                "ms": median(ms),
                "reckoned_ms": fmean(self._reckoned_ms[requests, places]),
                "waited": fmean(self._waited[requests, places]),
            }
            for (requests, places), ms in sorted(self._ms.items())
        ]
