"""Settings that vLLM has no key for: ``mrv2_spec`` in its additional config."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from mrv2_spec.errors import UserError

KEY = "mrv2_spec"
# Tokens of the memory are numbered in 31 bits, with room to go round.
MAX_TOKENS = 2**30

Tie = Literal["earliest", "latest"]
Scoring = Literal["learned", "reference"]


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, with their defaults."""

    tie: Tie = "latest"
    """Which of several equally long n-gram matches is continued."""
    scoring: Scoring = "learned"
    """How suffix decoding chooses: by votes that learned what the target accepts, or
    as the CPU reference does, by counts."""
    corpus_tokens: int = 4 * 2**20
    """Tokens of other requests that suffix decoding remembers."""
    memory_file: str | None = None
    """A memory file that suffix decoding starts with, see docs/corpus.md."""
    trim: bool = True
    """Whether only the drafts worth it are verified."""
    cost_file: str | None = None
    """Where what steps cost is kept from one start to the next."""
    trim_explain: bool = False
    """Whether the log says now and then what the trimmer chose, and why."""


class SettingsError(UserError):
    """A setting that cannot work; the message names it and the remedy.

    Not a ``ValueError``: the validation of vLLM's configuration would wrap that in a
    report of several lines.
    """


def parse_settings(additional_config: Any) -> Settings:
    """Check the ``mrv2_spec`` part of vLLM's additional configuration.

    Args:
        additional_config: vLLM's ``additional_config``: a mapping, or anything else
            when the user set none.

    Raises:
        SettingsError: an unknown key, or a value of the wrong kind.
    """
    if not isinstance(additional_config, Mapping):
        return Settings()
    given = additional_config.get(KEY, {})
    if not isinstance(given, Mapping):
        raise SettingsError(
            f"additional_config[{KEY!r}]={given!r} must be an object such as "
            '{"tie": "latest"}'
        )
    known = {field.name for field in fields(Settings)}
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
            raise SettingsError(
                f"additional_config[{KEY!r}] has the unknown key {name!r}; "
                f"did you mean {near[0]!r}? Known keys: {', '.join(sorted(known))}"
            )
    settings = Settings(**given)
    for name, allowed in (("tie", get_args(Tie)), ("scoring", get_args(Scoring))):
        value = getattr(settings, name)
        if value not in allowed:
            raise SettingsError(
                f"{KEY}.{name}={value!r} must be one of {', '.join(allowed)}"
            )
    for name in ("memory_file", "cost_file"):
        path = getattr(settings, name)
        if path is not None and not (isinstance(path, str) and path):
            raise SettingsError(f"{KEY}.{name}={path!r} must be the path of a file")
    for name in ("trim", "trim_explain"):
        if not isinstance(getattr(settings, name), bool):
            raise SettingsError(
                f"{KEY}.{name}={getattr(settings, name)!r} must be true or false"
            )
    tokens = settings.corpus_tokens
    whole = isinstance(tokens, int) and not isinstance(tokens, bool)
    if not (whole and 1 <= tokens <= MAX_TOKENS):
        raise SettingsError(
            f"{KEY}.corpus_tokens={tokens!r} must be a whole number of at least 1 and "
            f"at most {MAX_TOKENS}"
        )
    return settings
