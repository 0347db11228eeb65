"""The demo's own prompts, and the user's from a file."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from mrv2_spec.errors import UserError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message."""

    name: str
    """What the tables call it."""
    text: str


_CODE_EDIT = '''\
Copy this Python code and add a docstring to the second function. Keep everything else \
as it is.

```python
def read_numbers(path):
    """Return the numbers of a text file, one per line."""
    numbers = []
    with open(path) as file:
        for line in file:
            numbers.append(float(line))
    return numbers

def average(path):
    numbers = read_numbers(path)
    return sum(numbers) / len(numbers)
```'''

_JSON_RECORDS = """\
Complete this JSON list. Write all five records.

[
  {"id": 1, "city": "Paris", "country": "France", "river": "Seine"},
  {"id": 2, "city": "London", "country": "England", "river": "Thames"},
  {"id": 3, "city": "Vienna","""

_LIST = (
    "List ten things to check before a long bicycle tour. Begin every line with "
    '"Check that".'
)
_PROSE = "Tell a short story about a lighthouse keeper who finds a letter in a bottle."

# From much to copy to nothing to copy; a model of this size follows them loosely.
DEMO_PROMPTS = (
    Prompt("code edit", _CODE_EDIT),
    Prompt("JSON records", _JSON_RECORDS),
    Prompt("list", _LIST),
    Prompt("free prose", _PROSE),
)


def load_prompts(path: Path) -> tuple[Prompt, ...]:
    """Read the user's prompts.

    Args:
        path: text whose prompts are separated by blank lines, or, if the name ends in
            ``.jsonl``, one JSON object a line with the key ``prompt``.

    Raises:
        UserError: the file cannot be read or holds no prompt.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"--prompt-file {path} cannot be read: {reason}") from error
    if path.suffix == ".jsonl":
        texts = _from_json_lines(path, content)
    else:
        texts = [block.strip() for block in re.split(r"\n\s*\n", content)]
    prompts = tuple(
        Prompt(f"prompt {number}", text)
        for number, text in enumerate(filter(None, texts), start=1)
    )
    if not prompts:
        raise UserError(
            f"--prompt-file {path} holds no prompt: write prompts separated by blank "
            'lines, or a .jsonl file of {"prompt": "..."} lines'
        )
    return prompts


def _from_json_lines(path: Path, content: str) -> list[str]:
    texts = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["prompt"]
        except (ValueError, TypeError, KeyError):
            text = None
        if not isinstance(text, str):
            raise UserError(
                f"--prompt-file {path}, line {number}: expected a JSON object with the "
                'key "prompt" and a text, such as {"prompt": "Hello"}'
            )
        texts.append(text.strip())
    return texts
