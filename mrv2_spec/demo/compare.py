"""Run the prompts without and with speculation, each run in its own process."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mrv2_spec.demo.job import Job, Result, encode
from mrv2_spec.demo.prompts import Prompt
from mrv2_spec.errors import UserError

# KV cache blocks hold 16 tokens; whole blocks keep the length printed by vLLM round.
BLOCK_TOKENS = 16

OnTokens = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both runs of the same prompts."""

    plain: Result
    drafted: Result

    def identical(self) -> list[bool]:
        """Tell for each prompt whether both runs gave the same token ids."""
        pairs = zip(
            self.plain.output_token_ids, self.drafted.output_token_ids, strict=True
        )
        return [plain == drafted for plain, drafted in pairs]


def load_tokenizer(model: Path) -> Any:
    """Return the tokenizer of a checkpoint folder that was checked to be usable.

    Raises:
        UserError: the folder is no checkpoint, or a file in it is damaged.
    """
    check_checkpoint(model)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{model} has no usable tokenizer: {reason}") from error


def check_checkpoint(model: Path) -> None:
    """Refuse a folder that vLLM could not load, in one line.

    Raises:
        UserError: config.json or the weights are missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    remedy = "name a Hugging Face checkpoint folder with --model-dir"
    try:
        json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{model} has no readable config.json: {remedy}") from error
    weights = sorted(model.glob("*.safetensors"))
    if not weights:
        raise UserError(f"{model} holds no *.safetensors weights: {remedy}")
    for path in weights:
        try:
            with safe_open(path, framework="np"):
                pass
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{path} is truncated or damaged ({error}): delete it and make or copy "
                f"it again"
            ) from error


def make_job(
    model: Path,
    tokenizer: Any,
    prompts: tuple[Prompt, ...],
    max_tokens: int,
    num_speculative_tokens: int,
) -> Job:
    """Turn the prompts into token ids, in the model's chat template if it has one.

    Raises:
        UserError: a prompt and its reply do not fit into the model's context, or more
            drafts are asked for than fit.
    """
    token_ids = [_prompt_token_ids(tokenizer, prompt.text) for prompt in prompts]
    config = json.loads((model / "config.json").read_text())
    limit = config.get("max_position_embeddings")
    longest = max(range(len(prompts)), key=lambda i: len(token_ids[i]))
    wanted = len(token_ids[longest]) + max_tokens
    max_model_len = -(-wanted // BLOCK_TOKENS) * BLOCK_TOKENS
    if limit is not None:
        if wanted > limit:
            raise UserError(
                f"{prompts[longest].name} has {len(token_ids[longest])} tokens, which "
                f"with --max-tokens {max_tokens} is over the model's {limit}: shorten "
                f"the prompt or lower --max-tokens"
            )
        max_model_len = min(max_model_len, limit)
    if num_speculative_tokens > max_model_len:
        raise UserError(
            f"--k {num_speculative_tokens} is over the context length {max_model_len}: "
            f"drafts that long never fit, 1 to 16 are usual"
        )
    return Job(str(model), token_ids, max_tokens, max_model_len, num_speculative_tokens)


def _prompt_token_ids(tokenizer: Any, text: str) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer(text)["input_ids"])
    return list(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_dict=False,
        )
    )


def run_plain(job: Job, on_tokens: OnTokens) -> Result:
    """Run a job's prompts without speculation; otherwise like :func:`run_drafted`."""
    return run_worker(replace(job, num_speculative_tokens=0), on_tokens)


def run_drafted(job: Job, on_tokens: OnTokens) -> Result:
    """Run a job with speculation.

    Args:
        job: what to run.
        on_tokens: called with the number of tokens so far, first with 0 when the model
            is loaded.

    Raises:
        UserError: the run failed, or something else than this plug-in drafted.
    """
    result = run_worker(job, on_tokens)
    if result.counters is None:
        raise UserError(
            "the run with speculation was not drafted by mrv2-spec: run mrv2-spec "
            "doctor for the reason"
        )
    return result


def run_worker(job: Job, on_tokens: OnTokens) -> Result:
    """Run a job in a new process and return what it found.

    Raises:
        UserError: the process failed; the message names the log with all it printed.
    """
    what = "with" if job.num_speculative_tokens else "without"
    log_fd, log_path = tempfile.mkstemp(prefix=f"mrv2-spec-{what}-", suffix=".log")
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "mrv2_spec.demo.worker", str(write_fd)]
    with os.fdopen(log_fd, "w") as log, os.fdopen(read_fd) as events:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[write_fd],
            text=True,
        )
        os.close(write_fd)
        try:
            assert process.stdin is not None
            with process.stdin:
                process.stdin.write(json.dumps(encode(job)))
            result = _follow(events, on_tokens)
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if result is None:
        raise UserError(
            f"the run {what} speculation failed ({_last_error(Path(log_path))}): see "
            f"{log_path}, and mrv2-spec doctor for what is off"
        )
    Path(log_path).unlink()
    return result


def _follow(events: Any, on_tokens: OnTokens) -> Result | None:
    for line in events:
        event = json.loads(line)
        if "result" in event:
            return Result(**event["result"])
        on_tokens(event["tokens"])
    return None


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    named = [line for line in lines if "Error: " in line]
    return (named or lines or ["it printed nothing"])[-1][:300]
