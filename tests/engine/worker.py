"""Runs vLLM engines on the CPU in a process of its own: ``python worker.py FOLDER FD``.

Reads one job as JSON a line from standard input and writes one result a line to the
file descriptor FD; the tiny model's checkpoint is made in FOLDER. A job:

- ``model``: a checkpoint, in place of the tiny one; or ``text``, for one like it that
  has a tokenizer of bytes, and always thinks from "a" to "h";
- ``engine``: arguments of ``vllm.LLM`` beside those that all jobs share;
- ``async_scheduling``: whether the engine runs a step ahead;
- ``kernel_block``: positions a block of the n-gram kernel;
- ``constants``: values to put in place of others, by dotted path;
- ``record``: whether to return what every step did, and how many of them were idle:
  the drafter was not asked;
- ``same_ids``: whether the scheduler sees the ids as they are, without a random part;
- ``actions``: ``["add", id, prompt, sampling parameters]`` (the prompt as token ids or
  as vLLM's prompt object), ``["refuse", ...]`` alike for one that must be refused,
  ``["step", number]``, ``["finish"]``, ``["abort", id]``, ``["fault", name]``; what is
  left unfinished after the last one is run to its end;
- ``faults``: whether those of ``faults.py`` are in place.

The result has, per added request in order, ``token_ids`` and ``finish_reason`` (null
where it was aborted), or why it was ``refused``, and the numbers of the whole run; or
``error``. Where the engine speculates these are ``counters``, ``counts`` and, by
request, ``request_counts``.

A job without an ``engine`` gets the path of its ``model``.

A job with ``oracle``, prompts, and ``num_tokens`` gets the greedy ``texts`` from
transformers instead, and ``gaps``: how near each one's closest decision was to another.
"""

import contextlib
import gc
import itertools
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}
SHARED: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "block_size": 32,
    "disable_log_stats": True,
}
# Tokens from the first text token on follow each other in a ring, most of the time.
VOCAB_SIZE = 20
FIRST_TOKEN = 3
# How much the token before outweighs all others: about half of the drafts are right,
# and yet most texts change with a prompt's first token, so that a wrong cache shows.
RING_WEIGHT = 10.0


# How much a chain outweighs all else.
CHAIN_WEIGHT = 8.0
# The text model's tokens beside the bytes: end of text, and of a thought.
TEXT_SPECIALS = ("<pad>", "<s>", "</s>", "<think>", "</think>")


def make_text_model(folder: Path) -> str:
    """Write such a Llama whose tokens are bytes, with a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*TEXT_SPECIALS, *letters]
    bpe = models.BPE({name: i for i, name in enumerate(names)}, [])
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(TEXT_SPECIALS))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    ).save_pretrained(folder)
    chain = [names.index(name) for name in ("<think>", *"abcdefgh", "</think>")]
    return make_model(folder, len(names), len(TEXT_SPECIALS), chain)


def make_model(
    folder: Path,
    vocab_size: int = VOCAB_SIZE,
    first_token: int = FIRST_TOKEN,
    chain: Sequence[int] = (),
) -> str:
    """Write a random Llama that mostly goes on in the ring of tokens.

    From each token of ``chain`` it always goes on to the next one.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    llama = LlamaForCausalLM(config).float()
    embedding = llama.model.embed_tokens.weight.data
    num_in_ring = vocab_size - first_token
    for token in range(first_token, vocab_size):
        successor = first_token + (token - first_token + 1) % num_in_ring
        llama.lm_head.weight.data[successor] += embedding[token]
    for token, successor in itertools.pairwise(chain):
        llama.lm_head.weight.data[successor] += CHAIN_WEIGHT * embedding[token]
    embedding *= RING_WEIGHT / config.initializer_range
    embedding[list(chain)] *= CHAIN_WEIGHT
    llama.save_pretrained(folder)
    return str(folder)


@contextlib.contextmanager
def settings(job: dict[str, Any], found: dict[str, Any]) -> Iterator[None]:
    """Put a job's conditions and observers in place for the length of a run."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.core.sched.scheduler import Scheduler

    from mrv2_spec.integration import idling
    from mrv2_spec.kernels import propose_ngram
    from mrv2_spec.speculator import RowSpeculator

    check = CpuPlatform.check_and_update_config.__func__
    preempt = Scheduler._preempt_request
    propose = RowSpeculator.propose
    without_speculator = idling._without_speculator

    def check_and_update_config(cls: Any, config: Any) -> None:
        # The CPU platform switches async scheduling off; the engine can do it.
        check(cls, config)
        config.scheduler_config.async_scheduling = bool(job.get("async_scheduling"))

    # Not a handler: vLLM takes those away when it configures logging.
    logger = logging.getLogger("vllm.mrv2_spec")
    handle = logger.handle

    def note(log_record: logging.LogRecord) -> None:
        found["log"].append(log_record.getMessage())
        handle(log_record)

    def count_preemption(self: Any, *args: Any, **kwargs: Any) -> None:
        found["preemptions"] += 1
        preempt(self, *args, **kwargs)

    def record(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = propose(self, input_batch, *args, **kwargs)
        if not kwargs.get("dummy_run"):
            found["records"].append(step_record(self, input_batch, args[4], drafts))
        return drafts

    @contextlib.contextmanager
    def record_idle(runner: Any) -> Iterator[None]:
        speculator = runner.speculator
        input_batch = runner.execute_model_state.input_batch
        total_len = runner.req_states.total_len.gpu
        before = total_len[input_batch.idx_mapping].clone()
        with without_speculator(runner):
            yield
        num_sampled = total_len[input_batch.idx_mapping] - before
        drafts = speculator.draft_tokens
        found["records"].append(
            step_record(speculator, input_batch, num_sampled, drafts)
        )
        found["idle_records"] += 1

    same_ids = "1" if job.get("same_ids") else "0"
    # Two ranks may be more than there are NUMA nodes to bind them to.
    kinds = ("tensor_parallel_size", "pipeline_parallel_size")
    several = any(job["engine"].get(kind, 1) > 1 for kind in kinds)
    bind = "nobind" if several else "auto"
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch.dict(
                os.environ,
                VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=same_ids,
                VLLM_CPU_OMP_THREADS_BIND=bind,
            )
        )
        for owner, name, value in (
            (
                CpuPlatform,
                "check_and_update_config",
                classmethod(check_and_update_config),
            ),
            (Scheduler, "_preempt_request", count_preemption),
            (logger, "handle", note),
            *(
                [
                    (RowSpeculator, "propose", record),
                    (idling, "_without_speculator", record_idle),
                ]
                if job.get("record")
                else []
            ),
            # Small blocks: rows of a few dozen tokens are several chunks.
            (propose_ngram, "BLOCK", job.get("kernel_block", propose_ngram.BLOCK)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        for path, value in job.get("constants", {}).items():
            stack.enter_context(mock.patch(path, value))
        yield


@contextlib.contextmanager
def faults(
    job: dict[str, Any], found: dict[str, Any]
) -> Iterator[Callable[[str | None], None]]:
    """Put faults in place if the job wants them; return what switches them."""
    if not job.get("faults"):
        yield lambda name: None
        return
    # Beside this file: it runs as a script.
    from faults import Faults

    all_faults = Faults()
    with all_faults.installed():
        yield all_faults.switch
    found["struck"] = all_faults.struck


def step_record(
    speculator: Any, input_batch: Any, num_sampled: Any, drafts: Any
) -> list[dict[str, Any]]:
    """Return what one step did, request by request."""
    states = speculator.req_states
    logits = input_batch.cu_num_logits.tolist()
    entries = []
    for i, req_id in enumerate(input_batch.req_ids):
        slot = int(input_batch.idx_mapping[i])
        total = int(states.total_len.gpu[slot])
        sampled = int(num_sampled[i])
        row = states.all_token_ids.gpu[slot]
        real = int(speculator.num_valid_drafts_for_trim[slot])
        entries.append(
            {
                # vLLM has added a random part.
                "id": req_id.partition("-")[0],
                "emitted": row[total - sampled : total].tolist(),
                "first_token": total - sampled == int(states.prefill_len.np[slot]),
                "width": logits[i + 1] - logits[i] - 1,
                "drafts": drafts[i, :real].tolist(),
            }
        )
    return entries


def run(model: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run one job."""
    from vllm import LLM

    from mrv2_spec.integration import read_counts, read_request_counts

    found: dict[str, Any] = {
        "requests": [],
        "preemptions": 0,
        "records": [],
        "idle_records": 0,
        "longest_run": 0,
        "steps": 0,
        "log": [],
    }
    try:
        with settings(job, found):
            llm = LLM(model=model, **{**SHARED, **job["engine"]})
            scheduler = llm.llm_engine.vllm_config.scheduler_config
            found["async_scheduling"] = scheduler.async_scheduling
            with faults(job, found) as switch:
                drive(llm.llm_engine, job["actions"], found, switch)
            if job["engine"].get("speculative_config"):
                counts = read_counts(llm)
                found["counters"] = None if counts is None else asdict(counts.totals())
                found["counts"] = None if counts is None else counts.as_dict()
                found["request_counts"] = [
                    (req_id.rpartition("-")[0], one.as_dict())
                    for req_id, one in read_request_counts(llm)
                ]
            llm.llm_engine.engine_core.shutdown()
    except Exception as error:
        causes = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)
        found["error"] = [f"{type(e).__name__}: {e}" for e in causes]
        found["traceback"] = traceback.format_exc()
    return found


def oracle(model: str, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    """Continue prompts greedily, without vLLM; those of one length side by side."""
    import torch
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM.from_pretrained(model).float().eval()
    texts: list[list[int]] = [[] for _ in prompts]
    gaps = [float("inf")] * len(prompts)
    for length in {len(prompt) for prompt in prompts}:
        which = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        state, new = None, torch.tensor([prompts[i] for i in which])
        for _ in range(num_tokens):
            with torch.inference_mode():
                out = llama(new, past_key_values=state, use_cache=True)
            state, best = out.past_key_values, out.logits[:, -1].topk(2)
            new = best.indices[:, :1]
            for i, token, (first, second) in zip(
                which, new[:, 0].tolist(), best.values.tolist(), strict=True
            ):
                texts[i].append(token)
                gaps[i] = min(gaps[i], first - second)
    return {"texts": texts, "gaps": gaps}


def plain_logprobs(places: Any) -> list[dict[str, float] | None]:
    """Return log probabilities by token; the first token of a prompt has none."""
    return [
        place and {str(token): entry.logprob for token, entry in place.items()}
        for place in places or ()
    ]


def sampling_params(options: dict[str, Any]) -> Any:
    """Return the sampling parameters of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if "structured_outputs" in options:
        grammar = StructuredOutputsParams(**options["structured_outputs"])
        options = {**options, "structured_outputs": grammar}
    if "logit_bias" in options:
        bias = {int(token): value for token, value in options["logit_bias"].items()}
        options = {**options, "logit_bias": bias}
    return SamplingParams(**{"temperature": 0, "detokenize": False, **options})


def drive(
    engine: Any,
    actions: list[list[Any]],
    found: dict[str, Any],
    switch_fault: Callable[[str | None], None],
) -> None:
    """Carry out the actions, then finish what is left."""
    from vllm.exceptions import VLLMValidationError

    latest: dict[str, dict[str, Any]] = {}

    def step() -> None:
        found["steps"] += 1
        for output in engine.step():
            request = latest[output.request_id]
            token_ids = list(output.outputs[0].token_ids)
            grown = len(token_ids) - len(request["token_ids"])
            found["longest_run"] = max(found["longest_run"], grown)
            request["token_ids"] = token_ids
            request["finish_reason"] = output.outputs[0].finish_reason
            request["logprobs"] = plain_logprobs(output.outputs[0].logprobs)
            request["prompt_logprobs"] = plain_logprobs(output.prompt_logprobs)
            metrics = output.outputs[0].spec_decode_metrics
            request["spec_decode_metrics"] = metrics and metrics.to_dict()

    for action, *arguments in actions:
        if action == "add":
            req_id, prompt, sampling = arguments
            latest[req_id] = {"token_ids": [], "finish_reason": None}
            found["requests"].append(latest[req_id])
            engine.add_request(
                req_id,
                prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt},
                sampling_params(sampling),
            )
        elif action == "refuse":
            req_id, prompt, sampling = arguments
            try:
                engine.add_request(
                    req_id, {"prompt_token_ids": prompt}, sampling_params(sampling)
                )
            except (ValueError, VLLMValidationError) as error:
                found["requests"].append({"token_ids": [], "refused": str(error)})
            else:
                raise AssertionError(f"{req_id} was not refused")
        elif action == "abort":
            engine.abort_request(arguments)
        elif action == "step":
            for _ in range(arguments[0]):
                step()
        elif action == "finish":
            while engine.has_unfinished_requests():
                step()
        elif action == "fault":
            switch_fault(*arguments)
        else:
            raise ValueError(action)
    while engine.has_unfinished_requests():
        step()


def main() -> None:
    """Serve jobs until standard input ends."""
    os.environ.update(ENVIRONMENT)
    folder, results = Path(sys.argv[1]), int(sys.argv[2])
    model = make_model(folder)
    text_model = None
    with os.fdopen(results, "w", buffering=1) as out:
        for line in sys.stdin:
            job = json.loads(line)
            if "oracle" in job:
                result = oracle(model, job["oracle"], job["num_tokens"])
            else:
                path = job.get("model", model)
                if path == "text":
                    text_model = text_model or make_text_model(folder / "text")
                    path = text_model
                if "engine" not in job:
                    out.write(json.dumps({"model": path}) + "\n")
                    continue
                result = run(path, job)
                # vLLM collects garbage ten times for each engine, a quarter of a second
                # each time if it looks at all that was imported as well.
                gc.unfreeze()
                gc.collect()
                gc.freeze()
            out.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
