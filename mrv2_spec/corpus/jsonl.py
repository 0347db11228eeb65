"""Read responses from JSON lines: ``{"text": "..."}`` or ``{"token_ids": [1, 2]}``."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mrv2_spec.corpus.errors import CorpusError, reason

_MAX_TOKEN = 2**31 - 1
# Line numbers that an error names before it counts the rest.
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Line:
    """One line that holds a response, or says why it does not."""

    number: int
    end: int
    """Bytes of the file up to here."""
    text: str | None = None
    token_ids: NDArray[np.int32] | None = None
    problem: str | None = None


def read_lines(path: Path, num_ids: int | None) -> Iterator[Line]:
    """Yield a file's lines but the blank ones.

    Args:
        path: the file.
        num_ids: what token ids must be below, if known.

    Raises:
        CorpusError: the file cannot be read.
    """
    end = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                end += len(line)
                if not line.strip():
                    continue
                try:
                    content = _parse(line, num_ids)
                except ValueError as error:
                    yield Line(number, end, problem=str(error))
                    continue
                if isinstance(content, str):
                    yield Line(number, end, text=content)
                else:
                    yield Line(number, end, token_ids=content)
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {reason(error)}") from error


def _parse(line: bytes, num_ids: int | None) -> str | NDArray[np.int32]:
    try:
        content = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    given = {"text", "token_ids"} & set(content) if isinstance(content, dict) else ()
    if len(given) != 1:
        raise ValueError('not an object with either "text" or "token_ids"')
    if "text" in given:
        return _check_text(content["text"])
    return _check_tokens(content["token_ids"], num_ids)


def _check_text(text: object) -> str:
    if not isinstance(text, str):
        raise ValueError('"text" is not a string')
    if not text:
        raise ValueError('"text" is empty')
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise ValueError('"text" is not Unicode') from None
    return text


def _check_tokens(tokens: object, num_ids: int | None) -> NDArray[np.int32]:
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ValueError('"token_ids" is not a list of whole numbers')
    if not tokens:
        raise ValueError('"token_ids" is empty')
    highest = _MAX_TOKEN if num_ids is None else num_ids - 1
    for token in tokens:
        if not 0 <= token <= highest:
            raise ValueError(f"token id {token} is not from 0 to {highest}")
    return np.array(tokens, dtype=np.int32)


def describe_broken(broken: Sequence[Line]) -> str:
    """Name broken lines in one line."""
    named = [f"line {line.number} ({line.problem})" for line in broken[:_NAMED]]
    if len(broken) > _NAMED:
        named.append(f"and {len(broken) - _NAMED} more")
    return ", ".join(named)
