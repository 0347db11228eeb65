"""One demo run in a process of its own: ``python -m mrv2_spec.demo.worker FD``.

Reads a job as JSON from standard input and writes one JSON object a line to the file
descriptor FD: ``{"tokens": n}`` as tokens come, at the end ``{"result": {...}}``. What
vLLM logs goes to standard output and error.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

from mrv2_spec.demo.job import ENVIRONMENT, Job, Result, encode

MAX_NUM_SEQS = 4
PROMPT_LOOKUP_MIN = 2
PROMPT_LOOKUP_MAX = 4


def main() -> None:
    """Run the job and report."""
    job = Job(**json.load(sys.stdin))
    os.environ.update(ENVIRONMENT)
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as events:

        def report(event: dict[str, Any]) -> None:
            events.write(json.dumps(event) + "\n")

        report({"result": encode(run(job, report))})


def run(job: Job, report: Any) -> Result:
    """Load the model, generate greedily, and count.

    Args:
        job: what to run.
        report: called with ``{"tokens": n}`` after each step, n over all prompts.
    """
    from vllm import LLM, SamplingParams

    from mrv2_spec.integration import read_counters

    speculation = {
        "method": "ngram",
        "num_speculative_tokens": job.num_speculative_tokens,
        "prompt_lookup_min": PROMPT_LOOKUP_MIN,
        "prompt_lookup_max": PROMPT_LOOKUP_MAX,
    }
    llm = LLM(
        model=job.model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=job.max_model_len,
        max_num_seqs=MAX_NUM_SEQS,
        speculative_config=speculation if job.num_speculative_tokens else None,
        disable_log_stats=True,
    )
    report({"tokens": 0})
    params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens)
    engine = llm.llm_engine
    started = time.perf_counter()
    for number, token_ids in enumerate(job.prompt_token_ids):
        engine.add_request(str(number), {"prompt_token_ids": token_ids}, params)
    outputs: list[list[int]] = [[] for _ in job.prompt_token_ids]
    steps = [0] * len(outputs)
    while engine.has_unfinished_requests():
        for output in engine.step():
            number = int(output.request_id)
            token_ids = list(output.outputs[0].token_ids)
            steps[number] += len(token_ids) > len(outputs[number])
            outputs[number] = token_ids
        report({"tokens": sum(map(len, outputs))})
    seconds = time.perf_counter() - started
    totals = read_counters(llm) if job.num_speculative_tokens else None
    counters = None if totals is None else asdict(totals)
    return Result(outputs, steps, seconds, counters)


if __name__ == "__main__":
    main()
