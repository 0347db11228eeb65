"""Runs all tests that need no GPU, in two processes: ``side_by_side.py PATH...``.

One process runs the tests under the paths and the other one all the rest, each with one
thread for torch, so that two cores are enough. What the first one says is held back
until both have ended; what the second one says appears as it comes.
"""

import os
import subprocess
import sys
import tempfile

PYTEST = [sys.executable, "-m", "pytest", "-m", "not gpu"]


def main(paths: list[str]) -> int:
    """Run both and return 1 if either of them failed."""
    # Compiling the reference of the learned scoring takes longer than all it is asked.
    env = {"OMP_NUM_THREADS": "1", "NUMBA_DISABLE_JIT": "1", **os.environ}
    with tempfile.TemporaryFile() as log:
        chosen = subprocess.Popen(
            [*PYTEST, "-p", "no:cacheprovider", *paths],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            rest = subprocess.run(
                [*PYTEST, *(f"--ignore={path}" for path in paths)],
                env=env,
                check=False,
            ).returncode
            first = chosen.wait()
        finally:
            chosen.terminate()
            chosen.wait()
            log.seek(0)
            sys.stdout.buffer.write(log.read())
            sys.stdout.flush()
    return int(first != 0 or rest != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
