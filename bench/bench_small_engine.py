"""Decode speed of a small real model with and without speculation, arm by arm.

    python bench/bench_small_engine.py MODEL_DIR [--out DIR] [--commit HASH]

The model is so small that the host sets the pace: this shows what drafting, trimming
and counting cost the host, not what speculation gains on a large model. Each arm is an
engine of its own with CUDA graphs; its prompts run twice and the second run counts.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import RESULTS, machine, save

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ROOT / "tests" / "data" / "identity_prompts.jsonl"
MAX_TOKENS = 192
NUM_REQUESTS = (1, 16, 64)
LENGTHS = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
# name -> (MRV2_SPEC, speculative config)
ARMS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "no speculation": ("0", None),
    "in-tree n-gram k=5": (
        "0",
        {"method": "ngram", "num_speculative_tokens": 5, **LENGTHS},
    ),
    "in-tree n-gram k=16": (
        "0",
        {"method": "ngram", "num_speculative_tokens": 16, **LENGTHS},
    ),
    "n-gram k=5": ("1", {"method": "ngram", "num_speculative_tokens": 5, **LENGTHS}),
    "n-gram k=16": ("1", {"method": "ngram", "num_speculative_tokens": 16, **LENGTHS}),
    "suffix k=16": ("1", {"method": "suffix", "num_speculative_tokens": 16}),
}


def run_arm(model: str, speculation: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Run one engine at every number of requests."""
    from vllm import LLM, SamplingParams

    prompts = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    llm = LLM(
        model=model,
        max_model_len=2048,
        max_num_seqs=max(NUM_REQUESTS),
        enable_prefix_caching=True,
        gpu_memory_utilization=0.5,
        speculative_config=speculation,
        disable_log_stats=True,
    )
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    points = []
    for num_requests in NUM_REQUESTS:
        batch = [
            {"prompt_token_ids": prompts[i % len(prompts)]["prompt_token_ids"]}
            for i in range(num_requests)
        ]
        for _ in range(2):
            started = time.perf_counter()
            llm.generate(batch, params, use_tqdm=False)
            seconds = time.perf_counter() - started
        points.append(
            {
                "num_requests": num_requests,
                "seconds": seconds,
                "tok_s": num_requests * MAX_TOKENS / seconds,
            }
        )
    return points


def main() -> None:
    """Run every arm in a process of its own and write ``small_engine.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    parser.add_argument("--arm", help="run this arm here and print its JSON")
    args = parser.parse_args()
    if args.arm:
        points = run_arm(args.model, ARMS[args.arm][1])
        sys.stdout.write("POINTS " + json.dumps(points) + "\n")
        return
    arms = {}
    for name, (plugin, _) in ARMS.items():
        done = subprocess.run(
            [sys.executable, __file__, args.model, "--arm", name],
            env={
                **os.environ,
                "MRV2_SPEC": plugin,
                "VLLM_USE_V2_MODEL_RUNNER": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            },
            capture_output=True,
            text=True,
        )
        lines = [x for x in done.stdout.splitlines() if x.startswith("POINTS ")]
        if done.returncode != 0 or not lines:
            raise SystemExit(f"{name}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        arms[name] = json.loads(lines[0].removeprefix("POINTS "))
        speeds = "".join(f"{point['tok_s']:10.0f}" for point in arms[name])
        print(f"{name:24s}{speeds}  tok/s at {NUM_REQUESTS} requests", flush=True)
    record = {**machine(args.commit), "max_tokens": MAX_TOKENS, "arms": arms}
    print("saved", save("small_engine", record, args.out))


if __name__ == "__main__":
    main()
