"""The hooks: what they expect of vLLM, and what each does to it."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner")

import msgspec
import numpy as np
import vllm.config.vllm as vllm_config_module
import vllm.v1.worker.gpu.model_runner as vllm_runner
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from mrv2_spec import integration
from mrv2_spec.config import SettingsError
from mrv2_spec.counters import DraftCounts
from mrv2_spec.integration import (
    async_scheduling,
    counting,
    methods,
    patching,
    verification,
)
from mrv2_spec.integration.patching import Patch, PatchError, PatchField
from mrv2_spec.kernels.propose_ngram import NUM_CLASSES
from mrv2_spec.metrics.step import NO_LIMIT
from mrv2_spec.ngram import NgramSpeculator, prior_acceptance
from mrv2_spec.placeholders import find_placeholder_ids


def all_patches() -> list[tuple[str, Patch | PatchField]]:
    """Return every patch that installing applies, with its module's name."""
    found: list[tuple[str, Patch | PatchField]] = []

    def note(module: Any, patches: Any) -> None:
        name = module if isinstance(module, str) else module.__name__
        found.extend((name, patch) for patch in patches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patching, "apply", note)
        patch.setattr(patching, "apply_on_import", note)
        integration.install()
    integration.uninstall()
    return found


PINNED = all_patches()


@pytest.mark.parametrize(
    ("module", "patch"),
    PINNED,
    ids=[getattr(patch, "attribute", str(patch)) for _, patch in PINNED],
)
def test_installed_vllm_has_the_expected_signature(
    module: str, patch: Patch | PatchField
) -> None:
    if isinstance(patch, PatchField):
        assert patching._field(importlib.import_module(module), patch)
        return
    if not patch.parameters:
        patching._addition(importlib.import_module(module), patch)
        return
    _, _, original = patching._resolve(importlib.import_module(module), patch.attribute)
    assert tuple(inspect.signature(original).parameters) in patch.parameters


def test_propose_takes_what_the_runner_passes() -> None:
    ours = inspect.signature(NgramSpeculator.propose).parameters
    theirs = inspect.signature(BaseSpeculator.propose).parameters
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


def test_trim_manager_answers_all_of_the_runners_calls() -> None:
    theirs = vllm_runner.AdaptiveVerificationManager
    source = inspect.getsource(vllm_runner)
    called = [
        name
        for name, member in inspect.getmembers(theirs, inspect.isfunction)
        if f"adaptive_verification.{name}(" in source
    ]
    assert "reallocate_drafts" in called
    for name in called:
        ours = getattr(verification.TrimManager, name)
        want = list(inspect.signature(getattr(theirs, name)).parameters)
        assert len(inspect.signature(ours).parameters) == len(want), name


# ---- patching


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the name of a module that was not imported yet."""
    name = f"toy_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "def double(x):\n    return 2 * x\n\n\nclass Thing:\n"
        "    def size(self, unit):\n        return 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    patching.revert_all()
    sys.modules.pop(name, None)


def _plus_one(original: Any) -> Any:
    return lambda *args: original(*args) + 1


DOUBLE = Patch("double", (("x",),), _plus_one)
SIZE = Patch("Thing.size", (("self",), ("self", "unit")), _plus_one)


def test_apply_and_revert(toy: str) -> None:
    module = importlib.import_module(toy)
    patching.apply(module, [DOUBLE, SIZE])
    assert (module.double(3), module.Thing().size("m")) == (7, 2)
    patching.revert_all()
    assert (module.double(3), module.Thing().size("m")) == (6, 1)


def test_a_later_patch_goes_around_an_earlier_one(toy: str) -> None:
    module = importlib.import_module(toy)
    times_ten = Patch("double", (("x",),), lambda f: lambda x: 10 * f(x))
    patching.apply(module, [DOUBLE, times_ten, SIZE])
    assert (module.double(3), module.Thing().size("m")) == (70, 2)
    patching.revert_all()
    assert (module.double(3), module.Thing().size("m")) == (6, 1)


def test_apply_is_all_or_none(toy: str) -> None:
    module = importlib.import_module(toy)
    other = Patch("Thing.size", (("self", "scale"),), _plus_one)
    with pytest.raises(PatchError) as caught:
        patching.apply(module, [DOUBLE, other])
    assert "Thing.size takes (self, unit), expected (self, scale)" in str(caught.value)
    assert module.double(3) == 6
    with pytest.raises(PatchError, match=r"Thing\.colour does not exist"):
        patching.apply(module, [DOUBLE, Patch("Thing.colour", ((),), _plus_one)])
    assert module.double(3) == 6


def test_additions_must_be_new_and_go_again(toy: str) -> None:
    module = importlib.import_module(toy)
    new = Patch("Thing.colour", (), lambda original: original)
    patching.apply(module, [new, DOUBLE])
    assert module.Thing.colour is None
    with pytest.raises(PatchError, match="exists already; another plugin may"):
        patching.apply(module, [new])
    patching.revert_all()
    assert not hasattr(module.Thing, "colour")


def test_revert_keeps_what_somebody_else_put_on_top(toy: str) -> None:
    module = importlib.import_module(toy)
    patching.apply(module, [DOUBLE])
    module.double = theirs = lambda x: x
    patching.revert_all()
    assert module.double is theirs


def test_apply_on_import(toy: str) -> None:
    finders = list(sys.meta_path)
    patching.apply_on_import(toy, [DOUBLE])
    assert toy not in sys.modules
    module = importlib.import_module(toy)
    assert module.double(3) == 7
    assert sys.meta_path == finders
    # Now that it is imported, more patches apply at once.
    patching.apply_on_import(toy, [SIZE])
    assert module.Thing().size("m") == 2
    patching.revert_all()
    assert (module.double(3), module.Thing().size("m")) == (6, 1)


def test_looking_for_a_module_does_not_use_its_patches_up(toy: str) -> None:
    patching.apply_on_import(toy, [DOUBLE])
    assert importlib.util.find_spec(toy) is not None
    assert patching.is_active()
    assert importlib.import_module(toy).double(3) == 7


def test_an_import_that_failed_may_be_tried_again(
    toy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patching.apply_on_import(toy, [DOUBLE])
    loader = importlib.util.find_spec(toy).loader._loader  # type: ignore[union-attr]
    with monkeypatch.context() as patch:

        def fail(self: Any, module: ModuleType) -> None:
            raise ImportError("not yet")

        patch.setattr(type(loader), "exec_module", fail)
        with pytest.raises(ImportError, match="not yet"):
            importlib.import_module(toy)
    assert importlib.import_module(toy).double(3) == 7


@dataclass
class Message:
    number: int


def test_a_field_is_added_and_taken_back() -> None:
    module = ModuleType("messages")
    module.Message = Message
    before = dict(vars(Message))
    patching.apply(module, [PatchField("Message", "extra", list[int] | None)])
    assert Message(1).extra is None
    sent = Message(2)
    sent.extra = [3, 4]
    wire = msgspec.msgpack.encode(sent)
    assert msgspec.msgpack.decode(wire, type=Message).extra == [3, 4]
    plain = msgspec.msgpack.encode(Message(5))
    assert msgspec.msgpack.decode(plain, type=Message).extra is None
    patching.revert_all()
    assert {n: v for n, v in vars(Message).items() if n in before} == before
    assert not hasattr(Message, "extra")


def test_a_field_that_is_there_already() -> None:
    module = ModuleType("messages")
    module.Message = Message
    with pytest.raises(PatchError, match="has a field number already"):
        patching.apply(module, [PatchField("Message", "number", int)])
    module.Message = object
    with pytest.raises(PatchError, match="is no dataclass"):
        patching.apply(module, [PatchField("Message", "extra", int)])


@pytest.mark.parametrize("in_process", [True, False])
def test_counters_come_from_the_engine(in_process: bool) -> None:
    counts = DraftCounts(3)
    counts.lengths[:, 0, 2] = 5
    replies = {
        "mrv2_spec_counters": counts.to_list(),
        "mrv2_spec_request_counters": [("r-1", counts.to_list())],
    }
    if in_process:
        engine_core = SimpleNamespace(
            **{name: lambda r=reply: r for name, reply in replies.items()}
        )
        client = SimpleNamespace(engine_core=engine_core)
    else:
        client = SimpleNamespace(call_utility=replies.__getitem__)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client))
    assert integration.read_counts(llm) == counts
    assert integration.read_counters(llm) == counts.totals()
    assert integration.read_request_counts(llm) == [("r-1", counts)]
    replies["mrv2_spec_counters"] = None
    if not in_process:
        assert integration.read_counters(llm) is None


def test_revert_before_the_import(toy: str) -> None:
    finders = list(sys.meta_path)
    patching.apply_on_import(toy, [DOUBLE])
    patching.revert_all()
    assert sys.meta_path == finders
    assert importlib.import_module(toy).double(3) == 6


def test_patch_that_does_not_fit_on_import_reverts_the_others(toy: str) -> None:
    holder = ModuleType("holder")
    holder.double = original = lambda x: 2 * x
    patching.apply(holder, [DOUBLE])
    patching.apply_on_import(toy, [Patch("double", (("y",),), _plus_one)])
    with pytest.raises(PatchError):
        importlib.import_module(toy)
    assert holder.double is original
    assert importlib.import_module(toy).double(3) == 6


# ---- methods and async scheduling


def config(method: str | None, v2: bool = True, **fields: Any) -> Any:
    spec_config = None if method is None else SimpleNamespace(method=method, **fields)
    return SimpleNamespace(speculative_config=spec_config, use_v2_model_runner=v2)


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix", "custom_class"])
def test_served_on_v2_only(method: str) -> None:
    assert methods.served_method(config(method)) == method
    assert methods.served_method(config(method, v2=False)) is None


@pytest.mark.parametrize("method", [None, "eagle", "draft_model"])
def test_not_served(method: str | None) -> None:
    assert methods.served_method(config(method)) is None


def test_served_methods_are_no_longer_unsupported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    patched = methods._wrap_unsupported(
        lambda self: ["speculative method 'custom_class'", "something else"]
    )
    assert patched(config("custom_class")) == ["something else"]
    everything = ["speculative method 'custom_class'", "something else"]
    assert patched(config("eagle")) == patched(config(None)) == everything


def test_async_scheduling_sees_the_methods_during_the_call_only() -> None:
    before = vllm_config_module.NgramGPUTypes
    seen = []

    def original(self: Any) -> None:
        seen.append(get_args(vllm_config_module.NgramGPUTypes))
        if self.fails:
            raise RuntimeError("configuration")

    patched = async_scheduling._wrap(original)
    served = config(
        "custom_class",
        num_speculative_tokens=2,
        model="mrv2_spec.ngram.NgramSpeculator",
    )
    served.speculative_config.enable_adaptive_verification = False
    served.additional_config = None
    served.model_config = SimpleNamespace(max_model_len=9)
    served.fails = True
    with pytest.raises(RuntimeError, match="configuration"):
        patched(served)
    assert vllm_config_module.NgramGPUTypes is before
    other = config("eagle")
    other.fails = False
    patched(other)
    assert set(seen[0]) == set(methods.SERVED_METHODS)
    assert seen[1] == get_args(before)


def test_ngram_class() -> None:
    for method in ("ngram", "ngram_gpu"):
        assert methods.speculator_class(config(method)) is NgramSpeculator


def test_custom_class() -> None:
    path = "mrv2_spec.ngram.NgramSpeculator"
    assert methods.speculator_class(config("custom_class", model=path)) is (
        NgramSpeculator
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("collections.OrderedDict", "is no subclass of vllm.v1.worker.gpu.spec_decode"),
        ("collections.namedtuple", "is no subclass of"),
        ("collections.Nope", "must be the dotted path of a class"),
        ("no_such_package.Nope", "must be the dotted path of a class"),
        ("Nope", "must be the dotted path of a class"),
    ],
)
def test_custom_class_that_is_none(path: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        methods.speculator_class(config("custom_class", model=path))
    assert f"model={path!r} of method 'custom_class'" in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- the drafter's parts


def test_placeholder_ids() -> None:
    hf_config = SimpleNamespace(
        image_token_id=7, video_token_index=5, audio_token_id=None, image_token_index=7
    )
    assert find_placeholder_ids(hf_config) == [5, 7]
    assert find_placeholder_ids(SimpleNamespace()) == []


def test_prior_acceptance_rises_with_match_length_and_position() -> None:
    prior = prior_acceptance(6)
    assert prior.shape == (NUM_CLASSES, 6)
    assert not prior[0].any()
    assert ((prior[1:] > 0) & (prior[1:] < 1)).all()
    assert (prior[1:].diff(dim=0) >= 0).all()
    assert (prior[1:].diff(dim=1) > 0).all()


# ---- grammar


def test_grammar_limits_go_by_request() -> None:
    batch = SimpleNamespace(
        num_reqs=4,
        req_ids=["a", "b", "c", "d"],
        num_draft_tokens_per_req=np.array([4, 4, 4, 2]),
    )
    output = SimpleNamespace(
        structured_output_request_ids=["c", "gone", "a", "d"],
        num_acceptable_drafts=[2, 9, 0, 2],
    )

    def limits() -> list[int] | None:
        found = counting.grammar_limits(batch, output)
        return None if found is None else found.tolist()

    # All that "d" had scheduled passed: nothing is known of what was not.
    assert limits() == [0, NO_LIMIT, 2, NO_LIMIT]
    # Without the hand-off vLLM rejects every draft.
    output.num_acceptable_drafts = None
    assert limits() == [0, NO_LIMIT, 0, 0]
    output.structured_output_request_ids = []
    assert limits() is None
    assert counting.grammar_limits(batch, None) is None


# ---- sampling


@pytest.mark.parametrize("given", [{"min_p": 0.1}, {"logit_bias": {3: 5.0}}])
@pytest.mark.parametrize("served", [True, False])
def test_parameters_that_vllm_refuses_with_speculation(
    given: dict[str, Any], served: bool
) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    params = SamplingParams(**given)
    spec_config = SimpleNamespace(method="ngram")
    if served:
        methods.mark_served(SimpleNamespace(speculative_config=spec_config))
    integration.install()
    try:
        if served:
            params._validate_spec_decode(spec_config)
        else:
            with pytest.raises(VLLMValidationError, match="not yet supported"):
                params._validate_spec_decode(spec_config)
    finally:
        integration.uninstall()
    assert getattr(params, next(iter(given))) == next(iter(given.values()))
