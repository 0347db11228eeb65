"""The engines' process, and the pieces that jobs for it are made of."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mrv2_spec.kernels.propose_ngram import propose_ngram_ref

WORKER = Path(__file__).with_name("worker.py")
# Token ids of prompts; those below are special.
TOKENS = range(3, 20)
# The text model's: specials, and the end of a text.
NUM_SPECIALS = 5
END = 2
# Texts whose closest decision is nearer than this are not used: another order of
# additions, which speculation brings about, might decide it the other way.
MIN_GAP = 1e-4
MAX_DRAWS = 20


class Worker:
    """A process that runs one engine after another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._log = folder / "log"

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run a job; start the process first if there is none."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._results.readline()
        assert line, "the engine's process died:\n" + self._log.read_text()[-4000:]
        return json.loads(line)

    def _start(self) -> None:
        reader, writer = os.pipe()
        model = self._folder / "model"
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER), str(model), str(writer)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                pass_fds=[writer],
            )
        os.close(writer)
        self._results = os.fdopen(reader)

    def stop(self) -> None:
        """End the process."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(timeout=60)


def ngram(num_drafts: int, trim: bool = True) -> dict[str, Any]:
    """Return engine arguments for n-gram speculation."""
    return {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": num_drafts,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        },
        "additional_config": {"mrv2_spec": {"tie": "latest", "trim": trim}},
    }


def suffix(num_drafts: int, trim: bool = True) -> dict[str, Any]:
    """Return engine arguments for suffix decoding with a small memory."""
    return {
        "speculative_config": {
            "method": "suffix",
            "num_speculative_tokens": num_drafts,
            "suffix_decoding_max_cached_requests": 100,
        },
        "additional_config": {"mrv2_spec": {"corpus_tokens": 4096, "trim": trim}},
    }


def ids(text: str) -> list[int]:
    """Return the text model's tokens: one a byte, in its tokenizer's order."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    number = {letter: i for i, letter in enumerate(letters)}
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [
        NUM_SPECIALS + number[letter]
        for piece, _ in splitter.pre_tokenize_str(text)
        for letter in piece
    ]


def text_of(token_ids: list[int]) -> str:
    """Return what the text model's tokens say, the end of the text aside."""
    table = {token: chr(i) for i in range(128) for token in ids(chr(i))}
    return "".join(table.get(token, "?") for token in token_ids if token != END)


def add(req_id: str, prompt: list[int], num_tokens: int, **sampling: Any) -> list[Any]:
    """Return the action that adds a request, by default one that runs to its length."""
    return [
        "add",
        req_id,
        prompt,
        {"max_tokens": num_tokens, "ignore_eos": True, **sampling},
    ]


def walk(rng: random.Random, length: int) -> list[int]:
    """Return a prompt that follows the model's ring of tokens, with jumps."""
    prompt = [rng.choice(TOKENS)]
    while len(prompt) < length:
        follows = TOKENS[(prompt[-1] - TOKENS[0] + 1) % len(TOKENS)]
        prompt.append(follows if rng.random() < 0.85 else rng.choice(TOKENS))
    return prompt


def rounds(prompt: list[int], text: list[int], num_drafts: int) -> list[int]:
    """Return how many tokens each step emits for a request that runs alone.

    Plays n-gram drafting as `ngram` sets it up against the text that must come; the
    first entry is the prompt's own step.
    """
    emitted = [1]
    while (done := sum(emitted)) < len(text):
        draft, _ = propose_ngram_ref(
            prompt + text[:done],
            num_steps=num_drafts,
            min_n=1,
            max_n=3,
            max_model_len=256,
            latest=True,
        )
        accepted = 0
        while (
            accepted < len(draft)
            and done + accepted + 1 < len(text)
            and draft[accepted] == text[done + accepted]
        ):
            accepted += 1
        emitted.append(accepted + 1)
    return emitted


class Texts:
    """Prompts and the greedy text that must follow them, whoever drafts."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def draw(
        self,
        make: Callable[[], list[int]],
        number: int,
        num_tokens: int,
        fits: Callable[[list[int], list[int]], bool] = lambda prompt, text: True,
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return prompts whose texts have no close decision and fit, and the texts."""
        prompts: list[list[int]] = []
        texts: list[list[int]] = []
        for _ in range(MAX_DRAWS):
            if len(prompts) >= number:
                break
            some = [make() for _ in range(max(number, 8))]
            found = self._worker.run({"oracle": some, "num_tokens": num_tokens})
            for prompt, text, gap in zip(
                some, found["texts"], found["gaps"], strict=True
            ):
                if gap > MIN_GAP and fits(prompt, text):
                    prompts.append(prompt)
                    texts.append(text)
        assert len(prompts) >= number, "no such texts; ask for less"
        return prompts[:number], texts[:number]


def outputs(result: dict[str, Any]) -> list[list[int]]:
    """Return the token ids of all requests, in the order in which they were added."""
    return [request["token_ids"] for request in result["requests"]]
