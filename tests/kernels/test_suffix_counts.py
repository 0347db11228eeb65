"""The reference scoring on the device layout: recorded streams, count model."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from mrv2_spec.kernels import suffix_state as layout
from mrv2_spec.kernels.suffix_counts import CountRules, draft_by_counts
from mrv2_spec.kernels.suffix_state import SuffixSettings, make_state
from mrv2_spec.kernels.suffix_update import update_suffix
from tests.kernels.suffix_batch import Traffic, random_settings, start_slots
from tests.reference.golden import calls, golden_path, load_runs, matches
from tests.reference.suffix import Draft, Rules, SuffixModel

NO_TABLE = {"key_masks": (), "ways": 1, "num_buckets": 1, "prompt_tail": 0}


class Device:
    """One request at a time on the device layout."""

    def __init__(self, settings: SuffixSettings, max_num_reqs: int) -> None:
        self.settings = settings
        self.state = make_state(settings, max_num_reqs, "cpu")
        width, k = settings.max_model_len, settings.num_speculative_tokens
        self.rows = torch.zeros(max_num_reqs, width, dtype=torch.int32)
        self.total = torch.zeros(max_num_reqs, dtype=torch.int32)
        self.prompt = torch.zeros(max_num_reqs, dtype=torch.int32)
        self.drafts = torch.zeros(1, k, dtype=torch.int64)
        self.num_drafts = torch.zeros(max_num_reqs, dtype=torch.int32)
        self.chances = torch.zeros(1, k)
        self.waiting: set[int] = set()
        self.one = torch.ones(1, dtype=torch.int32)

    def start(self, slot: int, uid: int, prompt: list[int], flags: int) -> None:
        fields = layout.new_slot(uid, 0, flags)
        self.state.slots[slot] = torch.tensor(fields, dtype=torch.int32)
        self.rows[slot, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        self.prompt[slot] = self.total[slot] = len(prompt)

    def add(self, slot: int, tokens: list[int]) -> None:
        total = int(self.total[slot])
        self.rows[slot, total : total + len(tokens)] = torch.tensor(
            tokens, dtype=torch.int32
        )
        self.total[slot] = total + len(tokens)
        self.waiting.add(slot)

    def flush(self) -> None:
        """Commit what was added, 64 tokens a request and step."""
        while self.waiting:
            slots = torch.tensor(sorted(self.waiting))
            update_suffix(
                self.state,
                self.settings,
                self.rows,
                slots,
                self.total,
                self.prompt,
                torch.ones(len(slots), dtype=torch.int32),
            )
            left = self.total > self.state.slots[:, layout.COMMITTED]
            gives = self.state.slots[:, layout.FLAGS] & layout.FLAG_CONTRIBUTE
            self.waiting = {s for s in self.waiting if left[s] and gives[s]}

    def draft(self, slot: int, rules: CountRules) -> Draft:
        self.flush()
        draft_by_counts(
            self.state,
            self.settings,
            rules,
            self.rows,
            torch.tensor([slot]),
            self.total,
            self.one,
            self.drafts,
            self.num_drafts,
            self.chances,
            num_steps=64,
        )
        num = int(self.num_drafts[slot])
        tokens = tuple(self.drafts[0, :num].tolist())
        probs = tuple(self.chances[0, :num].cumprod(0).tolist())
        source = int(self.state.draft_sources[slot])
        return Draft(tokens, probs, sum(probs), source=source)


def is_near(want: Draft, got: Draft) -> bool:
    """Tell whether tokens and source are equal, and the scores nearly."""
    same = (want.tokens, want.source) == (got.tokens, got.source)
    return same and abs(want.score - got.score) < 1e-4


def replay(run: list[dict[str, Any]], every: int) -> Counter[str]:
    """Count equal, allowed and wrong drafts of one recorded run."""
    cached = run[0]["max_cached_requests"]
    longest = max(len(r["prompt_token_ids"]) + len(r["output_token_ids"]) for r in run)
    settings = SuffixSettings(
        max_model_len=longest + 64,
        corpus_tokens=64 * sum(len(r["output_token_ids"]) // 64 + 1 for r in run),
        max_cached_requests=max(1, cached),
        **NO_TABLE,
    )
    device = Device(settings, len(run))
    model = SuffixModel(Rules(), cached)
    texts = [list(r["prompt_token_ids"]) for r in run]
    result = Counter[str]()
    for call, r, step in calls(run):
        rec = run[r]
        if call == "start":
            device.start(r, r, rec["prompt_token_ids"], 3 if cached else 0)
            model.start(r, rec["prompt_token_ids"])
        elif call == "stop":
            model.stop(r)
        elif call == "add":
            token = rec["output_token_ids"][step]
            device.add(r, [token])
            model.add(r, [token])
            texts[r].append(token)
        elif (step + r) % every == 0:
            for factor in ("1.0", "2.0"):
                want = rec["steps"][factor]
                got = device.draft(r, CountRules(max_spec_factor=float(factor)))
                # What the drafts do not say is taken from the record.
                got = replace(got, match_len=want["match_len"][step])
                if want["ambiguous"][step] == 0:
                    result["equal" if matches(got, want, step) else "wrong"] += 1
                    continue
                model.rules = Rules(max_spec_factor=float(factor))
                allowed = model.allowed(r, texts[r][-24:])
                near = any(is_near(d, got) for d in allowed)
                result["allowed" if near else "wrong"] += 1
    return result


@pytest.fixture(scope="module")
def runs() -> dict[str, list[dict[str, Any]]]:
    if not golden_path().exists():
        pytest.skip("recorded streams not found")
    return load_runs()


def test_recorded_own_history(runs: dict[str, Any]):
    result = Counter[str]()
    for name, run in runs.items():
        if name.startswith("local") and run[0]["stream"] % 10 == 0:
            result += replay(run, every=24)
    assert result["wrong"] == 0, dict(result)
    assert result["equal"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "seq_agentic",
        "seq_smollm2",
        "seq_code_edit",
        "inter8_agentic",
        "inter8_batched_agentic",
        "evict16_agentic",
    ],
)
def test_recorded_memory_across_requests(runs: dict[str, Any], name: str):
    result = replay(runs[name], every=150)
    assert result["wrong"] == 0, dict(result)
    assert result["equal"] > 0


@pytest.mark.parametrize("case", range(8))
def test_random_rows_against_the_count_model(rng: random.Random, case: int):
    k = rng.choice([1, 4, 16])
    settings = replace(
        random_settings(rng, k),
        corpus_tokens=4096,
        max_model_len=256,
        max_new_tokens=64,
        page_tokens=rng.choice([4, 64]),
        **NO_TABLE,
    )
    rules = CountRules(
        max_tree_depth=rng.choice([2, 5, 24]),
        max_spec_factor=rng.choice([0.5, 1.0, 2.0]),
        max_spec_offset=rng.choice([0.0, 1.5]),
        min_token_prob=rng.choice([0.0, 0.1, 0.5]),
    )
    plain = Rules(
        rules.max_tree_depth,
        k,
        rules.max_spec_factor,
        rules.max_spec_offset,
        rules.min_token_prob,
    )
    traffic = Traffic(rng, settings, 3, alphabet=rng.choice([2, 4, 100]))
    device = Device(settings, 3)
    model = SuffixModel(plain, settings.max_cached_requests)
    device.rows, device.total, device.prompt = (
        traffic.rows,
        traffic.total,
        traffic.prompt,
    )
    uids: dict[int, int] = {}
    seen: dict[int, int] = {}
    for _ in range(12):
        idx_mapping, num_sampled = traffic.step()
        traffic.started = [(s, (f[0], 0, 3)) for s, f in traffic.started]
        start_slots(device.state, traffic)
        for slot, (uid, *_) in traffic.started:
            uids[slot] = uid
            seen[slot] = int(traffic.prompt[slot])
            model.start(uid, traffic.rows[slot, : seen[slot]].tolist())
        # A request is known to the device once it has committed a token.
        sampled = idx_mapping[num_sampled > 0].tolist()
        for slot in sampled:
            device.add(slot, [])
            total = int(traffic.total[slot])
            model.add(uids[slot], traffic.rows[slot, seen[slot] : total].tolist())
            seen[slot] = total
        if max(uids.values(), default=0) >= settings.max_cached_requests:
            continue
        for slot in sampled:
            got = device.draft(slot, rules)
            text = traffic.rows[slot, : traffic.total[slot]].tolist()
            allowed = model.allowed(uids[slot], text[-rules.max_tree_depth :])
            assert any(is_near(d, got) for d in allowed), (got, allowed)
