"""Keeps what steps cost in a file, for the next start on the same machine."""

import itertools
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mrv2_spec.errors import UserError
from mrv2_spec.step_costs import CostCurve, StepCosts

VERSION = 3
_CURVES = ("plain", "drafting", "bare")

# What a cost table is good for: names and values that must be the same again.
Identity = Mapping[str, str | int]


class CostFileError(UserError):
    """A cost table that cannot be used or written; one line."""


def read_costs(
    path: str | os.PathLike[str], identity: Identity
) -> tuple[StepCosts, list[int]]:
    """Read a cost table.

    Args:
        path: the file.
        identity: what it must have been measured for.

    Returns:
        The costs, and the sizes of the graphs that they were measured with.

    Raises:
        FileNotFoundError: there is no such file.
        CostFileError: it is broken, or of something else.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CostFileError(f"{path} is no cost table: {error}") from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise CostFileError(f"{path} is no cost table of version {VERSION}")
    found = content.get("measured_for")
    if found != dict(identity):
        other = found if isinstance(found, dict) else {}
        what = [
            f"{name} {other.get(name)!r}, not {value!r}"
            for name, value in identity.items()
            if other.get(name) != value
        ]
        raise CostFileError(f"{path} was measured for {what[0] if what else 'others'}")
    try:
        sizes = [int(size) for size in content["graph_sizes"]]
        plain, drafting, bare = (_curve(content[name]) for name in _CURVES)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CostFileError(f"{path} is broken: {error}") from error
    return StepCosts(plain, drafting, bare), sizes


def _curve(content: Any) -> CostCurve:
    tokens, ms = content["tokens"], content["ms"]
    if not tokens or len(tokens) != len(ms):
        raise ValueError("a curve has no points, or not a cost for each of them")
    if not all(math.isfinite(size) and size > 0 for size in tokens):
        raise ValueError("a curve has a size that is no positive number")
    rises = all(a < b for a, b in itertools.pairwise(tokens))
    costs = [float(cost) for cost in ms]
    if not rises or not all(math.isfinite(cost) and cost > 0 for cost in costs):
        raise ValueError("a curve's sizes do not rise, or a cost is not positive")
    most = int(content["max_graph_tokens"])
    return CostCurve(np.asarray(tokens, np.float64), np.asarray(costs), most)


def write_costs(
    path: str | os.PathLike[str],
    identity: Identity,
    costs: StepCosts,
    graph_sizes: Sequence[int],
) -> None:
    """Write a cost table, whole or not at all.

    Raises:
        CostFileError: the path cannot be written.
    """
    content = {
        "version": VERSION,
        "measured_for": dict(identity),
        "graph_sizes": list(graph_sizes),
        **{name: _encode(getattr(costs, name)) for name in _CURVES},
    }
    target = Path(path)
    try:
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=target.name)
        with os.fdopen(descriptor, "w") as out:
            json.dump(content, out, indent=1)
        os.replace(name, target)
    except OSError as error:
        raise CostFileError(f"{path} cannot be written: {error}") from error


def _encode(curve: CostCurve) -> dict[str, Any]:
    return {
        "tokens": [int(n) for n in curve.tokens],
        "ms": [round(float(ms), 5) for ms in curve.ms],
        "max_graph_tokens": curve.max_graph_tokens,
    }
