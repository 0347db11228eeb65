"""The counters in Prometheus, beside vLLM's own and with its labels."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mrv2_spec import counters
from mrv2_spec.counters import SOURCES, DraftCounts
from mrv2_spec.metrics import names
from mrv2_spec.metrics.names import Counter


class DraftCounters:
    """The Prometheus counters of all engines behind one front end.

    Args:
        counter_class: ``prometheus_client.Counter``, or what takes its place.
        label_names: vLLM's labels, the model and the engine.
        engine_labels: their values by engine.
        method: the speculative method.
        num_drafts: most drafts a round.
    """

    def __init__(
        self,
        counter_class: Any,
        label_names: Sequence[str],
        engine_labels: Mapping[int, Sequence[object]],
        method: str,
        num_drafts: int,
    ) -> None:
        forget_registered()
        values = {
            "source": SOURCES,
            "position": [str(i) for i in range(num_drafts)],
            "length": [str(i) for i in range(num_drafts + 1)],
        }
        # (counter, engine) -> its children in the order of the values above.
        self._children: dict[tuple[Counter, int], list[Any]] = {}
        for counter in names.COUNTERS:
            label = [] if counter.label is None else [counter.label]
            metric = counter_class(
                name=counter.full_name,
                documentation=counter.text,
                labelnames=[*label_names, "method", *label],
            )
            for engine, labels in engine_labels.items():
                common = (*labels, method)
                # Children exist from the start: a rate over them misses nothing.
                self._children[counter, engine] = (
                    [metric.labels(*common)]
                    if counter.label is None
                    else [metric.labels(*common, v) for v in values[counter.label]]
                )

    def observe(self, counts: DraftCounts, engine: int = 0) -> None:
        """Add what an engine booked since the last call."""
        totals = counts.totals()
        self._add(names.ROUNDS, engine, [totals.rounds])
        self._add(names.FILLERS, engine, [totals.fillers])
        by_source = [counts.totals(source) for source in range(len(SOURCES))]
        for counter, field in names.BY_SOURCE.items():
            self._add(counter, engine, [getattr(one, field) for one in by_source])
        for counter, kind in (
            (names.VERIFIED_AT, counters.VERIFIED),
            (names.ACCEPTED_AT, counters.ACCEPTED),
        ):
            self._add(counter, engine, counts.at(kind).sum(axis=0).tolist())
        self._add(names.LENGTHS, engine, counts.accepted_lengths())

    def _add(self, counter: Counter, engine: int, numbers: Iterable[int]) -> None:
        children = self._children[counter, engine]
        for child, number in zip(children, numbers, strict=True):
            if number:
                child.inc(number)


def forget_registered() -> None:
    """Unregister counters of an engine that this process had before, as vLLM does."""
    from prometheus_client import REGISTRY

    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith(names.PREFIX):
            REGISTRY.unregister(collector)
