"""Rebind attributes of vLLM: all of a module's or none, each checked first."""

import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, is_dataclass, make_dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class PatchError(RuntimeError):
    """vLLM does not look as it did in the versions that a hook was written for."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute to rebind.

    Args:
        attribute: dotted path inside the module, such as ``VllmConfig.__post_init__``.
        parameters: the parameter names that the original must have, in order; one
            tuple for each supported shape. Empty: the attribute must not exist yet.
        wrap: takes the original (None where there is none) and returns what takes its
            place.
    """

    attribute: str
    parameters: tuple[tuple[str, ...], ...]
    wrap: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class PatchField:
    """A field, None by default, to add to a dataclass that is sent between processes.

    Args:
        owner: dotted path of the dataclass inside the module.
        name: of the field; it must not exist yet.
        annotation: its type.
    """

    owner: str
    name: str
    annotation: Any


@dataclass(frozen=True, slots=True)
class _Applied:
    owner: Any
    name: str
    original: Any
    replacement: Any


_applied: list[_Applied] = []
_ABSENT = object()


def _resolve(module: ModuleType, attribute: str) -> tuple[Any, str, Any]:
    owner: Any = module
    *path, name = attribute.split(".")
    try:
        for part in path:
            owner = getattr(owner, part)
        return owner, name, getattr(owner, name)
    except AttributeError:
        raise PatchError(
            f"{module.__name__}.{attribute} does not exist in this vLLM; install one "
            "of the supported versions, or set MRV2_SPEC=0"
        ) from None


def _addition(module: ModuleType, patch: Patch) -> _Applied:
    path, _, name = patch.attribute.rpartition(".")
    owner = _resolve(module, path)[2] if path else module
    if hasattr(owner, name):
        raise PatchError(
            f"{module.__name__}.{patch.attribute} exists already; another plugin may "
            "have added it: remove one, or set MRV2_SPEC=0"
        )
    return _Applied(owner, name, _ABSENT, patch.wrap(None))


def _field(module: ModuleType, patch: PatchField) -> list[_Applied]:
    _, _, owner = _resolve(module, patch.owner)
    if not is_dataclass(owner) or patch.name in owner.__dataclass_fields__:
        raise PatchError(
            f"{module.__name__}.{patch.owner} is no dataclass, or has a field "
            f"{patch.name} already; install a supported vLLM, or set MRV2_SPEC=0"
        )
    donor: Any = make_dataclass(
        "donor", [(patch.name, patch.annotation, field(default=None))]
    )
    # Whoever lays out messages by these reads all three.
    return [
        _Applied(owner, name, vars(owner).get(name, _ABSENT), replacement)
        for name, replacement in (
            (
                "__dataclass_fields__",
                owner.__dataclass_fields__ | donor.__dataclass_fields__,
            ),
            (
                "__annotations__",
                owner.__annotations__ | {patch.name: patch.annotation},
            ),
            (patch.name, None),
        )
    ]


def apply(module: ModuleType, patches: Sequence[Patch | PatchField]) -> None:
    """Check all of a module's patches, then apply them.

    Raises:
        PatchError: an attribute is missing or takes other parameters; nothing was
            changed.
    """
    ready: list[_Applied] = []
    for patch in patches:
        if isinstance(patch, PatchField):
            ready += _field(module, patch)
            continue
        if not patch.parameters:
            ready.append(_addition(module, patch))
            continue
        owner, name, original = _resolve(module, patch.attribute)
        found = tuple(inspect.signature(original).parameters)
        if found not in patch.parameters:
            raise PatchError(
                f"{module.__name__}.{patch.attribute} takes ({', '.join(found)}), "
                f"expected ({') or ('.join(', '.join(p) for p in patch.parameters)}); "
                "install a supported vLLM, or set MRV2_SPEC=0"
            )
        # The raw attribute: a class method, say, must be put back as one.
        raw = inspect.getattr_static(owner, name)
        for earlier in ready:
            if earlier.owner is owner and earlier.name == name:
                # Another hook of the same attribute: the later goes around it.
                original = raw = earlier.replacement
        ready.append(_Applied(owner, name, raw, patch.wrap(original)))
    for applied in ready:
        setattr(applied.owner, applied.name, applied.replacement)
        _applied.append(applied)


def revert_all() -> None:
    """Give vLLM back its own attributes, the last one rebound first."""
    while _applied:
        applied = _applied.pop()
        now = inspect.getattr_static(applied.owner, applied.name, _ABSENT)
        if now is not applied.replacement:
            continue
        if applied.original is _ABSENT:
            delattr(applied.owner, applied.name)
        else:
            setattr(applied.owner, applied.name, applied.original)
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _PatchOnImport)]


def is_active() -> bool:
    """Tell whether any attribute is rebound, or waits for its module."""
    waiting = any(isinstance(finder, _PatchOnImport) for finder in sys.meta_path)
    return bool(_applied) or waiting


def apply_on_import(module_name: str, patches: Sequence[Patch | PatchField]) -> None:
    """Apply patches when a module is first imported, or now if it already was.

    Some modules must not be imported early: on a CPU host vLLM replaces parts of torch
    before it loads its V2 runner.
    """
    module = sys.modules.get(module_name)
    if module is not None:
        apply(module, patches)
    else:
        sys.meta_path.insert(0, _PatchOnImport(module_name, patches))


class _PatchOnImport(importlib.abc.MetaPathFinder):
    def __init__(self, module_name: str, patches: Sequence[Patch | PatchField]) -> None:
        self._module_name = module_name
        self._patches = patches
        self._looking = False

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module_name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader, self)
        return spec

    def patch(self, module: ModuleType) -> None:
        """Patch the module that was just imported, and look no further.

        Until then this finder stays: a module may be looked for and not imported, or
        its import may fail and be tried again.
        """
        apply(module, self._patches)
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _PatchingLoader(importlib.abc.Loader):
    def __init__(self, loader: Any, finder: _PatchOnImport) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        try:
            self._finder.patch(module)
        except PatchError:
            # Whoever imports the module again would get it without its patches.
            revert_all()
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
