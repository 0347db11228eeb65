"""The documents' tables come from the committed results."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_table_is_made_from_the_committed_results() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "tables.py"), "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
