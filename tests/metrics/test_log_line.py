"""The line in words."""

from mrv2_spec.counters import DraftCounts
from mrv2_spec.metrics.log_line import log_line


def test_nothing_and_rounds_without_drafts() -> None:
    assert log_line(DraftCounts(2)).startswith("0 decode rounds, 0.0% with a draft")
    counts = DraftCounts(2)
    counts.lengths[:, 0, 0] = 7
    line = log_line(counts)
    assert line == (
        "7 decode rounds, 0.0% with a draft, mean acceptance length 1.00, 0 fillers; "
        "no drafts"
    )


def test_all_parts() -> None:
    counts = DraftCounts(4)
    # Ten rounds: four drafts each, of which three legal, two verified, one accepted.
    for kind, length in enumerate((4, 3, 2, 1)):
        counts.lengths[kind, 0, length] = 6
        counts.lengths[kind, 1, length] = 4
    assert log_line(counts) == (
        "10 decode rounds, 100.0% with a draft, mean acceptance length 2.00, "
        "0 fillers; "
        "drafts: 40 proposed, 40.0% of them from the memory, 25.0% ruled out by a "
        "grammar, 25.0% not issued, 20 verified, 50.0% of these accepted, yield 25.0%"
    )


def test_no_division_by_nothing_verified() -> None:
    counts = DraftCounts(2)
    counts.lengths[0, 0, 2] = 1
    counts.lengths[1:, 0, 0] = 1
    assert "0 verified, yield 0.0%" in log_line(counts)
