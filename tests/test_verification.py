"""The trimmer behind the runner's calls: host and device agree in every step."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner")

import torch

from mrv2_spec.config import Settings
from mrv2_spec.draft_values import DraftValues
from mrv2_spec.integration import verification, widths
from mrv2_spec.integration.graphs import _wrap_sizes
from mrv2_spec.integration.sleeping import _LAST_OUTPUT, _gpu_waits
from mrv2_spec.integration.trimmable import why_not_trimmed
from mrv2_spec.integration.verification import (
    FEW_PLACES,
    TrimManager,
    _speaks,
    _spread,
    _wrap_create,
    _wrap_graph_mode,
)
from mrv2_spec.step_clock import StepKind
from mrv2_spec.step_costs import CostCurve, StepCosts

K = 4
SLOTS = 8
MOST_TOKENS = 400


class Engine:
    """As much of the runner as the manager talks to."""

    def __init__(
        self,
        device: torch.device,
        lag: int,
        async_scheduling: bool = True,
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        self.device = device
        self.contexts: list[int] = []
        self.few_places = False
        self.states = SimpleNamespace(
            max_num_reqs=SLOTS,
            max_model_len=4096,
            num_speculative_steps=K,
            device=device,
            req_id_to_index={},
        )
        ints = {"dtype": torch.int32, "device": device}
        self.valid = torch.zeros(SLOTS, **ints)
        self.starts = torch.zeros(SLOTS + 1, **ints)
        self.values = DraftValues(SLOTS, K, 0, device)
        self.lengths = torch.ones(SLOTS, **ints)
        self.rows = torch.zeros(SLOTS, 512, **ints)
        config = vllm_config()
        config.scheduler_config.async_scheduling = async_scheduling
        config.scheduler_config.max_num_batched_tokens = most_tokens
        config.max_concurrent_batches = lag - 1
        self.manager = TrimManager(
            config,
            SimpleNamespace(num_valid_drafts_for_trim=self.valid),
            self.values,
            self.states,
            self.starts,
            1,
            SLOTS * (K + 1),
            False,
            True,
        )
        # Rows cost next to nothing: all that is real pays.
        flat = CostCurve.of([(1, 1.0), (10_000, 1.001)], 0)
        self.manager.policy.use_costs(StepCosts.without_contexts(flat, flat), [])

    def add(self, req_id: str, slot: int) -> None:
        self.states.req_id_to_index[req_id] = slot
        self.manager.add_request(slot)
        self.manager.forget_former_requests()

    def choose(
        self, scheduled: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        step = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens=draft_tokens,
            scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=self.contexts),
        )
        setattr(step, FEW_PLACES, self.few_places)
        return self.manager.choose(step)

    def step(
        self, scheduled: dict[str, int], drafts: dict[str, int]
    ) -> tuple[int, list[int]]:
        """Run one step; return the budget and the widths laid out on the device."""
        draft_tokens = {req_id: [-1] * n for req_id, n in drafts.items()}
        chosen = self.choose(scheduled, draft_tokens)
        num_tokens = self.manager.get_num_tokens(scheduled, draft_tokens)
        req_ids = list(scheduled)
        num_drafts = np.array([drafts.get(r, 0) for r in req_ids], np.int32)
        num_scheduled = np.array([scheduled[r] for r in req_ids], np.int32)
        logits_np = np.concatenate([[0], np.cumsum(num_drafts + 1)]).astype(np.int32)
        per_req, logits_np = self.manager.compact_batch(
            num_drafts, num_scheduled, logits_np
        )
        assert per_req.sum() == num_tokens
        assert (per_req >= num_scheduled - num_drafts).all()
        assert (per_req <= num_scheduled).all()
        slots = [self.states.req_id_to_index[r] for r in req_ids]
        logits, starts, budget = self.manager.reallocate_drafts(
            req_ids, torch.tensor(slots, device=self.device)
        )
        assert budget == chosen
        assert starts[-1] == starts[len(req_ids)] == num_tokens
        assert logits[-1] == len(req_ids) + budget
        if budget == 0:
            assert logits_np.tolist() == logits.tolist()
        widths = [b - a - 1 for a, b in itertools.pairwise(logits.tolist())]
        lengths = np.diff(starts[: len(req_ids) + 1].cpu().numpy())
        assert (lengths == num_scheduled - num_drafts + widths).all()
        return budget, widths

    def draft(
        self, req_ids: list[str], valid: list[int], confidence: Any = 1.0
    ) -> None:
        slots = torch.tensor(
            [self.states.req_id_to_index[r] for r in req_ids], device=self.device
        )
        ints = {"dtype": torch.int32, "device": self.device}
        self.valid[slots] = torch.tensor(valid, **ints)
        self.lengths[slots] += 1
        num_reqs = len(req_ids)
        shape = (num_reqs, K)
        self.values.update(
            self.rows,
            slots,
            self.lengths,
            torch.ones(num_reqs, **ints),
            torch.zeros(shape, dtype=torch.int64, device=self.device),
            self.valid,
            torch.full(shape, confidence, device=self.device),
        )
        batch = SimpleNamespace(num_reqs=num_reqs, idx_mapping=slots)
        self.manager.record_confidences(None, batch)


def test_budget_follows_the_values_that_are_lag_steps_old(
    device: torch.device,
) -> None:
    engine = Engine(device, lag=3)
    engine.add("a", 5)
    engine.add("b", 2)
    scheduled, drafts = {"a": K + 1, "b": K + 1}, {"a": K, "b": K}
    budgets = []
    for real in [3, 3, 0, 0, 0]:
        budget, widths = engine.step(scheduled, drafts)
        assert sum(widths) == budget
        budgets.append(budget)
        engine.draft(["a", "b"], [real, real])
    # Nothing is known at first, and so small a step is verified whole.
    assert budgets == [2 * K] * 3 + [6] * 2


def test_drafts_for_few_places_say_nothing_of_what_many_are_worth(
    device: torch.device,
) -> None:
    def worth(few_places: bool) -> list[float]:
        engine = Engine(device, lag=3)
        engine.add("a", 5)
        found = []
        # Prompts take the places in the middle: nothing is drafted then.
        for step in range(12):
            cut = 4 <= step < 8
            engine.few_places = cut and few_places
            engine.step({"a": K + 1}, {"a": K})
            found.append(engine.manager.policy.expected_accepted)
            engine.draft(["a"], [0 if cut else 3])
        return found

    found = worth(True)
    assert found[3:] == [pytest.approx(found[3])] * 9 and found[3] > 1
    # Three steps late, they would count for nothing.
    assert worth(False)[10] < 0.7 * found[3]


def test_a_new_request_does_not_inherit_its_slots_drafts(device: torch.device) -> None:
    engine = Engine(device, lag=1)
    engine.add("a", 5)
    engine.draft(["a"], [K])
    del engine.states.req_id_to_index["a"]
    engine.add("b", 5)
    assert engine.valid[5] == 0


def test_prefill_beside_drafting_requests(device: torch.device) -> None:
    engine = Engine(device, lag=1)
    for slot, req_id in enumerate("abc"):
        engine.add(req_id, slot)
    engine.draft(["a", "c"], [1, 3])
    budget, widths = engine.step({"a": K + 1, "b": 300, "c": K + 1}, {"a": K, "c": K})
    assert (budget, widths) == (4, [1, 0, 3])


def test_the_likeliest_drafts_get_the_budget(device: torch.device) -> None:
    engine = Engine(device, lag=1)
    engine.add("a", 5)
    engine.add("b", 2)
    engine.draft(["a"], [K], 0.2)
    engine.draft(["b"], [K], 0.9)
    engine.step({"a": K + 1, "b": K + 1}, {"a": K, "b": K})
    slots = torch.tensor([5, 2], device=device)
    engine.manager.draft_budget = 4
    logits, _, _ = engine.manager.reallocate_drafts(["a", "b"], slots)
    assert logits.tolist() == [0, 1, 6]


@pytest.mark.parametrize(
    ("prompt", "budget"),
    [
        # All 20 are worth their row; of a full step they get a fiftieth of 380.
        (MOST_TOKENS - 25, 7),
        (MOST_TOKENS - 26, 20),
    ],
)
def test_drafts_leave_a_full_step_to_the_prompts_that_wait(
    prompt: int, budget: int, device: torch.device
) -> None:
    engine = Engine(device, lag=1)
    requests = "abcde"
    for slot, req_id in enumerate(requests):
        engine.add(req_id, slot)
    engine.draft(list(requests), [K] * 5, 0.9)
    engine.add("prompt", 5)
    scheduled = {**dict.fromkeys(requests, K + 1), "prompt": prompt}
    chosen, widths = engine.step(scheduled, dict.fromkeys(requests, K))
    assert chosen == sum(widths) == budget


def test_a_step_that_decodes_alone_fill_is_no_full_one(device: torch.device) -> None:
    engine = Engine(device, lag=1, most_tokens=2 * (K + 1))
    for slot, req_id in enumerate("ab"):
        engine.add(req_id, slot)
    engine.draft(["a", "b"], [K, K], 0.9)
    assert engine.step(dict.fromkeys("ab", K + 1), dict.fromkeys("ab", K))[0] == 2 * K


def test_asleep_no_draft_is_verified(device: torch.device) -> None:
    engine = Engine(device, lag=1)
    engine.add("a", 0)
    engine.draft(["a"], [0])
    while not engine.manager.policy.asleep:
        assert engine.step({"a": K + 1}, {"a": K})[0] == 0
        engine.draft(["a"], [0])
    # No place is scheduled; what is drafted all the same says when to wake.
    steps = 0
    while engine.manager.policy.asleep:
        assert engine.choose({"a": 1}, {}) == 0
        engine.draft(["a"], [2], 0.9)
        steps += 1
        assert steps < 100
    assert engine.step({"a": K + 1}, {"a": K})[0] > 0


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_which_steps_tell_what_they_should_cost(
    async_scheduling: bool, device: torch.device
) -> None:
    engine = Engine(device, 1, async_scheduling)
    engine.add("a", 0)
    engine.draft(["a"], [K], 0.9)
    manager = engine.manager
    assert engine.step({"a": K + 1}, {"a": K})[0] > 0
    assert manager.kind is StepKind.DRAFTS
    assert manager.expected_ms == pytest.approx(1.0, abs=0.01)
    for _ in range(100):
        engine.draft(["a"], [0])
        budget, _ = engine.step({"a": K + 1}, {"a": K})
    # Its places took the host's time. Without async scheduling all steps have them.
    assert budget == 0
    assert manager.kind is (StepKind.PLACES if async_scheduling else StepKind.PLAIN)
    assert manager.expected_ms > 0
    engine.choose({"a": 1}, {})
    assert manager.kind is StepKind.PLAIN
    assert manager.expected_ms > 0
    engine.choose({"a": 1, "b": 300}, {})
    assert manager.expected_ms == 0


def test_contexts_are_those_of_the_step(device: torch.device) -> None:
    engine = Engine(device, lag=1)
    engine.choose({"a": 1}, {})
    assert engine.manager.policy.context_ratio == 1.0
    engine.contexts = [512, 2048, 512]
    engine.choose({"a": 1}, {})
    assert engine.manager.policy.context_ratio == 2.0


def test_measured_costs_are_milliseconds(device: torch.device) -> None:
    engine = Engine(device, lag=1)
    manager = engine.manager
    assert not manager.costs_are_measured
    flat = CostCurve.of([(1, 1.0), (10_000, 1.001)], 0)
    measured = StepCosts.without_contexts(flat, flat), [1]
    manager.profile = SimpleNamespace(costs=lambda samples: measured)  # type: ignore[assignment]
    manager.set_initial_cost_curves([])
    assert manager.costs_are_measured


def test_wakes_beside_prefills(device: torch.device) -> None:
    engine = Engine(device, lag=1)
    engine.add("a", 0)
    engine.add("b", 1)
    engine.manager.policy.asleep = True
    for _ in range(50):
        engine.draft(["a"], [K], 0.99)
        # A prefill's chunk in every step.
        assert engine.choose({"a": 1, "b": 300}, {}) == 0
    assert not engine.manager.policy.asleep


def test_what_former_requests_left_is_forgotten(device: torch.device) -> None:
    engine = Engine(device, lag=1)
    for slot, req_id in ((3, "a"), (1, "b"), (2, "c")):
        engine.add(req_id, slot)
    engine.draft(["a", "b", "c"], [K, K, K])
    made, valid = engine.values._made, engine.valid
    assert all(made[slot].any() and valid[slot] == K for slot in (1, 2, 3))
    kept = made[2].clone()
    # Two prompts come in one step; the request in slot 2 stays.
    engine.manager.add_request(3)
    engine.manager.add_request(1)
    engine.manager.forget_former_requests()
    assert not made[3].any() and not made[1].any()
    assert valid.tolist()[1:4] == [0, K, 0]
    assert made[2].equal(kept)
    # Nor does it go with the next step's.
    engine.draft(["a"], [K])
    engine.manager.forget_former_requests()
    assert made[3].any() and valid[3] == K


class Runner:
    """As much of the runner as the hook around its step looks at."""

    def __init__(self, manager: Any) -> None:
        self.adaptive_verification = manager
        self.seen: Any = None

    def execute_model(self, scheduler_output: Any, *args: Any) -> None:
        self.seen = scheduler_output


@pytest.mark.parametrize("has_grammar", [False, True])
def test_drafts_leave_a_step_that_verifies_none(
    has_grammar: bool, device: torch.device
) -> None:
    engine = Engine(device, lag=1)
    engine.add("a", 0)
    engine.manager.policy.asleep = True
    engine.draft(["a"], [0])
    scheduled = SimpleNamespace(
        num_scheduled_tokens={"a": K + 1, "b": 7},
        total_num_scheduled_tokens=K + 8,
        scheduled_spec_decode_tokens={"a": [-1] * K},
        scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=[3, 0]),
        has_structured_output_requests=has_grammar,
    )
    runner = Runner(engine.manager)
    step = widths._wrap_execute(Runner.execute_model)
    step(runner, scheduled)
    if has_grammar:
        # The masks that come with it were laid out for all of its places.
        assert runner.seen is scheduled
    else:
        assert runner.seen.num_scheduled_tokens == {"a": 1, "b": 7}
        assert runner.seen.total_num_scheduled_tokens == 8
        assert runner.seen.scheduled_spec_decode_tokens == {}
    # What the scheduler holds is its own.
    assert scheduled.num_scheduled_tokens == {"a": K + 1, "b": 7}
    assert scheduled.scheduled_spec_decode_tokens == {"a": [-1] * K}


def test_impossible_counts_are_clamped_and_warned_of_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(
        verification.logger, "warning", lambda text, *a: messages.append(text % a)
    )
    engine = Engine(device, lag=1)
    for slot, req_id in enumerate("abcd"):
        engine.add(req_id, slot)
    scheduled = {req_id: K + 1 for req_id in "abcd"}
    drafts = {req_id: K for req_id in "abcd"}
    engine.draft(["a", "b", "c"], [K, 0, 2])
    engine.step(scheduled, drafts)
    assert engine.manager.num_impossible == 0 and not messages
    for _ in range(3):
        engine.draft(["a", "b", "c"], [-7, K + 9, 2])
        budget, widths = engine.step(scheduled, drafts)
        # The others get what is theirs; fillers take what is left.
        assert sum(widths) == budget and widths[1] == K and widths[2] >= 2
    engine.draft(["c", "d"], [2, 1], float("nan"))
    engine.step(scheduled, drafts)
    assert engine.manager.num_impossible == 3 * 2 + 2
    (line,) = messages
    assert "SimpleNamespace publishes draft counts outside 0..4" in line


def test_a_fourth_result_for_newer_runners(device: torch.device) -> None:
    engine = Engine(device, lag=1)
    engine.manager._returns_admitted_counts = True
    engine.add("a", 0)
    engine.choose({"a": 3}, {"a": [-1, -1]})
    engine.manager.get_num_tokens({"a": 3}, {"a": [-1, -1]})
    engine.manager.compact_batch(
        np.array([2], np.int32), np.array([3], np.int32), np.array([0, 3], np.int32)
    )
    result = engine.manager.reallocate_drafts(["a"], torch.tensor([0], device=device))
    assert len(result) == 4 and result[3] is None


def test_random_steps(device: torch.device, rng: random.Random) -> None:
    engine = Engine(device, lag=2)
    free = list(range(SLOTS))
    serial = 0
    for _ in range(40):
        live = engine.states.req_id_to_index
        if free and rng.random() < 0.4:
            engine.add(f"r{serial}", free.pop(rng.randrange(len(free))))
            serial += 1
        elif live and rng.random() < 0.2:
            free.append(live.pop(rng.choice(list(live))))
        batch = [r for r in live if rng.random() < 0.9]
        if not batch:
            continue
        drafts = {r: rng.randint(1, K) for r in batch if rng.random() < 0.8}
        scheduled = {r: drafts.get(r, 0) + rng.choice([1, 1, 50]) for r in batch}
        engine.step(scheduled, drafts)
        engine.draft(batch, [rng.randint(0, K) for _ in batch], rng.random())


@pytest.mark.parametrize(
    ("budget", "capacities", "widths"),
    [
        (0, [3, 3], [0, 0]),
        (3, [3, 3], [2, 1]),
        (7, [1, 4, 2], [1, 4, 2]),
        (4, [0, 4, 0], [0, 4, 0]),
        (0, [], []),
    ],
)
def test_spread(budget: int, capacities: list[int], widths: list[int]) -> None:
    assert _spread(budget, np.array(capacities, np.int32)).tolist() == widths


def test_spread_stays_within_the_capacities(rng: random.Random) -> None:
    for _ in range(50):
        capacities = [rng.randrange(6) for _ in range(rng.randrange(9))]
        budget = rng.randint(0, sum(capacities))
        widths = _spread(budget, np.array(capacities, np.int32))
        assert widths.sum() == budget
        assert (widths >= 0).all() and (widths <= capacities).all()


def backend(name: str) -> Any:
    group = SimpleNamespace(backend=SimpleNamespace(get_name=lambda: name))
    return [[group]]


def vllm_config() -> Any:
    return SimpleNamespace(
        lora_config=None,
        parallel_config=SimpleNamespace(
            rank=0,
            world_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            enable_batch_sharded_sampling=False,
            use_ubatching=False,
        ),
        model_config=SimpleNamespace(
            return_sampling_mask=False,
            get_num_attention_heads=lambda parallel: 32,
            get_num_kv_heads=lambda parallel: 8,
        ),
        aux_output_config=SimpleNamespace(enabled=False),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: False)
        ),
        scheduler_config=SimpleNamespace(
            async_scheduling=True,
            max_num_scheduled_tokens=None,
            max_num_batched_tokens=MOST_TOKENS,
        ),
        speculative_config=SimpleNamespace(method="ngram"),
        num_speculative_tokens=K,
        max_concurrent_batches=2,
        additional_config={},
    )


@pytest.mark.parametrize(
    ("num_stages", "num_ranks", "speaker"), [(1, 1, 0), (1, 4, 0), (2, 2, 1), (2, 8, 4)]
)
def test_one_of_the_ranks_that_draft_speaks(
    num_stages: int, num_ranks: int, speaker: int
) -> None:
    parallel = SimpleNamespace(pipeline_parallel_size=num_stages, world_size=num_ranks)
    found = []
    for parallel.rank in range(num_ranks):
        if _speaks(parallel):
            found.append(parallel.rank)
    assert found == [speaker]


PUBLISHES = SimpleNamespace(num_valid_drafts_for_trim=torch.zeros(SLOTS))


def reason(config: Any, **changes: Any) -> str | None:
    arguments = {
        "speculator": PUBLISHES,
        "attn_groups": backend("FLASH_ATTN"),
        "settings": Settings(),
    }
    return why_not_trimmed(config, **{**arguments, **changes})


def test_trimmed_where_nothing_is_in_the_way() -> None:
    assert reason(vllm_config()) is None


def test_switched_off() -> None:
    why = reason(vllm_config(), settings=Settings(trim=False))
    assert why == "switched off by mrv2_spec.trim=false"


def test_drafter_without_counts() -> None:
    why = reason(vllm_config(), speculator=SimpleNamespace())
    assert why == "the drafter publishes no num_valid_drafts_for_trim"


def test_backend_that_plans_on_the_host() -> None:
    why = reason(vllm_config(), attn_groups=backend("FLASHINFER"))
    assert why is not None
    assert why.startswith("attention backend FLASHINFER is not known to take query")
    mixed = backend("FLASH_ATTN") + backend("FLASHINFER")
    assert reason(vllm_config(), attn_groups=mixed) == why


@pytest.mark.parametrize(
    ("part", "changes", "word"),
    [
        (None, {"lora_config": object()}, "LoRA"),
        ("parallel_config", {"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ("parallel_config", {"data_parallel_size": 2}, "data-parallel"),
        ("parallel_config", {"decode_context_parallel_size": 2}, "context parallelism"),
        ("parallel_config", {"enable_batch_sharded_sampling": True}, "sharded"),
        ("parallel_config", {"use_ubatching": True}, "dual-batch"),
        ("model_config", {"return_sampling_mask": True}, "replay"),
        ("aux_output_config", {"enabled": True}, "routed experts"),
    ],
)
def test_what_needs_the_hosts_boundaries(
    part: str | None, changes: dict[str, Any], word: str
) -> None:
    config = vllm_config()
    vars(config if part is None else getattr(config, part)).update(changes)
    why = reason(config)
    assert why is not None and word in why and "\n" not in why


@pytest.mark.parametrize("trim", [True, False])
def test_the_manager_is_made_only_where_it_trims(
    trim: bool, device: torch.device
) -> None:
    config = vllm_config()
    config.additional_config = {"mrv2_spec": {"trim": trim}}
    states = SimpleNamespace(
        max_num_reqs=SLOTS,
        max_model_len=4096,
        num_speculative_steps=K,
        device=device,
        _mrv2_spec_draft_values=DraftValues(SLOTS, K, 0, device),
        _mrv2_spec_speculator=SimpleNamespace(
            num_valid_drafts_for_trim=torch.zeros(
                SLOTS, dtype=torch.int32, device=device
            )
        ),
    )
    create = _wrap_create(lambda **kwargs: "vLLM's own")
    arguments = {
        "vllm_config": config,
        "attn_groups": backend("FLASH_ATTN"),
        "query_start_loc": torch.zeros(SLOTS + 1, dtype=torch.int32, device=device),
        "num_bonus_tokens": 1,
        "max_total_logits": 40,
    }
    made = create(req_states=states, **arguments)
    assert isinstance(made, TrimManager) if trim else made is None
    assert create(req_states=SimpleNamespace(), **arguments) == "vLLM's own"


def test_graph_mode_is_left_alone_without_full_graphs() -> None:
    def original(mode: Any, *, piecewise_capture_available: bool) -> str:
        return f"resolved {piecewise_capture_available}"

    patched = _wrap_graph_mode(original)
    eager = SimpleNamespace(has_full_cudagraphs=lambda: False)
    full = SimpleNamespace(has_full_cudagraphs=lambda: True)
    assert patched(eager, piecewise_capture_available=True) is eager
    assert patched(full, piecewise_capture_available=True) == "resolved True"


def capture_sizes(config: Any, mine: list[int] | None = None) -> list[int]:
    """Return the sizes an engine captures whose vLLM chooses sizes up to 512."""
    config.use_v2_model_runner = True
    config.scheduler_config.max_num_batched_tokens = 8192
    config.scheduler_config.max_num_seqs = 256
    config.compilation_config.cudagraph_capture_sizes = mine
    config.compilation_config.max_cudagraph_capture_size = None

    def choose(self: Any) -> None:
        self.compilation_config.cudagraph_capture_sizes = mine or [1, 2, 256, 512]

    _wrap_sizes(choose)(config)
    sizes: list[int] = config.compilation_config.cudagraph_capture_sizes
    return sizes


def test_more_graphs_are_captured_where_drafts_may_be_trimmed() -> None:
    sizes = capture_sizes(vllm_config())
    assert sizes[:4] == [1, 2, 256, 512]
    # 256 requests with 4 drafts each have no more than 1280 tokens.
    assert sizes[4:] == [576, 640, 704, 768, 832, 896, 960, 1024, 1152, 1280]


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        (None, {"lora_config": object()}),
        (None, {"additional_config": {"mrv2_spec": {"trim": False}}}),
        (None, {"speculative_config": None}),
        ("parallel_config", {"pipeline_parallel_size": 2}),
        ("parallel_config", {"data_parallel_size": 2}),
    ],
)
def test_no_more_graphs_where_they_are_not(
    part: str | None, changes: dict[str, Any]
) -> None:
    config = vllm_config()
    vars(config if part is None else getattr(config, part)).update(changes)
    assert capture_sizes(config) == [1, 2, 256, 512]


def test_graph_sizes_that_the_user_chose_stay() -> None:
    assert capture_sizes(vllm_config(), mine=[1, 8]) == [1, 8]


@pytest.mark.parametrize(
    ("device_type", "async_scheduling", "done", "waits"),
    [
        ("cuda", True, True, True),
        ("cuda", True, False, False),
        # Each step is waited for before the next: the device always is done.
        ("cuda", False, True, False),
        ("cpu", True, True, False),
    ],
)
def test_the_device_is_asked_where_it_could_be_busy(
    device_type: str, async_scheduling: bool, done: bool, waits: bool
) -> None:
    config = vllm_config()
    config.scheduler_config.async_scheduling = async_scheduling
    runner = SimpleNamespace(
        device=SimpleNamespace(type=device_type), vllm_config=config
    )
    assert not _gpu_waits(runner)
    setattr(runner, _LAST_OUTPUT, SimpleNamespace(query=lambda: done))
    assert _gpu_waits(runner) == waits


def test_steps_that_look_say_nothing_of_what_plain_ones_cost(
    device: torch.device,
) -> None:
    engine = Engine(device, 1)
    engine.add("a", 0)
    engine.draft(["a"], [0])
    while not engine.manager.policy.asleep:
        engine.step({"a": K + 1}, {"a": K})
        engine.draft(["a"], [0])
    batch = SimpleNamespace(num_reqs=1)
    engine.choose({"a": 1}, {})
    engine.manager.record_confidences(None, batch)
    assert engine.manager.expected_ms > 0
    engine.choose({"a": 1}, {})
    # Drafts are made to be judged: it takes the host longer than a plain step.
    engine.draft(["a"], [0])
    assert engine.manager.expected_ms == 0
