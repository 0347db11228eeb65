"""The scorecard: the worked examples, verdicts, and every bad input in one line."""

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mrv2_spec.cli import app
from mrv2_spec.counters import Totals
from mrv2_spec.errors import UserError
from mrv2_spec.metrics import names
from mrv2_spec.scorecard.score import Scorecard, score, verdict
from mrv2_spec.scorecard.scrape import parse


def scrape(
    totals: Totals, engine: str = "0", source: str = "own", vllm: bool = True
) -> str:
    """Return the scrape of an engine with these totals, positions aside."""
    labels = f'model_name="m",engine="{engine}",method="ngram"'
    lines = [
        f"{names.ROUNDS.sample_name}{{{labels}}} {float(totals.rounds)}",
        f"{names.FILLERS.sample_name}{{{labels}}} {float(totals.fillers)}",
        f"{names.VERIFIED_AT.sample_name}{{{labels},position=\"0\"}} 8.0",
        f"{names.ACCEPTED_AT.sample_name}{{{labels},position=\"0\"}} 6.0",
        f"{names.VERIFIED_AT.sample_name}{{{labels},position=\"10\"}} 0.0",
        f"{names.ACCEPTED_AT.sample_name}{{{labels},position=\"10\"}} 0.0",
        f"{names.VERIFIED_AT.sample_name}{{{labels},position=\"9\"}} 4.0",
        f"{names.ACCEPTED_AT.sample_name}{{{labels},position=\"9\"}} 1.0",
        f"{names.LENGTHS.sample_name}{{{labels},length=\"0\"}} 3.0",
        f"{names.LENGTHS.sample_name}{{{labels},length=\"1\"}} 5.0",
    ]  # fmt: skip
    for counter, field in names.BY_SOURCE.items():
        number = float(getattr(totals, field))
        lines.append(f'{counter.sample_name}{{{labels},source="{source}"}} {number}')
    if vllm:
        own = f'model_name="m",engine="{engine}"'
        lines.append(f"vllm:generation_tokens_total{{{own}}} 1010.0")
        lines.append(f"vllm:time_to_first_token_seconds_count{{{own}}} 10.0")
    return "\n".join(lines) + "\n"


STRUCTURED = Totals(
    proposed=1000, invalid=200, verified=800, accepted=600, rounds=400,
    rounds_with_draft=300, fillers=7,
)  # fmt: skip


def card_of(text: str, **chosen: str) -> Scorecard:
    return score(parse(text), **chosen)


def test_three_ratios_of_one_run() -> None:
    found = card_of(scrape(STRUCTURED)).as_dict()
    assert found["grammar_survival"] == 0.8
    assert found["conditional_acceptance"] == 0.75
    assert found["yield"] == 0.6
    assert found["coverage"] == 0.75
    assert found["mean_acceptance_length"] == 2.5
    assert found["tokens_per_step"] == 2.5
    assert found["counters"]["fillers"] == 7
    assert found["accepted_lengths"] == [3, 5]


def test_positions_are_in_order_and_nothing_is_no_ratio() -> None:
    positions = card_of(scrape(STRUCTURED)).as_dict()["positions"]
    assert [(p["position"], p["acceptance"]) for p in positions] == [
        (1, 0.75),
        (10, 0.25),
        (11, None),
    ]


def test_engines_add_up_or_are_chosen() -> None:
    other = Totals(
        proposed=10, verified=10, accepted=1, rounds=100, rounds_with_draft=4
    )
    text = scrape(STRUCTURED, "0") + scrape(other, "1", source="memory")
    both = card_of(text)
    assert both.engines == ("0", "1")
    assert both.totals.proposed == 1010
    assert both.by_source["memory"].accepted == 1
    by_source = both.as_dict()["by_source"]
    assert by_source["own"]["rounds"] == STRUCTURED.rounds_with_draft
    assert by_source["memory"]["rounds"] == other.rounds_with_draft
    one = card_of(text, engine="1")
    assert one.totals == other
    assert one.delivered_per_round == 10.0


def test_without_vllms_own_counters() -> None:
    assert card_of(scrape(STRUCTURED, vllm=False)).as_dict()["tokens_per_step"] is None


def test_rounds_without_drafts_have_no_ratios() -> None:
    found = card_of(scrape(Totals(rounds=9))).as_dict()
    assert found["grammar_survival"] is None
    assert found["conditional_acceptance"] is None
    assert found["yield"] is None
    assert found["coverage"] == 0.0
    assert found["mean_acceptance_length"] == 1.0
    assert "NaN" not in json.dumps(found)


@pytest.mark.parametrize(
    ("totals", "says"),
    [
        (Totals(rounds=9), "No draft in 9 decode rounds"),
        (STRUCTURED, "60% of the rounds are saved"),
        (
            Totals(proposed=100, invalid=70, verified=30, accepted=20, rounds=50,
                   rounds_with_draft=30),
            "70% of the drafts are lost because a grammar",
        ),
        (
            Totals(proposed=100, never_issued=60, verified=40, accepted=40, rounds=50,
                   rounds_with_draft=30),
            "60% of the drafts are lost because they are not issued",
        ),
        (
            Totals(proposed=100, verified=100, accepted=1, rounds=50,
                   rounds_with_draft=30),
            "saves next to nothing. 99% of the drafts are lost because the target",
        ),
        (
            Totals(proposed=100, verified=100, accepted=95, rounds=30,
                   rounds_with_draft=30),
            "Few drafts are lost: 95% are accepted",
        ),
        (
            Totals(proposed=100, verified=100, accepted=50, rounds=300,
                   rounds_with_draft=30),
            "Only 10% of the rounds have a draft at all",
        ),
    ],
)  # fmt: skip
def test_verdicts(totals: Totals, says: str) -> None:
    line = verdict(totals)
    assert says in line
    assert "\n" not in line


def test_only_delivered_tokens_save_rounds() -> None:
    # 200 of the accepted drafts lay past the ends of their requests.
    card = replace(card_of(scrape(STRUCTURED)), delivered_per_round=800 / 400)
    assert card.totals.mean_acceptance_length == 2.5
    assert card.verdict.startswith("2.00 tokens a decode round: 50% of the rounds")
    assert card.as_dict()["verdict"] == card.verdict
    # Where that is not known, all of them count.
    card = replace(card, delivered_per_round=None)
    assert card.verdict.startswith("2.50 tokens a decode round: 60% of the rounds")


# The command


def run(*args: str, columns: int = 200) -> Any:
    environment = {"COLUMNS": str(columns)}
    return CliRunner().invoke(app, ["scorecard", *args], env=environment)


def refusal(*args: str) -> str:
    result = run(*args)
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    line = " ".join(result.output.split())
    assert line.startswith("error: ")
    assert result.output.count("\n") == 1
    return line


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "scrape.txt"
    path.write_text(scrape(STRUCTURED))
    return path


def test_a_saved_scrape(saved: Path) -> None:
    result = run(str(saved))
    assert result.exit_code == 0
    for text in ("80.0%", "75.0%", "60.0%", "800 of 1000 drafts", "2.500"):
        assert text in result.output
    assert result.output.splitlines()[-1] == verdict(STRUCTURED)


def test_no_row_is_broken_in_a_terminal_of_80_columns(saved: Path) -> None:
    # The widest percentage, and numbers such as a busy day brings.
    perfect = replace(STRUCTURED, proposed=800, invalid=0, accepted=800)
    much = Totals(**{field: n * 10**6 for field, n in asdict(perfect).items()})
    saved.write_text(scrape(perfect) + scrape(much, "1", source="memory"))
    wide, narrow = (run(str(saved), columns=n).output.splitlines() for n in (200, 80))
    assert max(map(len, narrow[:-1])) <= 80
    assert len(narrow) == len(wide)


def test_json(saved: Path) -> None:
    result = run(str(saved), "--json")
    assert json.loads(result.output) == card_of(saved.read_text()).as_dict()


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, str]]]:
    """Return a server's address, and its pages by path."""
    pages: dict[str, str] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path not in pages:
                self.send_error(404)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(pages[self.path].encode())

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}", pages
        httpd.shutdown()
        thread.join()


def test_a_live_server(server: tuple[str, dict[str, str]]) -> None:
    address, pages = server
    pages["/metrics"] = scrape(STRUCTURED)
    shouted = address.replace("http", "HTTP")
    for form in (address, f"{address}/", f"{address}/metrics", shouted):
        assert json.loads(run(form, "--json").output)["yield"] == 0.6


def test_a_server_without_metrics(server: tuple[str, dict[str, str]]) -> None:
    address, _ = server
    line = refusal(address)
    assert f"cannot read {address}/metrics" in line
    assert "404" in line


def test_nobody_answers() -> None:
    line = refusal("http://127.0.0.1:9")
    assert "cannot read http://127.0.0.1:9/metrics" in line
    assert "refused" in line


def test_an_address_that_is_none() -> None:
    assert "cannot read http://[/metrics" in refusal("http://[")


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:none",
        "http://127.0.0.1:9/white space",
        "http://127.0.0.1:99999",
        "HTTP://127.0.0.1:9",
        "http://nobody.invalid:",
    ],
)
def test_addresses_that_cannot_be_asked(address: str) -> None:
    assert f"cannot read {address.rstrip('/')}/metrics (" in refusal(address)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"", "closed connection without response"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "SSH-2.0"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "5 more expected"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhalf",
         "IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\nLong: " + b"x" * 70_000, "header line"),
    ],
)  # fmt: skip
def test_something_else_listens_there(reply: bytes, reason: str) -> None:
    def answer() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread = threading.Thread(target=answer)
        thread.start()
        line = refusal(address)
        thread.join()
    assert f"cannot read {address}/metrics (" in line
    assert reason in line


def test_an_address_of_nobody() -> None:
    assert "http:// names no server" in refusal("http://")


def test_a_scrape_that_was_cut_anywhere(tmp_path: Path) -> None:
    """It is refused, or says what the whole one says of the drafts."""
    text = scrape(STRUCTURED, engine="0") + scrape(STRUCTURED, engine="1")
    lines = sorted(text.splitlines(keepends=True), key=lambda line: line.split("{")[0])
    text = "".join(lines)
    whole = card_of(text)
    path = tmp_path / "cut.txt"
    refused = 0
    for end in range(len(text)):
        try:
            card = card_of(text[:end])
        except UserError:
            refused += 1
            continue
        assert card.totals == whole.totals
        assert card.positions == whole.positions
    assert len(text) / 2 < refused < len(text)
    path.write_text(text[: len(text) // 3])
    assert "cut short" in refusal(str(path))


def test_no_such_file(tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    assert f"cannot read {path} (No such file" in refusal(str(path))


def test_a_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    assert f"cannot read {path}" in refusal(str(path))


def test_a_scrape_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "other.txt"
    path.write_text('vllm:num_requests_running{engine="0"} 1.0\n')
    line = refusal(str(path))
    assert "has no mrv2_spec counters" in line
    assert "mrv2-spec doctor" in line


def test_no_traffic(tmp_path: Path) -> None:
    path = tmp_path / "idle.txt"
    path.write_text(scrape(Totals()))
    assert "no decode round was counted yet" in refusal(str(path))
    assert "no decode round was counted yet" in refusal(str(path), "--json")


def test_an_engine_that_is_not_there(saved: Path) -> None:
    line = refusal(str(saved), "--engine", "3")
    assert "no mrv2_spec counters of engine 3; the scrape has models m and" in line
    assert "engines 0" in line
    line = refusal(str(saved), "--engine", "0", "--model", "other")
    assert "no mrv2_spec counters of model other and engine 0; the scrape" in line


def test_errors_are_for_users() -> None:
    with pytest.raises(UserError, match="no mrv2_spec counters"):
        score([])
