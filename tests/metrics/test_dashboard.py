"""The Grafana dashboard asks for counters and labels that there are."""

import json
import re
from pathlib import Path
from typing import Any

from mrv2_spec.metrics import names

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())
METRIC = re.compile(r"\b(?:mrv2_spec|vllm):\w+")
LABELS = {"model_name", "engine", "method"}


def expressions() -> list[str]:
    found = [t["expr"] for panel in DASHBOARD["panels"] for t in panel["targets"]]
    variables: list[dict[str, Any]] = DASHBOARD["templating"]["list"]
    return found + [v["definition"] for v in variables if "definition" in v]


def test_only_counters_that_are_published_and_all_of_them() -> None:
    asked = {name for text in expressions() for name in METRIC.findall(text)}
    ours = {counter.sample_name for counter in names.COUNTERS}
    assert {name for name in asked if name.startswith("mrv2_spec:")} == ours


def test_only_labels_that_the_counters_have() -> None:
    by_name = {counter.sample_name: counter for counter in names.COUNTERS}
    grouped = re.compile(r"sum by \((\w+)\) \(rate\((mrv2_spec:\w+)")
    found = [pair for text in expressions() for pair in grouped.findall(text)]
    assert found
    for label, name in found:
        assert label in LABELS | {by_name[name].label}, (label, name)


def test_brackets_and_places() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for text in expressions():
        assert text.count("(") == text.count(")")
        assert text.count("{") == text.count("}")
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        assert panel["title"]
        assert panel["description"]
