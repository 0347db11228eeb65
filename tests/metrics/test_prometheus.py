"""What a scrape shows: names, labels, and engines that stay apart."""

from collections.abc import Iterator

import prometheus_client
import pytest

from mrv2_spec.counters import DraftCounts
from mrv2_spec.metrics import names
from mrv2_spec.metrics.prometheus import DraftCounters, forget_registered
from mrv2_spec.scorecard.scrape import Sample, parse

K = 3


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    forget_registered()
    yield
    forget_registered()


def make() -> DraftCounters:
    return DraftCounters(
        prometheus_client.Counter,
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
        "suffix",
        K,
    )


def counts_of(source: int, lengths: tuple[int, int, int, int]) -> DraftCounts:
    counts = DraftCounts(K)
    for kind, length in enumerate(lengths):
        counts.lengths[kind, source, length] += 1
    counts.values[-3] = 5
    return counts


def scrape() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = prometheus_client.generate_latest().decode()
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for s in parse(text)
        if s.name.startswith(names.PREFIX)
    }


def value(counter: names.Counter, engine: str, **label: str) -> float:
    labels = {"model_name": "m", "engine": engine, "method": "suffix", **label}
    return scrape()[counter.sample_name, tuple(sorted(labels.items()))]


def test_every_series_is_there_from_the_start() -> None:
    make()
    found = {name for name, _ in scrape() if not name.endswith("_created")}
    assert found == {counter.sample_name for counter in names.COUNTERS}
    assert value(names.VERIFIED, "1", source="memory") == 0
    assert value(names.LENGTHS, "0", length=str(K)) == 0


def test_engines_stay_apart() -> None:
    counters = make()
    counters.observe(counts_of(0, (3, 3, 2, 1)), 0)
    counters.observe(counts_of(1, (3, 2, 2, 2)), 1)
    counters.observe(counts_of(1, (1, 1, 0, 0)), 1)
    assert value(names.ROUNDS, "0") == 1
    assert value(names.ROUNDS, "1") == 2
    assert value(names.FILLERS, "1") == 10
    assert value(names.PROPOSED, "0", source="own") == 3
    assert value(names.PROPOSED, "1", source="own") == 0
    assert value(names.PROPOSED, "1", source="memory") == 4
    assert value(names.INVALID, "1", source="memory") == 1
    assert value(names.NEVER_ISSUED, "0", source="own") == 1
    assert value(names.NEVER_ISSUED, "1", source="memory") == 1
    assert value(names.ACCEPTED, "1", source="memory") == 2
    assert value(names.VERIFIED_AT, "0", position="1") == 1
    assert value(names.ACCEPTED_AT, "0", position="1") == 0
    assert value(names.LENGTHS, "1", length="0") == 1
    assert value(names.LENGTHS, "1", length="2") == 1


def test_an_engine_made_anew_takes_the_names_over() -> None:
    make().observe(counts_of(0, (3, 3, 3, 3)))
    make()
    assert value(names.ROUNDS, "0") == 0


def test_parse_takes_what_prometheus_writes() -> None:
    text = (
        "# HELP a b\n# TYPE a counter\n"
        'a_total{x="say \\"hi\\"",y="back\\\\slash\\nline"} 1.5e+03\n'
        "plain 2\nbad NaN\nbad +Inf\nnot a sample at all\n"
    )
    assert parse(text) == [
        Sample("a_total", {"x": 'say "hi"', "y": "back\\slash\nline"}, 1500.0),
        Sample("plain", {}, 2.0),
    ]
