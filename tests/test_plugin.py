"""The entry point: when it puts the hooks in place, and when it leaves vLLM alone."""

import logging
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner")

from mrv2_spec import integration, plugin
from mrv2_spec.integration import patching

# The hooks go into these modules and their classes.
MODULES = [
    import_module(f"vllm.{name}")
    for name in (
        "config.speculative",
        "config.vllm",
        "engine.arg_utils",
        "sampling_params",
        "v1.core.sched.async_scheduler",
        "v1.core.sched.output",
        "v1.core.sched.scheduler",
        "v1.engine.async_llm",
        "v1.engine.core",
        "v1.metrics.loggers",
        "v1.metrics.stats",
        "v1.spec_decode.metrics",
        "v1.worker.gpu.async_utils",
        "v1.worker.gpu.cudagraph_utils",
        "v1.worker.gpu.model_runner",
        "v1.worker.gpu.structured_outputs",
        "v1.worker.gpu_worker",
        "v1.worker.worker_base",
    )
]
CONFIG = import_module("vllm.config.vllm").VllmConfig
RUNNER = import_module("vllm.v1.worker.gpu.model_runner")


def vllm_attributes() -> dict[tuple[str, str], Any]:
    """Return all that the modules and their classes hold."""
    owners = list(MODULES)
    for module in MODULES:
        owners += [
            value
            for value in vars(module).values()
            if isinstance(value, type) and value.__module__ == module.__name__
        ]
    return {
        (f"{owner.__name__}", name): value
        for owner in owners
        for name, value in vars(owner).items()
        if name != "_abc_impl"
    }


def differences(
    a: dict[tuple[str, str], Any], b: dict[tuple[str, str], Any]
) -> set[tuple[str, str]]:
    """Return the names of what is not the same object on both sides."""
    missing = object()
    return {key for key in a | b if a.get(key, missing) is not b.get(key, missing)}


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Return what the plugin logs."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    level = plugin.logger.level
    plugin.logger.addHandler(handler)
    plugin.logger.setLevel(logging.INFO)
    yield found
    plugin.logger.removeHandler(handler)
    plugin.logger.setLevel(level)


@pytest.fixture(autouse=True)
def originals() -> Iterator[Any]:
    """Return vLLM's own attributes; check that they are back after the test."""
    integration.uninstall()
    before = vllm_attributes()
    yield before
    integration.uninstall()
    assert not differences(vllm_attributes(), before)
    assert not patching._applied


def test_registers_on_the_installed_vllm(originals: Any) -> None:
    plugin.register()
    assert integration.is_installed()
    changed = differences(vllm_attributes(), originals)
    assert changed == {
        (applied.owner.__name__, applied.name) for applied in patching._applied
    }
    for name in (
        ("VllmConfig", "__post_init__"),
        (RUNNER.__name__, "init_speculator"),
        (RUNNER.__name__, "maybe_create_adaptive_verification_manager"),
        ("GPUModelRunner", "sample"),
        ("WorkerBase", "mrv2_spec_save_memory"),
        ("Scheduler", "update_from_output"),
        ("EngineCore", "mrv2_spec_counters"),
        ("SpecDecodingStats", "__dataclass_fields__"),
    ):
        assert name in changed


def test_registering_twice_patches_once(originals: Any) -> None:
    plugin.register()
    once = vllm_attributes()
    plugin.register()
    integration.install()
    assert not differences(vllm_attributes(), once)


def test_uninstalling_twice(originals: Any) -> None:
    plugin.register()
    integration.uninstall()
    assert not differences(vllm_attributes(), originals)
    integration.uninstall()
    assert not differences(vllm_attributes(), originals)
    plugin.register()
    assert differences(vllm_attributes(), originals)


def test_switched_off(
    originals: Any, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MRV2_SPEC", "0")
    plugin.register()
    assert not differences(vllm_attributes(), originals)
    assert not integration.is_installed()
    assert lines == ["mrv2-spec is off: MRV2_SPEC=0"]


@pytest.mark.parametrize("found", ["0.31.0", "0.34.0", "0.33.1", "0.33.0rc1", None])
def test_unsupported_vllm(
    found: str | None,
    originals: Any,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugin, "_vllm_version", lambda: found)
    plugin.register()
    assert not differences(vllm_attributes(), originals)
    (line,) = lines
    assert f"vLLM {found} is not supported; install one of 0.32.0, 0.33.0" in line
    assert "\n" not in line


@pytest.mark.parametrize("found", ["0.32.0", "0.33.0", "0.32.0+cpu", "0.33.0+cu130"])
def test_supported_versions(found: str) -> None:
    assert integration.is_supported(found)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (CONFIG, "_get_v2_model_runner_unsupported_features"),
        (CONFIG, "__post_init__"),
        (RUNNER, "init_speculator"),
        (RUNNER, "maybe_create_adaptive_verification_manager"),
        (RUNNER.GPUModelRunner, "sample"),
    ],
)
def test_other_signature_leaves_vllm_alone(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(something: Any, else_: Any = None) -> None:
        raise AssertionError("never called")

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, other)
        before = vllm_attributes()
        with pytest.raises(patching.PatchError) as caught:
            plugin.register()
        assert not differences(vllm_attributes(), before)
    message = str(caught.value)
    assert name in message and "takes (something, else_), expected (" in message
    assert "install a supported vLLM, or set MRV2_SPEC=0" in message
    assert "\n" not in message
    assert not integration.is_installed()


def test_missing_attribute_leaves_vllm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(RUNNER, "resolve_adaptive_cudagraph_mode")
        before = vllm_attributes()
        with pytest.raises(patching.PatchError, match="does not exist in this vLLM"):
            plugin.register()
        assert not differences(vllm_attributes(), before)
