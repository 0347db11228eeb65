"""The README's scorecard comes from a real server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mrv2_spec.scorecard.score import score
from mrv2_spec.scorecard.scrape import parse

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "scorecard_sample.py"


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the server is one for a CPU")
@pytest.mark.timeout(900)
def test_a_server_answers_and_its_scorecard_is_kept(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, str(SCRIPT), "--max-tokens", "12", "--out", str(tmp_path),
            "--commit", "abc",
        ],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "scorecard.json").read_text())
    assert record["commit"] == "abc"
    # Each of the four prompts in free text and in JSON.
    assert len(record["tokens"]) == 8
    assert all(0 < number <= 12 for number in record["tokens"])
    card = score(parse("\n".join((*record["samples"], ""))))
    # The first token of each is the prefill's.
    emitted = round(card.delivered_per_round * card.totals.rounds)
    assert emitted == sum(record["tokens"]) - 8
    assert card.verdict in done.stdout
