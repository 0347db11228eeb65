"""Times calls inside a running engine by wrapping them where they are looked up."""

import inspect
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter_ns
from typing import Any
from unittest import mock

# What this project's replacements call the function that they replaced.
_ORIGINAL = "original"


class Stopwatch:
    """Adds up the time spent in wrapped calls, by name.

    A wrapped call costs about a quarter of a microsecond more. Times are inclusive: of
    nested calls each has all of its own.
    """

    def __init__(self) -> None:
        self._spent: dict[str, int] = defaultdict(int)
        self._undo = ExitStack()

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call, timed."""
        spent = self._spent

        def call_timed(*args: Any, **kwargs: Any) -> Any:
            begun = perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                spent[name] += perf_counter_ns() - begun

        return call_timed

    def watch(self, name: str, owner: Any, attribute: str) -> None:
        """Time an attribute's calls until ``close``; nothing where there is none."""
        call = getattr(owner, attribute, None) if owner is not None else None
        if call is not None:
            self.put(owner, attribute, self.timed(name, call))

    def put(self, owner: Any, attribute: str, call: Callable[..., Any]) -> None:
        """Put something in an attribute's place until ``close``."""
        self._undo.enter_context(mock.patch.object(owner, attribute, call))

    def watch_hook(self, name: str, owner: Any, attribute: str) -> None:
        """Time a replaced function of vLLM as ``hook NAME``, without what it replaced.

        Its time is that of the outermost replacement less that of vLLM's own function;
        it may be one of several replacements, each around the one before.
        """
        outer = inspect.getattr_static(owner, attribute, None)
        cell = _innermost(outer)
        if cell is None:
            return
        spent, key = self._spent, f"hook {name}"
        vllms_own = cell.cell_contents

        def inner(*args: Any, **kwargs: Any) -> Any:
            begun = perf_counter_ns()
            try:
                return vllms_own(*args, **kwargs)
            finally:
                spent[key] -= perf_counter_ns() - begun

        cell.cell_contents = inner
        self._undo.callback(setattr, cell, "cell_contents", vllms_own)
        self.put(owner, attribute, self.timed(key, outer))

    def take(self) -> dict[str, int]:
        """Return the nanoseconds spent since the last call, by name."""
        spent = dict(self._spent)
        self._spent.clear()
        return spent

    def close(self) -> None:
        """Put everything back as it was."""
        self._undo.close()


def _innermost(function: Any) -> Any:
    """Return the closure cell that holds vLLM's own function, or None."""
    cell = None
    while (getattr(function, "__module__", None) or "").startswith("mrv2_spec."):
        names = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if _ORIGINAL not in names:
            break
        cell = function.__closure__[names.index(_ORIGINAL)]
        function = cell.cell_contents
    return cell
