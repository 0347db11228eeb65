"""A `serve` process as its parent sees it."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from grid.arms import Arm
from grid.shapes import Shape

BENCH = Path(__file__).resolve().parents[1]
STOP_SECONDS = 20.0


class EngineFailed(RuntimeError):
    """An engine did not start, died, or gave no answer; one line."""


class Child:
    """An engine in a process of its own.

    Args:
        arm: what it runs.
        shape: the model's shape.
        model: the folder of its configuration.
        kv_gib: size of its KV cache.
        cache: where vLLM keeps what it compiled, shared by all engines.
        log: the file that takes what it prints.
        more: what the process is told beside these.
        module: what it runs.
        in_process: whether the engine is in that process, not in one of its own.
    """

    def __init__(
        self,
        arm: Arm,
        shape: Shape,
        model: Path,
        *,
        kv_gib: float,
        cache: Path,
        log: Path,
        more: dict[str, Any] | None = None,
        module: str = "grid.serve",
        in_process: bool = False,
    ) -> None:
        self.arm = arm
        self.described: dict[str, Any] = {}
        self._log = log
        self._rest = b""
        path = os.pathsep.join(filter(None, [str(BENCH), os.environ.get("PYTHONPATH")]))
        environment = {
            **os.environ,
            # As users run it: the engine in a process of its own.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(cache),
            **shape.environment,
            **arm.environment(),
            "PYTHONPATH": path,
            # What is installed is measured, not what lies in the current folder.
            "PYTHONSAFEPATH": "1",
        }
        environment.pop("MRV2_SPEC", None)
        reader, writer = os.pipe()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(writer)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env=environment,
                pass_fds=[writer],
                # A group of its own, ended as a whole.
                start_new_session=True,
            )
        os.close(writer)
        self._answers = reader
        self._send(
            {
                "arm": arm.name,
                "k": arm.k,
                "shape": shape.name,
                "model": str(model),
                "kv_gib": kv_gib,
                **(more or {}),
            }
        )

    def wait_until_ready(self, seconds: float) -> float:
        """Return the seconds that the start took.

        Raises:
            EngineFailed: it did not start in time.
        """
        answer = self._receive(seconds)
        if "error" in answer:
            raise EngineFailed(self._explain(answer["error"]))
        self.described = answer
        return float(answer["ready"])

    def measure_costs(self, seconds: float) -> dict[str, Any] | None:
        """Let the engine measure its costs alone; return what its worker says.

        Raises:
            EngineFailed: no answer in time.
        """
        self._send({"measure_costs": True})
        costs: dict[str, Any] | None = self._receive(seconds).get("costs")
        return costs

    def measure(
        self,
        workload: str,
        c: int,
        length: int,
        seconds: float,
        turn: int | None = None,
    ) -> Any:
        """Return the answer to a point: its runs, or ``mismatch``.

        Args:
            workload: the point's.
            c: requests at a time.
            length: output tokens of each request; 0: the workload's own.
            seconds: to wait for the answer.
            turn: which one of the point, from 0; None: the whole point.

        Raises:
            EngineFailed: no answer in time, or an error in place of one.
        """
        self._send({"workload": workload, "c": c, "length": length, "turn": turn})
        answer = self._receive(seconds)
        if "error" in answer:
            raise EngineFailed(self._explain(answer["error"]))
        return answer

    def stop(self) -> None:
        """End the process and those it started."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=STOP_SECONDS)
        # The engine's own process may outlive its parent.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._answers)

    def _send(self, content: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineFailed(self._explain("its process died")) from None

    def _receive(self, seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise EngineFailed(self._explain(f"no answer in {seconds:.0f} s"))
            more = os.read(self._answers, 1 << 16)
            if not more:
                raise EngineFailed(self._explain("its process died"))
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _explain(self, what: str) -> str:
        return f"{what} (log: {self._log})"
