"""A real server: its metrics, the scorecard that reads them, and the dashboard."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mrv2_spec.metrics import names
from mrv2_spec.scorecard.scrape import Sample, fetch, parse
from tests.engine.faults import POISON
from tests.engine.harness import ids
from tests.engine.worker import ENVIRONMENT

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
SERVER = Path(__file__).with_name("server.py")
SECONDS_TO_START = 300
K = 4


@pytest.fixture(scope="module")
def server(worker: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of a server with n-gram speculation."""
    folder = tmp_path_factory.mktemp("server")
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    # vLLM chooses the runner: for n-grams this one.
    del environment["VLLM_USE_V2_MODEL_RUNNER"]
    model = worker.run({"model": "text"})["model"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculative = {
        "method": "ngram",
        "num_speculative_tokens": K,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 3,
    }
    command = [
        sys.executable, str(SERVER),
        "--model", model, "--served-model-name", "tiny",
        "--host", "127.0.0.1", "--port", str(port),
        "--enforce-eager", "--dtype", "float32", "--max-model-len", "256",
        "--max-num-seqs", "4", "--block-size", "32",
        "--per-request-spec-decode-metrics", "summary",
        "--speculative-config", json.dumps(speculative),
        "--additional-config", json.dumps({"mrv2_spec": {"trim": False}}),
    ]  # fmt: skip
    log = folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + SECONDS_TO_START
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)
    # What was counted is said once more at the end.
    assert "Engine 000: mrv2-spec, all in all: " in log.read_text()


def complete(address: str, **options: Any) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "prompt": ids("abcdefgh" * 4 + "abc"),
        "temperature": 0,
        "max_tokens": 24,
        "ignore_eos": True,
        **options,
    }
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        found: dict[str, Any] = json.loads(reply.read())
    return found


def scorecard(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mrv2_spec.cli", "scorecard", *args]
    return subprocess.run(command, capture_output=True, text=True)


def total(samples: list[Sample], name: str) -> float:
    values = [sample.value for sample in samples if sample.name == name]
    assert values, name
    return sum(values)


def test_metrics_scorecard_and_dashboard(server: str, tmp_path: Path) -> None:
    idle = scorecard(server)
    assert idle.returncode == 1
    assert "no decode round was counted yet" in idle.stderr

    replies = [complete(server), complete(server, prompt=ids("abcdefgh" * 3))]
    grammar = {"choice": ["abcdefgh!", "abcdefgh?"]}
    replies.append(complete(server, structured_outputs=grammar, ignore_eos=False))
    assert replies[2]["choices"][0]["text"] in grammar["choice"]
    # A grammar that is none is its own request's fault.
    with pytest.raises(urllib.error.HTTPError) as refused:
        complete(server, structured_outputs={"regex": "a("})
    assert refused.value.code == 400
    # So is one that only the backend refuses, while others run.
    poison = {"structured_outputs": {"regex": f"{POISON}[0-9]"}, "ignore_eos": False}
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(complete, server, max_tokens=100)
        with pytest.raises(urllib.error.HTTPError) as failed:
            complete(server, prompt=ids(f"{POISON}9 " * 2), **poison)
        replies.append(beside.result())
    assert failed.value.code == 500
    # The next is served, with parameters that vLLM refuses with speculation.
    replies.append(complete(server, min_p=0.1, logit_bias={"7": 1.0}))
    time.sleep(1)
    scrape = fetch(server)
    samples = parse(scrape)

    # The requests' own counters are on their replies, and add up to the engine's.
    by_request = [
        reply["metrics"]["speculative_decoding"]["mrv2_spec"] for reply in replies
    ]
    for counter, field in (
        (names.ROUNDS, "rounds"),
        (names.VERIFIED, "verified"),
        (names.ACCEPTED, "accepted"),
        (names.INVALID, "invalid"),
        (names.FILLERS, "fillers"),
    ):
        want = sum(one[field] for one in by_request)
        assert total(samples, counter.sample_name) == want, field
    proposed, verified, accepted, invalid, never = (
        total(samples, counter.sample_name)
        for counter in (names.PROPOSED, names.VERIFIED, names.ACCEPTED, names.INVALID,
                        names.NEVER_ISSUED)
    )  # fmt: skip
    assert proposed == verified + invalid + never
    assert 0 < accepted <= verified
    assert invalid > 0
    # vLLM's own counters know no fillers and no drafts that a grammar ruled out.
    assert total(samples, "vllm:spec_decode_num_draft_tokens_total") == verified
    assert total(samples, "vllm:spec_decode_num_accepted_tokens_total") == accepted
    (labels,) = [s.labels for s in samples if s.name == names.ROUNDS.sample_name]
    assert labels == {"model_name": "tiny", "engine": "0", "method": "ngram"}

    live = scorecard(server, "--json")
    card = json.loads(live.stdout)
    assert card["counters"]["proposed"] == proposed
    assert card["conditional_acceptance"] == accepted / verified
    assert card["tokens_per_step"] > 1
    saved = tmp_path / "scrape.txt"
    saved.write_text(scrape)
    assert json.loads(scorecard(str(saved), "--json").stdout) == card
    assert card["verdict"] in " ".join(scorecard(str(saved)).stdout.split())

    dashboard = (ROOT / "docs" / "grafana-dashboard.json").read_text()
    published = {sample.name for sample in samples}
    for name in set(re.findall(r"\b(?:mrv2_spec|vllm):\w+", dashboard)):
        assert name in published, name
