"""The README's scorecard: what a real server says after the demo's prompts.

    python bench/scorecard_sample.py [--max-tokens N] [--out DIR] [--commit C]

A server of SmolLM2-135M-Instruct on the CPU answers each of the demo's prompts in free
text and in JSON, all at once, four at a time. Kept are the samples of its metrics that
`mrv2-spec scorecard` reads; `tables.py` prints the scorecard of them. What is verified
depends on how long steps take here, so another run gives other numbers.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import RESULTS, machine, save

from mrv2_spec.demo.job import ENVIRONMENT
from mrv2_spec.demo.prompts import DEMO_PROMPTS
from mrv2_spec.demo.smollm2 import MODEL_NAME, ensure_model
from mrv2_spec.scorecard.score import score
from mrv2_spec.scorecard.scrape import fetch, parse

NAME = "scorecard"
K = 8
AT_ONCE = 4
SECONDS_TO_START = 300
SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": K,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
# What the scorecard reads; when each was created says nothing.
KEPT = re.compile(
    r"(mrv2_spec:|vllm:generation_tokens|vllm:time_to_first_token_seconds_count)"
    r"(?!\w*_created)"
)


@contextmanager
def server(model: Path) -> Iterator[str]:
    """Yield the address of a server of a model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--served-model-name", MODEL_NAME,
        "--host", "127.0.0.1", "--port", str(port),
        "--enforce-eager", "--dtype", "float32", "--max-model-len", "1024",
        "--max-num-seqs", str(AT_ONCE),
        "--speculative-config", json.dumps(SPECULATION),
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log
        )
        address = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + SECONDS_TO_START
            while not _is_up(address):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"the server is not up:\n{log.read()[-4000:]}")
                time.sleep(0.5)
            yield address
        finally:
            process.terminate()
            process.wait(timeout=60)


def _is_up(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/health", timeout=5)
    except OSError:
        return False
    return True


def ask(address: str, text: str, as_json: bool, max_tokens: int) -> int:
    """Return the tokens of the reply to a message."""
    form: dict[str, Any] = {"response_format": {"type": "json_object"}}
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": max_tokens,
        **(form if as_json else {}),
    }
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        return int(json.loads(reply.read())["usage"]["completion_tokens"])


def main() -> None:
    """Ask, and write ``scorecard.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    args = parser.parse_args()
    with server(ensure_model()) as address:
        with ThreadPoolExecutor() as pool:
            asked = [
                pool.submit(ask, address, prompt.text, as_json, args.max_tokens)
                for as_json in (False, True)
                for prompt in DEMO_PROMPTS
            ]
            tokens = [one.result() for one in asked]
        time.sleep(1)
        scrape = fetch(address)
    kept = [line for line in scrape.splitlines() if KEPT.match(line)]
    everything = score(parse(scrape)).as_dict()
    if score(parse("\n".join((*kept, "")))).as_dict() != everything:
        raise SystemExit("the scorecard reads samples that are not kept")
    print(everything["verdict"])
    record = {
        **machine(args.commit),
        "model": MODEL_NAME,
        "k": K,
        "tokens": tokens,
        "samples": kept,
    }
    print("saved", save(NAME, record, args.out))


if __name__ == "__main__":
    main()
