"""The error of memory files and of what they are built from."""

from mrv2_spec.errors import UserError


class CorpusError(UserError):
    """A file or tokenizer that cannot be used, said in one line."""


def reason(error: OSError) -> str:
    """Return what the system said, without the number and the path."""
    return error.strerror or str(error)
