"""The tensor version of the learned scoring against its plain model."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from mrv2_spec.kernels import suffix_state as layout
from mrv2_spec.kernels.suffix_draft import draft_suffix
from mrv2_spec.kernels.suffix_state import SuffixSettings, make_state
from mrv2_spec.kernels.suffix_update import update_suffix
from tests.kernels.suffix_batch import (
    Traffic,
    as_array,
    entries,
    random_settings,
    start_slots,
)
from tests.reference.suffix_learned import LearnedModel, known_places


class Pair:
    """Both versions on the same traffic."""

    def __init__(self, traffic: Traffic, placeholders: tuple[int, ...] = ()) -> None:
        self.traffic = traffic
        self.settings = traffic.settings
        reqs, k = traffic.max_num_reqs, self.settings.num_speculative_tokens
        self.state = make_state(self.settings, reqs, "cpu")
        self.model = LearnedModel(self.settings, reqs, traffic.namespaces)
        self.placeholders = placeholders
        self.drafts = torch.full((reqs, k), -7)
        self.num_drafts = torch.full((reqs,), -7, dtype=torch.int32)
        self.confidences = torch.full((reqs, k), -7.0)
        self.sources = [0, 0]  # drafts so far

    def step(self, num_steps: int) -> int:
        """Run one step on both and compare everything; return the drafts made."""
        t = self.traffic
        idx_mapping, num_sampled = t.step()
        start_slots(self.state, t)
        for slot, fields in t.started:
            self.model.start(slot, *fields[:3])
        inputs = (t.rows, idx_mapping, t.total, t.prompt, num_sampled)
        update_suffix(self.state, self.settings, *inputs)
        draft_suffix(
            self.state,
            self.settings,
            *inputs,
            torch.tensor(self.placeholders, dtype=torch.int32),
            self.drafts,
            self.num_drafts,
            self.confidences,
            num_steps=num_steps,
        )
        slots = idx_mapping[num_sampled > 0]
        rows, total, prompt = (as_array(x[slots]) for x in (t.rows, t.total, t.prompt))
        if len(slots):
            self.model.update(slots.numpy(), rows, total, prompt)
        made = 0
        index = {int(s): i for i, s in enumerate(slots)}
        for b, slot in enumerate(idx_mapping.tolist()):
            tokens: list[int] = []
            chances: list[float] = []
            if slot in index:
                i = index[slot]
                tokens, chances = self.model.draft(
                    slot, rows[i], total[i], prompt[i], num_steps, self.placeholders
                )
            num = int(self.num_drafts[slot])
            source = int(self.state.draft_sources[slot])
            want = self.model.slots.source[slot] if slot in index else layout.OWN
            assert source == want
            assert self.drafts[b, :num].tolist() == tokens
            assert self.confidences[b, :num].tolist() == chances
            assert (self.confidences[b, num:] == 0).all()
            last = t.rows[slot, t.total[slot] - 1]
            assert (self.drafts[b, num:] == last).all()
            made += num
            self.sources[source] += num > 0
        self.compare_states()
        return made

    def compare_states(self) -> None:
        m, s, state = self.model.memory, self.model.slots, self.state
        assert as_array(state.counters).tolist() == m.counters.tolist()
        self.compare_entries()
        live = m.seq >= 0
        pages = as_array(state.pages)[live]
        columns = (m.seq, m.uid, m.namespace, m.length)
        for column, want in enumerate(columns):
            np.testing.assert_array_equal(pages[:, column], want[live])
        np.testing.assert_array_equal(pages[:, layout.PAGE_BASE], m.base[live])
        rows = self.model.num_learners
        learned, want = as_array(state.learned[:rows]), self.model.learned
        np.testing.assert_array_equal(learned[..., 0], want.accepted)
        np.testing.assert_array_equal(learned[..., 1], want.observed)
        steering = as_array(state.steering[:rows])
        np.testing.assert_array_equal(steering[:, layout.THRESHOLD], want.threshold)
        assert (steering[:, layout.WASTE :] == 0).all()
        fields = as_array(state.slots)
        np.testing.assert_array_equal(fields[:, layout.COMMITTED], s.committed)
        np.testing.assert_array_equal(fields[:, layout.DRAFT_LEN], s.length)

    def compare_entries(self) -> None:
        """Each key names the same place in both."""
        want = known_places(self.model.constants, self.model.memory)
        found = entries(self.state, self.settings)[:, ::2]
        assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, want.tolist()))


@pytest.mark.parametrize("case", range(15))
def test_random_traffic(rng: random.Random, case: int):
    traffic = Traffic(
        rng,
        random_settings(rng),
        max_num_reqs=rng.choice([1, 3, 6]),
        alphabet=rng.choice([2, 4, 1000]),
        namespaces=rng.choice([1, 2]),
    )
    pair = Pair(traffic, (1,) if case % 5 == 0 else ())
    for _ in range(25):
        pair.step(rng.choice([64, 64, 2, 0]))


def test_long_rows_keep_the_best_places(rng: random.Random):
    settings = SuffixSettings(
        max_model_len=600, corpus_tokens=5000, num_buckets=64, max_new_tokens=600
    )
    traffic = Traffic(rng, settings, 2, alphabet=2, max_prompt=400, max_output=180)
    pair = Pair(traffic)
    assert sum(pair.step(16) for _ in range(40)) > 0


def test_both_sources(rng: random.Random):
    settings = SuffixSettings(
        num_speculative_tokens=4,
        max_model_len=128,
        corpus_tokens=4096,
        num_buckets=64,
    )
    pair = Pair(Traffic(rng, settings, 4, alphabet=1000))
    for _ in range(100):
        pair.step(4)
        if min(pair.sources) > 4:
            return
    raise AssertionError(pair.sources)


def test_page_numbers_start_afresh_at_their_limit(rng: random.Random):
    settings = random_settings(rng, k=4)
    pair = Pair(Traffic(rng, settings, 3, alphabet=3))
    near = settings.max_page_seq - 6
    pair.state.counters[layout.NEXT_PAGE] = near
    pair.model.memory.counters[layout.NEXT_PAGE] = near
    for _ in range(20):
        pair.step(4)
    assert int(pair.state.counters[layout.NEXT_PAGE]) < near


def test_bytes_stay_as_allocated(rng: random.Random):
    pair = Pair(Traffic(rng, random_settings(rng), 4, alphabet=4))
    before = pair.state.nbytes()
    for _ in range(10):
        pair.step(16)
    assert pair.state.nbytes() == before


def test_default_bytes():
    settings = SuffixSettings()
    reqs = 256
    per_slot = 4 * (
        layout.NUM_SLOT_FIELDS
        + settings.num_speculative_tokens * (1 + 2 * layout.NUM_PREDICTIONS)
    )
    learned = settings.num_learners * (2 * layout.NUM_BINS + layout.NUM_STEERING_FIELDS)
    total = settings.memory_bytes + 4 * (learned + layout.NUM_COUNTERS)
    assert total + reqs * per_slot <= 130 * 2**20
