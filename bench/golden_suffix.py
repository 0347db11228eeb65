"""Count how many recorded drafts of the CPU suffix cache the count model gives.

    python bench/golden_suffix.py [--every N] [--out DIR]

Every recorded step at factors 1 and 2. Where counts alone decide, its draft must
be the recorded one: tokens, match length, source, score and probabilities to 1e-4.
Where counts are equal, the recorded draft must be among those that some order of the
ties allows. `--every N` looks at one step in N and saves nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

from harness import RESULTS, machine, save

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.reference.golden import golden_path, load_runs, replay  # noqa: E402


def main() -> None:
    """Replay every stream and write ``suffix_golden.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    try:
        runs = load_runs()
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise SystemExit(f"{golden_path()} cannot be read: {error}") from None
    results: dict[str, Counter[str]] = {}
    print(f"{'run':26}{'steps':>9}{'exact':>9}{'ambiguous':>11}{'wrong':>7}{'s':>7}")
    for name, run in runs.items():
        # The streams without a memory are many and short.
        label = "local" if name.startswith("local") else name
        began = time.monotonic()
        found = replay(run, args.every)
        results.setdefault(label, Counter()).update(found)
        if label != "local":
            print(
                f"{label:26}{found['steps']:9}{found['exact']:9}{found['allowed']:11}"
                f"{found['wrong']:7}{time.monotonic() - began:7.0f}",
                flush=True,
            )
    total: Counter[str] = Counter()
    for found in results.values():
        total.update(found)
    print(dict(total))
    if args.every == 1:
        figures = [
            {
                "run": label,
                "steps": found["steps"],
                "exact": found["exact"],
                "ambiguous_allowed": found["allowed"],
                "wrong": found["wrong"],
            }
            for label, found in results.items()
        ]
        print("saved", save("suffix_golden", {**machine(), "runs": figures}, args.out))
    if total["wrong"]:
        raise SystemExit(f"{total['wrong']} recorded drafts are not the model's")


if __name__ == "__main__":
    main()
