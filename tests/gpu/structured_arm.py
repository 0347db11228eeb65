"""One arm of the structured-output test, run as a child process."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from tests.engine.worker import sampling_params


def main() -> None:
    """Answer the job's requests and write their tokens and the counters as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    job = json.loads(args.job.read_text())

    from vllm import LLM

    from mrv2_spec.integration import is_installed, read_counters

    llm = LLM(
        model=job["model"],
        dtype="bfloat16",
        max_model_len=320,
        max_num_seqs=16,
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.03,
        **job["engine"],
    )
    rounds = [
        llm.generate(
            [{"prompt_token_ids": prompt} for _, _, prompt, _ in job["actions"]],
            [sampling_params(options) for *_, options in job["actions"]],
            use_tqdm=False,
        )
        for _ in range(job["rounds"])
    ]
    tokens = [[list(one.outputs[0].token_ids) for one in outputs] for outputs in rounds]
    totals = read_counters(llm) if is_installed() else None
    counters = None if totals is None else asdict(totals)
    args.out.write_text(json.dumps({"tokens": tokens, "counters": counters}))


if __name__ == "__main__":
    main()
