"""Booking steps: worked examples by hand, requests that come and go, random steps."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from mrv2_spec.counters import ACCEPTED, VERIFIED, DraftCounts, Totals, add_up
from mrv2_spec.metrics.ledger import Ledger
from mrv2_spec.metrics.step import NO_LIMIT, Ended, StepCounts

K, NUM_SLOTS = 4, 6


def step(
    slots: Sequence[int],
    proposed: Sequence[int],
    widths: Sequence[int],
    sampled: Sequence[int],
    *,
    sources: Sequence[int] | None = None,
    limits: Sequence[int] | None = None,
    rounds: Sequence[bool] | None = None,
    ended: Sequence[Ended] = (),
) -> StepCounts:
    num_reqs = len(slots)
    return StepCounts(
        slots=np.array(slots, dtype=np.int64),
        drafts=np.array(
            [widths, proposed, sources or [0] * num_reqs], dtype=np.int32
        ).reshape(3, num_reqs),
        num_sampled=np.array(sampled, dtype=np.int32),
        is_round=np.array(
            [True] * num_reqs if rounds is None else rounds, dtype=np.bool_
        ),
        limits=None if limits is None else np.array(limits, dtype=np.int32),
        ended=list(ended),
    )


def begin(ledger: Ledger, req_id: str = "a", slot: int = 0) -> None:
    """Let a request do its prefill."""
    ledger.book(step([slot], [0], [0], [1], rounds=[False]), [req_id], new={req_id})


def test_ten_rounds_of_which_three_had_drafts() -> None:
    ledger = Ledger(K, NUM_SLOTS)
    begin(ledger)
    for real, accepted in [(4, 4), (2, 1), (0, 0), (1, 0), *[(0, 0)] * 6]:
        ledger.book(step([0], [real], [real], [accepted + 1]), ["a"])
    totals = ledger.total.totals()
    assert (totals.proposed, totals.verified, totals.accepted) == (7, 7, 5)
    assert (totals.rounds, totals.rounds_with_draft) == (10, 3)
    assert totals.acceptance == pytest.approx(5 / 7)
    assert totals.coverage == pytest.approx(3 / 10)
    assert totals.mean_acceptance_length == pytest.approx(1 + 5 / 10)
    assert totals.fillers == 0
    assert 1 + totals.accepted / totals.rounds_with_draft == pytest.approx(1 + 5 / 3)


def test_untrimmed_places_are_fillers_and_count_for_nothing() -> None:
    ledger = Ledger(K, NUM_SLOTS)
    begin(ledger)
    # All four places are verified each round; in the third round a filler happens to
    # be right, and in the second one beside a right draft.
    sampled = [5, 4, 2, 1, *[1] * 6]
    for real, num in zip([4, 2, 0, 1, *[0] * 6], sampled, strict=True):
        ledger.book(step([0], [real], [4], [num]), ["a"])
    totals = ledger.total.totals()
    assert (totals.proposed, totals.verified) == (7, 7)
    assert totals.accepted == 4 + 2 + 0 + 0
    assert totals.fillers == 40 - 7


def test_grammar_and_trimming_shares() -> None:
    ledger = Ledger(K, NUM_SLOTS)
    begin(ledger)
    # Rounds with (real, ruled out by a grammar, not verified, accepted) of
    # (4, 0, 0, 4), (4, 4, 0, 0), (4, 0, 3, 1), (0, 0, 0, 0).
    for real, limit, width, sampled in [(4, NO_LIMIT, 4, 5), (4, 0, 4, 1),
                                        (4, NO_LIMIT, 1, 2), (0, 0, 0, 1)]:  # fmt: skip
        ledger.book(step([0], [real], [width], [sampled], limits=[limit]), ["a"])
    totals = ledger.total.totals()
    assert (totals.proposed, totals.verified, totals.accepted) == (12, 5, 5)
    assert (totals.invalid, totals.never_issued) == (4, 3)
    assert totals.acceptance == 1.0
    assert totals.coverage == 3 / 4
    assert totals.mean_acceptance_length == 1 + 5 / 4


def test_what_a_grammar_cut_before_scheduling_is_invalid() -> None:
    ledger = Ledger(K, NUM_SLOTS)
    begin(ledger)
    # Of four drafts two passed; one of those was not scheduled.
    one = step([0], [4], [1], [2])
    one.cut(["a"], {"a": 2})
    ledger.book(one, ["a"])
    totals = ledger.total.totals()
    assert (totals.proposed, totals.invalid, totals.never_issued) == (4, 2, 1)
    assert (totals.verified, totals.accepted) == (1, 1)


def test_prefill_is_no_round() -> None:
    ledger = Ledger(K, NUM_SLOTS)
    # What its slot's former request left there is not the new one's.
    ledger.book(step([1], [3], [0], [0], rounds=[False]), ["a"], new={"a"})
    ledger.book(step([1], [3], [0], [1], rounds=[False]), ["a"])
    assert ledger.total == DraftCounts(K)
    ledger.book(step([1], [2], [2], [2]), ["a"])
    assert ledger.total.totals() == Totals(
        proposed=2, verified=2, accepted=1, rounds=1, rounds_with_draft=1
    )


def test_sources_positions_and_lengths() -> None:
    ledger = Ledger(K, NUM_SLOTS)
    begin(ledger)
    ledger.book(step([0], [3], [4], [2], sources=[1]), ["a"])
    ledger.book(step([0], [2], [2], [3], sources=[0]), ["a"])
    # Without a draft there is no source.
    ledger.book(step([0], [0], [0], [1], sources=[1]), ["a"])
    assert ledger.total.at(VERIFIED).tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
    assert ledger.total.at(ACCEPTED).tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert ledger.total.accepted_lengths() == [1, 1, 1, 0, 0]
    assert ledger.total.totals(1) == Totals(
        proposed=3, verified=3, accepted=1, rounds=1, rounds_with_draft=1
    )


def test_output_that_nobody_takes() -> None:
    # A step that ran for a request that had ended: never issued, not rejected.
    ledger = Ledger(K, NUM_SLOTS)
    begin(ledger)
    ledger.book(step([0], [4], [4], [3]), ["a"], dropped=[0])
    assert ledger.total.totals() == Totals(proposed=4, never_issued=4)
    ledger.book(StepCounts.of_nothing([Ended("a", 2, 1)]), [], finished={"a"})
    assert ledger.total.totals() == Totals(proposed=6, never_issued=6)
    assert ledger.total.totals(1) == Totals(proposed=2, never_issued=2)
    assert ledger.of_request("a") == ledger.total


def test_a_request_that_is_preempted_goes_on_counting() -> None:
    ledger = Ledger(K, NUM_SLOTS)
    begin(ledger)
    ledger.book(step([0], [4], [4], [3]), ["a"])
    # Its slot goes to another one, and it comes back to a third.
    ledger.book(
        step([0], [0], [0], [1], rounds=[False], ended=[Ended("a", 3, 0)]),
        ["b"],
        new={"b"},
    )
    assert dict(ledger.requests())["a"].totals().never_issued == 3
    ledger.book(step([2, 0], [0, 1], [0, 1], [1, 2], rounds=[False, True]), ["a", "b"],
                new={"a"})  # fmt: skip
    ledger.book(step([0, 2], [0, 2], [0, 2], [1, 1]), ["b", "a"])
    a, b = ledger.of_request("a"), ledger.of_request("b")
    assert a is not None
    assert b is not None
    assert a.totals() == Totals(
        proposed=9, verified=6, accepted=2, never_issued=3, rounds=2,
        rounds_with_draft=2,
    )  # fmt: skip
    assert b.totals() == Totals(
        proposed=1, verified=1, accepted=1, rounds=2, rounds_with_draft=1
    )
    assert a + b == ledger.total


def test_a_preempted_request_that_is_aborted_is_remembered() -> None:
    ledger = Ledger(K, NUM_SLOTS)
    begin(ledger)
    ledger.book(StepCounts.of_nothing([Ended("a", 3, 0)]), [])
    ledger.book(StepCounts.of_nothing([]), [], finished={"a"})
    assert [name for name, _ in ledger.requests()] == ["a"]
    assert not ledger._parked


def by_request(ledger: Ledger) -> list[tuple[str, Totals]]:
    """Return what the requests counted, which must add up to all that was."""
    found = ledger.requests()
    assert add_up((counts for _, counts in found), K) == ledger.total
    return [(name, counts.totals()) for name, counts in found]


PLAYED = Totals(proposed=4, verified=4, accepted=2, rounds=1, rounds_with_draft=1)
TWO_MORE = Totals(proposed=2, verified=2, accepted=1, rounds=1, rounds_with_draft=1)


def test_a_request_that_ends_in_a_step_without_counts() -> None:
    ledger = Ledger(K, NUM_SLOTS)
    begin(ledger)
    ledger.book(step([0], [4], [4], [3]), ["a"])
    ledger.skip(new=(), finished={"a"}, preempted=())
    # Its slot goes to another one.
    begin(ledger, "b")
    ledger.book(step([0], [2], [2], [2]), ["b"])
    assert by_request(ledger) == [("a", PLAYED), ("b", TWO_MORE)]


def test_a_request_that_begins_in_a_step_without_counts() -> None:
    ledger = Ledger(K, NUM_SLOTS)
    begin(ledger)
    ledger.skip(new={"b", "c", "d"}, finished=(), preempted=())
    ledger.book(step([0, 3], [4, 2], [4, 2], [3, 2]), ["a", "b"])
    # Two end before any step tells their slots, one of them unnoticed, with drafts
    # pending or not.
    ledger.book(StepCounts.of_nothing([Ended("c", 3, 1)]), [], finished={"c"})
    ledger.skip(new=(), finished={"d"}, preempted=())
    assert sorted(by_request(ledger)) == [
        ("a", PLAYED),
        ("b", TWO_MORE),
        ("c", Totals(proposed=3, never_issued=3)),
        ("d", Totals()),
    ]
    assert not ledger._parked


def test_a_request_that_is_preempted_in_a_step_without_counts() -> None:
    ledger = Ledger(K, NUM_SLOTS)
    begin(ledger)
    ledger.book(step([0], [4], [4], [3]), ["a"])
    ledger.skip(new=(), finished=(), preempted={"a"})
    begin(ledger, "b")
    # It is back, in a step whose counts do not come either.
    ledger.skip(new={"a"}, finished=(), preempted=())
    ledger.book(step([0, 1], [2, 2], [2, 2], [2, 2]), ["b", "a"])
    assert by_request(ledger) == [("b", TWO_MORE), ("a", Totals(
        proposed=6, verified=6, accepted=3, rounds=2, rounds_with_draft=2,
    ))]  # fmt: skip
    # A namesake has nothing of it.
    ledger.skip(new={"a"}, finished={"a"}, preempted=())
    ledger.book(step([1], [4], [4], [3]), ["a"])
    assert by_request(ledger)[-1] == ("a", PLAYED)


def test_the_same_name_again() -> None:
    ledger = Ledger(K, NUM_SLOTS)
    begin(ledger)
    ledger.book(step([0], [4], [4], [3]), ["a"])
    ledger.book(
        step([0], [0], [0], [1], rounds=[False], ended=[Ended("a", 1, 0)]),
        ["a"],
        new={"a"},
        finished={"a"},
    )
    (_, first), (_, second) = ledger.requests()
    assert first.totals().proposed == 5
    assert second == DraftCounts(K)


def test_only_the_newest_are_remembered_and_the_total_keeps_all() -> None:
    ledger = Ledger(K, NUM_SLOTS, num_remembered=2)
    for i in range(5):
        begin(ledger, f"r{i}")
        ledger.book(step([0], [1], [1], [2]), [f"r{i}"])
        ended = [Ended(f"r{i}", 0, 0)]
        ledger.book(StepCounts.of_nothing(ended), [], finished={f"r{i}"})
    assert [name for name, _ in ledger.requests()] == ["r3", "r4"]
    assert ledger.total.totals().accepted == 5


def test_a_drafter_that_claims_nonsense() -> None:
    ledger = Ledger(K, NUM_SLOTS)
    begin(ledger)
    begin(ledger, "b", 1)
    ledger.book(step([0, 1], [-1, K + 1], [K, K], [1, 1], sources=[5, -2]), ["a", "b"])
    ledger.book(
        StepCounts.of_nothing([Ended("a", -3, 9), Ended("b", K + 5, -1)]),
        [],
        finished={"a", "b"},
    )
    totals = ledger.total.totals()
    assert (totals.proposed, totals.verified, totals.fillers) == (2 * K, K, K)
    assert totals.never_issued == K
    assert ledger.total.totals(0).proposed == 2 * K


def test_steps_without_any_draft_are_booked_alike(rng: random.Random) -> None:
    ledgers = [Ledger(K, NUM_SLOTS), Ledger(K, NUM_SLOTS)]
    for ledger in ledgers:
        for i in range(4):
            begin(ledger, f"r{i}", i)
    for _ in range(20):
        slots = rng.sample(range(4), rng.randint(1, 4))
        names = [f"r{slot}" for slot in slots]
        zeros = [0] * len(slots)
        rounds = [rng.random() < 0.8 for _ in slots]
        dropped = [i for i in range(len(slots)) if rng.random() < 0.2]
        for ledger, is_bare in zip(ledgers, (False, True), strict=True):
            one = step(slots, zeros, zeros, [1] * len(slots), rounds=rounds)
            if is_bare:
                one.drafts = None
            one.cut(names, {"r1": 0})
            ledger.book(one, names, dropped=dropped)
    first, second = ledgers
    assert first.total.totals().rounds > 0
    assert second.total == first.total
    assert second.requests() == first.requests()
    assert second.take_unsent() == first.take_unsent()


def test_what_is_sent_adds_up(rng: random.Random) -> None:
    ledger = Ledger(K, NUM_SLOTS)
    assert ledger.take_unsent() is None
    begin(ledger)
    sent = DraftCounts(K)
    for _ in range(20):
        ledger.book(step([0], [rng.randrange(5)], [rng.randrange(5)], [1]), ["a"])
        if rng.random() < 0.3 and (unsent := ledger.take_unsent()) is not None:
            sent += unsent
    rest = ledger.take_unsent()
    assert sent + (rest or DraftCounts(K)) == ledger.total
    assert ledger.take_unsent() is None


def test_random_steps(rng: random.Random) -> None:
    """Play requests at random, and count again with plain loops."""
    ledger = Ledger(K, NUM_SLOTS)
    names = iter(f"r{i}" for i in range(10_000))
    live: dict[str, int] = {}
    want = dict.fromkeys(Totals.__slots__, 0)
    preempted: list[str] = []
    for _ in range(60):
        ended, finished = [], set()
        # Its counts, and what was pending of those that end in it, are lost.
        counts_come = rng.random() < 0.9
        for name in list(live):
            if rng.random() < 0.15:
                ended.append(Ended(name, rng.randrange(K + 1), rng.randrange(2)))
                if counts_come:
                    want["proposed"] += ended[-1].num_drafts
                    want["never_issued"] += ended[-1].num_drafts
                del live[name]
                if rng.random() < 0.5:
                    finished.add(name)
                else:
                    preempted.append(name)
        new = set()
        while rng.random() < 0.5 and len(live) < 6:
            back = preempted and rng.random() < 0.5
            name = preempted.pop() if back else next(names)
            live[name] = rng.choice(sorted(set(range(6)) - set(live.values())))
            new.add(name)
        if not counts_come:
            gone = {name for name, _, _ in ended}
            ledger.skip(new, finished, gone - finished)
            continue
        req_ids = rng.sample(sorted(live), rng.randint(0, len(live)))
        req_ids = [*(r for r in req_ids if r not in new), *sorted(new)]
        rng.shuffle(req_ids)
        n = len(req_ids)
        proposed = [rng.randrange(K + 1) for _ in range(n)]
        widths = [rng.randrange(K + 1) for _ in range(n)]
        sampled = [rng.randint(1, w + 1) for w in widths]
        limits = rng.choice([None, [rng.choice([0, 2, NO_LIMIT]) for _ in range(n)]])
        rounds = [name not in new for name in req_ids]
        dropped = [i for i in range(n) if rng.random() < 0.1]
        ledger.book(
            step([live[r] for r in req_ids], proposed, widths, sampled,
                 sources=[rng.randrange(2) for _ in range(n)], limits=limits,
                 rounds=rounds, ended=ended),
            req_ids, new=new, finished=finished, dropped=dropped,
        )  # fmt: skip
        for i in range(n):
            if not rounds[i]:
                continue
            want["proposed"] += proposed[i]
            if i in dropped:
                want["never_issued"] += proposed[i]
                continue
            legal = min(proposed[i], limits[i]) if limits else proposed[i]
            verified = min(widths[i], legal)
            want["invalid"] += proposed[i] - legal
            want["never_issued"] += legal - verified
            want["verified"] += verified
            want["accepted"] += min(sampled[i] - 1, verified)
            want["fillers"] += max(0, widths[i] - proposed[i])
            want["rounds"] += 1
            want["rounds_with_draft"] += proposed[i] > 0
        assert ledger.total.totals() == Totals(**want)
        assert add_up((c for _, c in ledger.requests()), K) == ledger.total
