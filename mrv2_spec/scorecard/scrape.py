"""Read a scrape from a server or a file."""

import http.client
import math
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from mrv2_spec.errors import UserError

_SECONDS = 10
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a scrape."""

    name: str
    labels: dict[str, str]
    value: float


def fetch(source: str) -> str:
    """Return the text of a scrape.

    Args:
        source: the address of a server, with or without ``/metrics``, or a file.

    Raises:
        UserError: it cannot be read.
    """
    if not source.lower().startswith(("http://", "https://")):
        try:
            return Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"cannot read {source} ({_reason(error)}); give a saved scrape, or the "
                "address of a server such as http://localhost:8000"
            ) from error
    address = source.rstrip("/")
    if address.lower() in ("http:", "https:"):
        raise UserError(
            f"{source} names no server; give an address such as http://localhost:8000"
        )
    if not address.endswith("/metrics"):
        address += "/metrics"
    try:
        with urllib.request.urlopen(address, timeout=_SECONDS) as reply:
            return str(reply.read().decode("utf-8"))
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UserError(
            f"cannot read {address} ({_reason(error)}); is the server up, and is this "
            "its address?"
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.URLError):
        # What the reason of an HTTP error says, it says itself.
        reason = error if isinstance(error, urllib.error.HTTPError) else error.reason
        return " ".join(str(reason).split())
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def parse(text: str) -> list[Sample]:
    """Return the samples of a scrape in Prometheus's text format.

    Comments, lines that are no sample and values that are no number are left out, and
    so is a last line without its end: a scrape that was cut there has half a number.
    """
    samples = []
    for line in text[: text.rfind("\n") + 1].splitlines():
        found = _SAMPLE.match(line.strip())
        if found is None or line.startswith("#"):
            continue
        name, labels, number = found.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        if math.isfinite(value):
            pairs = {
                key: re.sub(r"\\.", lambda m: _ESCAPES.get(m[0], m[0]), text)
                for key, text in _LABEL.findall(labels or "")
            }
            samples.append(Sample(name, pairs, value))
    return samples
