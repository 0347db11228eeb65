"""n-gram and suffix speculative decoding, and draft trimming, for vLLM's V2 runner.

Importing this package needs neither a GPU nor vLLM; the names below load what they
need when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrv2_spec.ngram import NgramSpeculator
    from mrv2_spec.suffix import SuffixSpeculator
    from mrv2_spec.trimmer import VariableDraftTrimmer

__version__ = "0.1.0"

_HOMES = {
    "NgramSpeculator": "mrv2_spec.ngram",
    "SuffixSpeculator": "mrv2_spec.suffix",
    "VariableDraftTrimmer": "mrv2_spec.trimmer",
}

__all__ = [
    "NgramSpeculator",
    "SuffixSpeculator",
    "VariableDraftTrimmer",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
