"""The entry point: when it puts the hooks in place, and when it leaves vLLM alone."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

vllm_config_module: Any = pytest.importorskip("vllm.config.vllm")
vllm_runner: Any = pytest.importorskip("vllm.v1.worker.gpu.model_runner")

from mrv2_spec import integration, plugin  # noqa: E402
from mrv2_spec.integration import patching  # noqa: E402


def vllm_attributes() -> list[Any]:
    """Return every attribute that a hook rebinds."""
    config, runner = vllm_config_module.VllmConfig, vllm_runner.GPUModelRunner
    return [
        config.__post_init__,
        config._get_v2_model_runner_unsupported_features,
        vllm_config_module.NgramGPUTypes,
        vllm_runner.RequestState,
        vllm_runner.init_speculator,
        vllm_runner.maybe_create_adaptive_verification_manager,
        vllm_runner.resolve_adaptive_cudagraph_mode,
        runner.initialize_kv_cache,
        runner.sample,
    ]


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
def originals() -> Iterator[list[Any]]:
    """Return vLLM's own attributes; check that they are back after the test."""
    integration.uninstall()
    before = vllm_attributes()
    yield before
    integration.uninstall()
    assert vllm_attributes() == before
    assert not patching._applied


def test_registers_on_the_installed_vllm(originals: list[Any]) -> None:
    plugin.register()
    assert integration.is_installed()
    changed = [a is not b for a, b in zip(vllm_attributes(), originals, strict=True)]
    # NgramGPUTypes is rebound during a call only.
    assert changed == [True, True, False, *[True] * 6]


def test_registering_twice_patches_once(originals: list[Any]) -> None:
    plugin.register()
    once = vllm_attributes()
    plugin.register()
    integration.install()
    assert vllm_attributes() == once


def test_uninstalling_twice(originals: list[Any]) -> None:
    plugin.register()
    integration.uninstall()
    assert vllm_attributes() == originals
    integration.uninstall()
    assert vllm_attributes() == originals
    plugin.register()
    assert vllm_attributes() != originals


def test_switched_off(
    originals: list[Any], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MRV2_SPEC", "0")
    plugin.register()
    assert vllm_attributes() == originals
    assert not integration.is_installed()
    assert lines == ["mrv2-spec is off: MRV2_SPEC=0"]


@pytest.mark.parametrize("found", ["0.31.0", "0.34.0", "0.33.1", "0.33.0rc1", None])
def test_unsupported_vllm(
    found: str | None,
    originals: list[Any],
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plugin, "_vllm_version", lambda: found)
    plugin.register()
    assert vllm_attributes() == originals
    (line,) = lines
    assert f"vLLM {found} is not supported; install one of 0.32.0, 0.33.0" in line
    assert "\n" not in line


@pytest.mark.parametrize("found", ["0.32.0", "0.33.0", "0.32.0+cpu", "0.33.0+cu130"])
def test_supported_versions(found: str) -> None:
    assert integration.is_supported(found)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (vllm_config_module.VllmConfig, "_get_v2_model_runner_unsupported_features"),
        (vllm_config_module.VllmConfig, "__post_init__"),
        (vllm_runner, "init_speculator"),
        (vllm_runner, "maybe_create_adaptive_verification_manager"),
        (vllm_runner.GPUModelRunner, "sample"),
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
        assert vllm_attributes() == before
    message = str(caught.value)
    assert name in message and "takes (something, else_), expected (" in message
    assert "install a supported vLLM, or set MRV2_SPEC=0" in message
    assert "\n" not in message
    assert not integration.is_installed()


def test_missing_attribute_leaves_vllm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(vllm_runner, "resolve_adaptive_cudagraph_mode")
        config = vllm_config_module.VllmConfig
        before = (config.__post_init__, vllm_runner.init_speculator)
        with pytest.raises(patching.PatchError, match="does not exist in this vLLM"):
            plugin.register()
        assert (config.__post_init__, vllm_runner.init_speculator) == before
