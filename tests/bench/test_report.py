"""The report compares what may be compared, and refuses what it must not show."""

import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "report.py"
NONE = {"v2-none": "none", "v1-none": "none"}


def part(name: str) -> ModuleType:
    """Return one of the report's modules."""
    return import_module(f"reporting.{name}")


def line(arm: str = "ngram", **changes: Any) -> dict[str, Any]:
    """Return a grid line as the grid writes it."""
    return {
        "run_id": "r1",
        "arm": arm,
        "k": 0 if arm in NONE else 16,
        "c": 64,
        "workload": "low",
        "runner": arm[:2] if arm.startswith("v1") else "v2",
        "method": NONE.get(arm, "ngram"),
        "trimmed": arm in ("ngram", "suffix"),
        "tpot_ms": 10.0,
        "tpot_spread": 0.01,
        "tok_s": 1000.0,
        "tokens_per_step": 1.0,
        "coverage": None if arm in NONE else 0.5,
        "drafted": None if arm in NONE else 100,
        "accepted": None if arm in NONE else 40,
        "model": "llama-8b",
        "time": "2026-11-30T01:00:00Z",
        "gpu": "NVIDIA H200",
        "driver": "580",
        "torch": "2.11.0",
        "vllm": "0.33.0",
        "commit": "abc1234",
        "command": "python bench/engine_grid.py run",
        **changes,
    }


def write(folder: Path, lines: list[dict[str, Any]]) -> Path:
    """Write a grid's record."""
    folder.mkdir(exist_ok=True)
    path = folder / "engine_grid.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def grid_of(tmp_path: Path, *lines: dict[str, Any]) -> Any:
    points = part("load").read_grid(write(tmp_path, list(lines)))
    return part("compare").Grid(points)


def arm(name: str, k: int = 16) -> Any:
    return part("compare").Arm(name, 0 if name in NONE else k)


# --- comparing -------------------------------------------------------------------


def test_a_ratio_is_taken_within_one_run(tmp_path: Path) -> None:
    grid = grid_of(
        tmp_path,
        line("v2-none", run_id="old", tpot_ms=10.0),
        line("ngram", run_id="old", tpot_ms=5.0),
        # The newest run lacks no speculation: nothing to compare with.
        line("ngram", run_id="new", tpot_ms=1.0, time="2026-11-30T02:00:00Z"),
        line("suffix", run_id="new", tpot_ms=1.0, time="2026-11-30T02:00:00Z"),
    )
    assert grid.ratio(arm("ngram"), 64, "low").value == 2.0
    assert grid.ratio(arm("suffix"), 64, "low") is None
    assert [p.arm for p in grid.without_base()] == ["suffix"]


def test_the_newest_run_counts_and_within_it_the_last_line(tmp_path: Path) -> None:
    later = {"run_id": "a", "time": "2026-11-30T03:00:00Z"}
    grid = grid_of(
        tmp_path,
        line("v2-none", **later, tpot_ms=12.0),
        line("ngram", **later, tpot_ms=2.0),
        line("ngram", **later, tpot_ms=3.0),
        line("v2-none", run_id="z"),
        line("ngram", run_id="z"),
    )
    assert grid.run_ids == ["a", "z"]
    assert grid.ratio(arm("ngram"), 64, "low").value == 4.0


def test_runs_say_how_fast_their_hosts_were(tmp_path: Path) -> None:
    grid = grid_of(
        tmp_path,
        line("v2-none", run_id="a", host_loop_ms=4.25),
        line("ngram", run_id="a", host_loop_ms=9.04),
        line("v2-none", run_id="b"),
    )
    text = part("grid_sections").runs(grid)
    rows = {row.split(" | ")[0].strip("| "): row for row in text.splitlines()}
    assert "| 4.2 to 9.0 |" in rows["a"]
    assert "| - |" in rows["b"]


def test_each_runner_has_its_own_base(tmp_path: Path) -> None:
    grid = grid_of(
        tmp_path,
        line("v2-none", tpot_ms=8.0),
        line("v1-none", tpot_ms=12.0),
        line("v1-suffix", tpot_ms=4.0, method="suffix"),
        line("suffix", tpot_ms=2.0, method="suffix"),
    )
    assert grid.ratio(arm("v1-suffix"), 64, "low").value == 3.0
    assert grid.ratio(arm("suffix"), 64, "low").value == 4.0
    v2 = arm("v2-none")
    assert grid.ratio(arm("v1-suffix"), 64, "low", base=v2).value == 2.0
    text = part("runners").v1_suffix_against_v2(grid)
    assert "| v1-suffix:16 | low | 2.00 |" in text


def test_a_share_of_the_oracle_gain(tmp_path: Path) -> None:
    grid = grid_of(
        tmp_path,
        line("v2-none", tpot_ms=9.0),
        line("v2-oracle", tpot_ms=3.0, method="oracle"),
        line("ngram", tpot_ms=6.0),
        line("suffix", tpot_ms=12.0, method="suffix"),
        # Where perfect drafts gain nothing, a share of it says nothing.
        line("v2-none", c=256),
        line("v2-oracle", c=256, tpot_ms=9.9, method="oracle"),
        line("ngram", c=256),
    )
    assert grid.share(arm("ngram"), 64, "low") == pytest.approx(0.25)
    assert grid.share(arm("suffix"), 64, "low") == pytest.approx(-0.125)
    assert grid.share(arm("ngram"), 256, "low") is None
    assert "| ngram:16 | 25% | - |" in part("grid_sections").shares(grid)


def test_a_wide_spread_is_stated(tmp_path: Path) -> None:
    grid = grid_of(
        tmp_path,
        line("v2-none", tpot_spread=0.04),
        line("ngram", tpot_ms=8.0),
        line("v2-none", c=1),
        line("ngram", c=1, tpot_ms=8.0),
    )
    assert "| ngram:16 | 1.25 | 1.25 (±4%) |" in part("grid_sections").ratios(grid)
    text = part("grid_sections").spreads(grid)
    assert "3 of 4 points repeat within 3%" in text
    assert "| v2-none | low | 64 | 4.0% |" in text


def test_of_arms_that_took_turns_the_ratios_spread_counts(tmp_path: Path) -> None:
    # A host that became half as fast, for both.
    slowed = {"turns": 3, "tpot_spread": 0.6}
    grid = grid_of(
        tmp_path,
        line("v2-none", tpot_ms=15.0, tpot_runs_ms=[10.0, 15.0, 20.0], **slowed),
        line("ngram", tpot_ms=12.0, tpot_runs_ms=[8.0, 12.0, 16.0], **slowed),
        line("suffix", tpot_ms=12.0, tpot_runs_ms=[10.0, 12.0, 14.0], **slowed),
    )
    assert str(grid.ratio(arm("ngram"), 64, "low")) == "1.25"
    # 10/10, 15/12 and 20/14, about 15/12.
    assert str(grid.ratio(arm("suffix"), 64, "low")) == "1.25 (±34%)"


def test_a_run_in_turns_comes_before_a_newer_one_without(tmp_path: Path) -> None:
    # Of the newer run the arms were up in two waves, the second on a slower host.
    old = {"run_id": "old", "turns": 2, "tpot_runs_ms": [10.0, 10.0]}
    own = {"tpot_ms": 8.0, "tpot_runs_ms": [8.0, 8.0]}
    slow = {"turns": 2, "tpot_ms": 16.0, "tpot_runs_ms": [16.0, 16.0]}
    newer = {"run_id": "new", "turns": 2, "tpot_runs_ms": [10.0, 10.0]}
    first, second = "2026-11-30T02:00:00Z", "2026-11-30T02:02:01Z"
    lines = [
        line("v2-none", **old),
        line("ngram", **{**old, **own}, time="2026-11-30T01:02:00Z"),
        line("v2-none", **newer, time=first),
        line("ngram", **{**newer, **slow}, time=second),
    ]
    ratio = grid_of(tmp_path, *lines).ratio(arm("ngram"), 64, "low")
    assert ratio is not None and (str(ratio), ratio.point.run_id) == ("1.25", "old")
    # Alone, an arm is what it was last.
    alone = grid_of(tmp_path, *lines).together([arm("ngram")], 64, "low")
    assert alone is not None and alone[0].run_id == "new"
    # In turns in the newer run too, or in neither: the newer one counts.
    lines[3]["time"] = first
    assert str(grid_of(tmp_path, *lines).ratio(arm("ngram"), 64, "low")) == "0.62"
    lines[3]["time"] = second
    lines[1]["turns"] = 1
    assert str(grid_of(tmp_path, *lines).ratio(arm("ngram"), 64, "low")) == "0.62"


def test_arms_that_took_turns_are_compared_by_these(tmp_path: Path) -> None:
    # In turns ours takes 8 for 10 ms. The newer run of ours was on a slower host.
    old = {"run_id": "old", "turns": 2}
    new = {"run_id": "new", "turns": 2, "time": "2026-11-30T05:00:00Z"}
    lines = [
        line("v2-none", **old, tpot_runs_ms=[10.0, 10.0]),
        line("v2-intree-ngram", k=5, **old, tpot_runs_ms=[10.0, 10.0]),
        line("ngram", tpot_ms=8.0, **old, tpot_runs_ms=[8.0, 8.0]),
        line("v2-none", **new, tpot_runs_ms=[10.0, 10.0]),
        line("ngram", tpot_ms=16.0, **new, tpot_runs_ms=[16.0, 16.0]),
    ]
    pair = (arm("ngram"), arm("v2-intree-ngram", 5), 64, "low")
    grid = grid_of(tmp_path, *lines)
    assert str(grid.ratio(arm("ngram"), 64, "low")) == "0.62"
    assert grid.against(*pair) == 1.25
    text = part("goals").promises(grid)
    assert "against the same: at least 1 | 1 | 0 | 1.250 (ngram:16, low" in text
    # Never in turns: each by its own base.
    del lines[2]
    assert grid_of(tmp_path, *lines).against(*pair) == 0.625
    assert grid_of(tmp_path, *lines[:2]).against(*pair) is None


def test_the_better_of_ours_is_held_against_the_in_tree_drafter(
    tmp_path: Path,
) -> None:
    grid = grid_of(
        tmp_path,
        line("v2-none"),
        line("v2-intree-ngram", k=5, tpot_ms=5.0),
        line("ngram", tpot_ms=6.0),
        line("suffix", tpot_ms=4.0, method="suffix"),
    )
    text = part("goals").promises(grid)
    assert "k=5 and k=16: at least 1 | 1 | 0 | 1.250 (suffix:16, low, c=64) |" in text
    assert "against the same: at least 1 | 2 | 1 | 0.833 (ngram:16, low" in text


def test_ngram_is_held_against_the_in_tree_drafter_with_as_many_drafts(
    tmp_path: Path,
) -> None:
    grid = grid_of(
        tmp_path,
        line("v2-none"),
        line("v2-intree-ngram", k=5, tpot_ms=5.0),
        line("v2-intree-ngram", tpot_ms=2.0),
        line("ngram", k=5, tpot_ms=4.0),
        line("suffix", k=5, tpot_ms=8.0, method="suffix"),
    )
    text = part("goals").promises(grid)
    assert "in-tree n-gram, k=5: at least 1 | 1 | 0 | 1.250 (ngram:5, low" in text


def test_losses_name_our_drafters_too(tmp_path: Path) -> None:
    grid = grid_of(
        tmp_path,
        line("v2-none", tpot_ms=9.0),
        line("ngram", tpot_ms=10.0),
        line("v2-intree-ngram", tpot_ms=20.0),
        line("suffix", tpot_ms=9.1, method="suffix"),
    )
    text = part("grid_sections").losses(grid)
    assert "| ngram:16 | 1 of 1 | low c=64 (lowest 0.90) |" in text
    assert "| v2-intree-ngram:16 | 1 of 1 | low c=64 (lowest 0.45) |" in text
    assert "Below 0.97 nowhere: suffix:16 (1 points)." in text


def test_goals_take_the_better_drafter_and_mark_what_is_missed(tmp_path: Path) -> None:
    grid = grid_of(
        tmp_path,
        line("v2-none", tpot_ms=10.0),
        line("ngram", tpot_ms=10.1),
        line("suffix", tpot_ms=8.0, method="suffix"),
        line("v2-none", c=256, tpot_ms=10.0),
        line("ngram", c=256, tpot_ms=12.5),
    )
    text = part("goals").goals(grid)
    row = (
        "| low | - / 1.20 | - / 1.10 | 1.25 / 1.03 (suffix) | **0.80 / 0.98 (ngram)** |"
    )
    assert row in text


def test_promises_are_kept_or_not(tmp_path: Path) -> None:
    grid = grid_of(
        tmp_path,
        line("v2-none", tpot_ms=10.0, prefill_tok_s=20000.0),
        line("ngram", tpot_ms=10.0, prefill_tok_s=19000.0),
        line("ngram", k=5, tpot_ms=8.0, prefill_tok_s=10000.0),
        line("v2-intree-ngram", tpot_ms=30.0),
        line("v2-intree-ngram", k=5, tpot_ms=9.0),
    )
    text = part("goals").promises(grid)
    assert "at least 0.97 | 2 | 0 | 1.000 (ngram:16, low, c=64) |" in text
    assert "k=16: at least 1 | 1 | 1 | 0.900 (ngram:16, low, c=64) |" in text
    assert "k=5: at least 1 | 1 | 0 | 1.125 (ngram:5, low, c=64) |" in text
    assert "at least 0.98 | 1 | 1 | 0.800 (ngram:16, low, c=64) |" in text
    assert "at least 0.97 | 1 | 1 | 0.950 (ngram:16, low, c=64) |" in text
    assert "without speculation | 0 | - | - |" in text
    assert "10.00, 1.00, 1000, 19000" in part("grid_sections").ratios(grid)


def test_short_prompts_say_little_of_throughput(tmp_path: Path) -> None:
    grid = grid_of(
        tmp_path,
        line("v2-none", prefill_tok_s=20000.0, prefill_s=0.2),
        line("ngram", prefill_tok_s=15000.0, prefill_s=0.3),
        line("v2-none", c=256, prefill_tok_s=20000.0, prefill_s=2.0),
        line("ngram", c=256, prefill_tok_s=19800.0, prefill_s=2.02),
    )
    text = part("goals").promises(grid)
    assert "at least 0.97 | 2 | 1 | 0.750 (ngram:16, low, c=64) |" in text
    assert "without speculation | 1 | 0 | 0.990 (ngram:16, low, c=256) |" in text


def test_slowest_requests_are_compared_within_one_run(tmp_path: Path) -> None:
    grid = grid_of(
        tmp_path,
        line("v2-none", tpot_p99_ms=10.0),
        line("ngram", tpot_p99_ms=12.5),
        line("ngram", k=5, tpot_p99_ms=8.0, run_id="r2"),
    )
    text = part("grid_sections").slowest(grid)
    assert "| low | ngram:16 | 0.80 |" in text
    assert "ngram:5" not in text


def test_each_third_of_a_shift_is_held_against_the_best_fixed_choice(
    tmp_path: Path,
) -> None:
    stages = {"workload": "shift", "method": "ngram"}
    grid = grid_of(
        tmp_path,
        line("v2-none", workload="shift", stage_tpot_ms=[6.0, 6.0, 6.0]),
        line("v2-intree-ngram", **stages, stage_tpot_ms=[9.0, 3.0, 9.0]),
        line("ngram", **stages, stage_tpot_ms=[6.0, 2.0, 8.0]),
    )
    assert "| ngram:16 | 64 | 1.00 | 1.50 | 0.75 | 2 |" in part("goals").shift(grid)


def test_v2_against_v1_gives_the_range_over_requests(tmp_path: Path) -> None:
    lines = []
    for c, v2 in ((1, 90.0), (4, 80.0), (16, 110.0), (64, 50.0)):
        lines.append(line("v2-none", c=c, tok_s=v2, tpot_ms=10.0 + c / 16))
        lines.append(line("v1-none", c=c, tok_s=100.0))
    runners = part("runners")
    note = runners.Notes({"v2_against_v1": {"no speculation": "They are alike."}})
    text = runners.v2_against_v1(grid_of(tmp_path, *lines), note)
    stated = "-1.6 % to +1.6 %"
    ranges = "-20.0 % to +10.0 % | 0.909 to 0.994 | 1, 4, 16 |"
    assert f"| c=1 to 16 | low | {stated} | {ranges}" in text
    assert f"| c=64 to 256 | low | {stated} | -50.0 % | 0.714 | 64 |" in text
    assert f"| c=64 to 256 | low-smollm2 | {stated} | - | - | - |" in text
    assert "No speculation: They are alike." in text
    assert len(note.unwritten) == 4
    assert "no sentence yet" not in text
    # Nothing here, and what is published still stands there.
    assert "| k=16, c=64 to 256 | - | - | -56 % to -53 % | - | - | - |" in text
    assert text.endswith("together in a run: of k=5 all pairs; of k=16 all pairs.")


def test_v2_against_v1_takes_a_row_from_one_run(tmp_path: Path) -> None:
    v2, v1 = "v2-intree-ngram", "v1-ngram-gpu"
    old = {"run_id": "old", "time": "2026-11-30T00:00:00Z"}
    grid = grid_of(
        tmp_path,
        *(line(v2, c=c, tok_s=80.0, tpot_ms=20.0, **old) for c in (1, 4, 64)),
        *(line(v1, c=c, tok_s=100.0, **old) for c in (1, 4, 64)),
        # A newer run that has fewer of the first row's points, as many of the second's.
        *(line(v2, c=c, tok_s=99.8, tpot_ms=9.6, tpot_spread=0.1) for c in (16, 64)),
        *(line(v1, c=c, tok_s=100.0) for c in (16, 64)),
        # Not of the same run.
        line("suffix-untrimmed", method="suffix"),
        line("v1-suffix", method="suffix", **old),
    )
    text = part("runners").v2_against_v1(grid, part("runners").Notes({}))
    pair = f"`{v2}` / `{v1}` | low"
    first = "-44 % to -28 % | -20 % | 0.50 | 1, 4 |"
    assert f"| k=16, c=1 to 16 | {pair} | {first}" in text
    second = "-56 % to -53 % | 0 % | 1.04 (±10%) | 64 |"
    assert f"| k=16, c=64 to 256 | {pair} | {second}" in text
    missing = text.splitlines()[-1]
    assert "`suffix-untrimmed` / `v1-suffix`" in missing
    assert "of k=5 all pairs; of k=16 `ngram-untrimmed` / " in missing
    assert v2 not in missing


def test_the_noise_of_tokens_a_second_is_stated(tmp_path: Path) -> None:
    runners = part("runners")
    lines = [line("v2-none", tok_s=100.0), line("v2-none", c=1, tok_s=100.0)]
    text = runners.v2_against_v1(grid_of(tmp_path, *lines), runners.Notes({}))
    assert "from run to run" not in text.replace("\n", " ")
    lines.append(line("v2-none", tok_s=113.0, run_id="r2"))
    text = runners.v2_against_v1(grid_of(tmp_path, *lines), runners.Notes({}))
    noise = "differ from run to run by up to 13% (low, c=64)."
    assert noise in text.replace("\n", " ")


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (-0.004, 0, "0 %"), (0.004, 0, "0 %"), (-0.0004, 1, "0.0 %"),
        (-0.006, 0, "-1 %"), (0.0126, 1, "+1.3 %"), (0.0, 0, "0 %"),
    ],
)  # fmt: skip
def test_a_change_has_a_sign_unless_it_is_none(
    value: float, digits: int, text: str
) -> None:
    assert part("runners").change(value, digits) == text


def test_the_published_ratios_are_those_of_the_published_figures(
    tmp_path: Path,
) -> None:
    runners = part("runners")
    grid = grid_of(
        tmp_path,
        line("v1-none", tok_s=1000.0),
        line("v1-suffix", k=5, tok_s=900.0, tpot_ms=8.0, method="suffix"),
    )
    text = runners.v1_arms(grid, runners.Notes({}))
    # 147.1 ms without speculation, 169.5 ms with it.
    ratios = "1.22 | 1.47 | 1.33 | 1.03 | 0.88 | 0.86 | 0.87"
    assert f"| v1-suffix:5 | published | {ratios} |" in text
    assert "|  | here, low | - | - | - | 1.25 | - | - | - |" in text
    # 1654 tokens a second without speculation, 1373 with it.
    changes = "+23 % | +42 % | +30 % | +1 % | -14 % | -17 % | -17 %"
    assert f"| v1-suffix:5 | published | {changes} |" in text
    assert "|  | here, low | - | - | - | -10 % | - | - | - |" in text


def test_every_sentence_has_a_place() -> None:
    runners = part("runners")
    note = runners.Notes({})
    runners.v2_against_v1(part("compare").Grid([]), note)
    runners.v1_arms(part("compare").Grid([]), note)
    written = {f"{t}: {row}" for t, rows in runners.notes().items() for row in rows}
    assert written == set(note.unwritten)


def test_missing_arms_and_points_are_named(tmp_path: Path) -> None:
    grid = grid_of(
        tmp_path, line("v2-none"), line("ngram"), line("v2-none", c=256),
        line("suffix", run_id="r2", method="suffix", c=256),
    )  # fmt: skip
    text = part("grid_sections").missing(grid)
    assert "v1-suffix:16" in text.splitlines()[0]
    assert "ngram:16," not in text.splitlines()[0].replace("-ngram:16,", "")
    assert "suffix:16 low c=64, ngram:16 low c=256" in text
    assert "without a ratio: suffix:16 low c=256." in text


# --- refusing --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tpot_ms": float("nan")}, "tpot_ms is nan"),
        ({"tpot_ms": 0}, "tpot_ms is 0"),
        ({"tpot_ms": "5"}, "tpot_ms is '5'"),
        ({"tpot_spread": -0.1}, "tpot_spread"),
        ({"turns": 2, "tpot_runs_ms": []}, "tpot_runs_ms is []"),
        ({"turns": 2, "tpot_runs_ms": [5.0, "5"]}, "tpot_runs_ms[1] is '5'"),
        ({"turns": "2", "tpot_runs_ms": [5.0, 5.0]}, "turns is '2'"),
        ({"tok_s": None}, "tok_s is None"),
        ({"tokens_per_step": 17.5}, "tokens_per_step is 17.5, not from 1 to 17"),
        ({"tokens_per_step": 0.9}, "tokens_per_step is 0.9"),
        ({"accepted": 101}, "accepted 101 of 100 drafted"),
        ({"coverage": 1.2}, "coverage"),
        ({"k": 0}, "method ngram with k=0"),
        ({"c": True}, "c is True"),
        ({"runner": "v3"}, "runner"),
        ({"run_id": ""}, "run_id"),
        ({"tpot_ms": 1e300}, "tpot_ms is 1e+300"),
        ({"stage_tpot_ms": 5}, "stage_tpot_ms is 5, not a list"),
        ({"stage_tpot_ms": [1.0, float("nan"), 1.0]}, "stage_tpot_ms[1] is nan"),
        ({"stage_tpot_ms": [1.0, 2.0]}, "stage_tpot_ms has 2 stages, not 3"),
        ({"commit": None}, "commit is None, not a text"),
        ({"commit": 7}, "commit is 7, not a text"),
        ({"driver": 580}, "driver is 580, not a text"),
        ({"vllm": None}, "vllm is None, not a text"),
        ({"trimmed": "yes"}, "trimmed is 'yes', not true or false"),
        ({"time": 5}, "time is 5, not a text"),
        ({"time": "yesterday"}, "time is 'yesterday', not as 2026-01-31T23:59:59Z"),
    ],
)
def test_what_cannot_be_is_refused(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = write(tmp_path, [line("v2-none"), line("ngram", **changes)])
    load = part("load")
    with pytest.raises(load.ResultError, match=r"engine_grid\.jsonl:2") as raised:
        load.read_grid(path)
    assert why in str(raised.value)


def test_a_line_that_lacks_where_it_comes_from_is_refused(tmp_path: Path) -> None:
    one = line()
    del one["driver"]
    load = part("load")
    with pytest.raises(load.ResultError, match="no driver"):
        load.read_grid(write(tmp_path, [one]))


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_truncated_record_is_refused_whole(cut: int, tmp_path: Path) -> None:
    path = write(tmp_path, [line("v2-none"), line("ngram")])
    path.write_text(path.read_text()[:-cut])
    load = part("load")
    with pytest.raises(load.ResultError, match=r"jsonl:2 .*truncated"):
        load.read_grid(path)


def test_a_line_cut_in_the_middle_of_the_record_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, [line("v2-none"), line("ngram")])
    first, second = path.read_text().splitlines()
    path.write_text(f"{first[:50]}\n{second}\n")
    load = part("load")
    with pytest.raises(load.ResultError, match=r"jsonl:1 .*truncated"):
        load.read_grid(path)


def test_a_record_that_is_no_text_is_refused(tmp_path: Path) -> None:
    load = part("load")
    path = write(tmp_path, [line()])
    path.write_bytes(path.read_bytes() + b"\xff\n")
    with pytest.raises(load.ResultError, match=r"engine_grid\.jsonl cannot be read"):
        load.read_grid(path)
    path = tmp_path / "trim.json"
    path.write_bytes(b'{"gpu": "\xff"}')
    with pytest.raises(load.ResultError, match=r"trim\.json cannot be read"):
        load.read_json(path)


BENCHMARKS = {
    "trim": ("cases", 1, "p50_us", "trim"),
    "propose_ngram": ("cases", 1, "ours_us", "p20"),
    "suffix": ("cases", 2, "propose_us", "p50"),
    "suffix_rivals": ("cases", 0, "num_reqs"),
    "profile_step": ("points", 1, "tpot_ms"),
    "step_cost": ("rows_ms", 2, 1),
    "simulate_policy": ("points", 3, "ratio"),
    "tp_ranks": ("arms", "suffix:8", "steps"),
    "replay": ("results", 4, "accepted"),
    "replay_suffix_learned_global_k16": ("results", 0, "drafted"),
}


def changed(name: str, value: Any, folder: Path) -> tuple[Path, str]:
    """Write a committed record with one number replaced; return where it was."""
    record = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())
    inside, place = record, BENCHMARKS[name]
    for step in place[:-1]:
        inside = inside[step]
    assert isinstance(inside[place[-1]], int | float)
    inside[place[-1]] = value
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record))
    at = "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in place)
    return path, at.removeprefix(".")


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize(
    ("value", "why"),
    [
        (float("nan"), "is nan, not from 0 to 1e+12"),
        (float("inf"), "is inf, not from 0 to 1e+12"),
        (-1, "is -1, not from 0 to 1e+12"),
        (1e300, "is 1e+300, not from 0 to 1e+12"),
        (None, "is null"),
        ("many", "is a text, not a number"),
        (True, "is true or false, not a number"),
        ([], "is a list, not a number"),
    ],
)
def test_a_number_that_cannot_be_is_refused_in_any_record(
    name: str, value: Any, why: str, tmp_path: Path
) -> None:
    load = part("load")
    path, at = changed(name, value, tmp_path)
    with pytest.raises(load.ResultError) as raised:
        load.read_json(path)
    assert str(raised.value) == f"{name}.json: {at} {why}"


def test_differences_may_be_negative_and_what_is_unknown_null(tmp_path: Path) -> None:
    machine = dict.fromkeys(("gpu", "driver", "vllm"))
    record = {
        **machine, "torch": "2", "commit": "abc", "command": "python x", "asleep": None,
        "errors": {"ngram:5": {"1": -0.5}},
    }  # fmt: skip
    path = tmp_path / "step_cost.json"
    path.write_text(json.dumps(record))
    load = part("load")
    assert load.read_json(path) == record
    undrafted = {**record, "points": [{"k": 0, "drafted": None}]}
    path.write_text(json.dumps(undrafted))
    assert load.read_json(path) == undrafted
    undrafted["points"][0]["k"] = 5
    path.write_text(json.dumps(undrafted))
    with pytest.raises(load.ResultError, match=r"points\[0\]\.drafted is null"):
        load.read_json(path)
    path.write_text(json.dumps({**record, "commit": None}))
    with pytest.raises(load.ResultError, match=r"step_cost\.json: commit is None"):
        load.read_json(path)


def test_two_machines_are_not_mixed(tmp_path: Path) -> None:
    load = part("load")
    with pytest.raises(load.ResultError, match="mixes llama-8b on NVIDIA H200 and"):
        load.read_grid(write(tmp_path, [line(), line("suffix", gpu="NVIDIA L20")]))


# --- the command -----------------------------------------------------------------


def report(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_one_command_makes_the_page_and_its_plots(tmp_path: Path) -> None:
    results, docs = tmp_path / "results", tmp_path / "docs"
    docs.mkdir()
    lines = [
        line(name, c=c, workload=workload, tpot_ms=10.0 + c, k=k)
        for c in (1, 64)
        for workload in ("low", "high")
        for name, k in (("v2-none", 0), ("ngram", 5), ("ngram", 16))
    ]
    write(results, lines)
    for name in ("propose_ngram", "suffix", "suffix_rivals"):
        shutil.copy(ROOT / "bench" / "results" / f"{name}.json", results)
    (docs / "img").mkdir()
    stale = docs / "img" / "replay.png"
    stale.write_bytes(b"of an earlier report")
    done = report("--results", results, "--docs", docs)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (docs / "benchmarks.md").read_text()
    assert "{{" not in text
    assert "![tpot ratio k16](img/tpot_ratio_k16.png)" in text
    assert "Arms without any point:" in text
    shown = {path.name for path in (docs / "img").iterdir()}
    assert shown == {
        "propose_time.png", "tokens_per_step_k16.png", "tokens_per_step_k5.png",
        "tpot_ratio_k16.png", "tpot_ratio_k5.png",
    }  # fmt: skip
    assert all(name in text for name in shown)
    for name in shown:
        assert (docs / "img" / name).read_bytes().startswith(b"\x89PNG")
    assert report("--results", results, "--docs", docs, "--check").returncode == 0
    write(results, [*lines, line("suffix", method="suffix")])
    done = report("--results", results, "--docs", docs, "--check")
    assert (done.returncode, done.stderr) == (
        1, "benchmarks.md is stale: run bench/report.py\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", ["engine_grid.jsonl", "engine_costs.jsonl", "propose_ngram.json"]
)
def test_nothing_is_written_from_a_truncated_file(name: str, tmp_path: Path) -> None:
    results = tmp_path / "results"
    write(results, [line("v2-none"), line("ngram")])
    write_costs(results, [costs_line()])
    shutil.copy(ROOT / "bench" / "results" / "propose_ngram.json", results)
    path = results / name
    path.chmod(0o644)
    path.write_text(path.read_text()[:-30])
    done = report("--results", results, "--docs", tmp_path / "docs")
    assert done.returncode == 1
    assert done.stderr.startswith(f"refused: {name}")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "docs").exists()


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("trim", ("cases", 1, "k")),
        ("propose_ngram", ("cases", 1, "ours_us", "p80")),
        ("step_cost", ("wide_ms",)),
        ("tp_ranks", ("arms", "suffix:8", "steps")),
        ("replay", ("in_flight",)),
        ("profile_step", ("points", 0, "host")),
        ("simulate_policy", ("points", 0, "policy")),
    ],
)
def test_a_record_without_what_is_shown_of_it_is_refused_by_name(
    name: str, lost: tuple[str | int, ...], tmp_path: Path
) -> None:
    results = tmp_path / "results"
    write(results, [line("v2-none"), line("ngram")])
    for other in ("suffix", name):
        record = json.loads((ROOT / "bench" / "results" / f"{other}.json").read_text())
        inside = record
        for step in lost[:-1] if other == name else ():
            inside = inside[step]
        if other == name:
            del inside[lost[-1]]
        (results / f"{other}.json").write_text(json.dumps(record))
    done = report("--results", results, "--docs", tmp_path / "docs")
    assert done.returncode == 1
    assert done.stderr.startswith(f"refused: {name}.json: no ")
    assert f"KeyError('{lost[-1]}')" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "docs").exists()


def test_the_committed_page_is_made_from_the_committed_results() -> None:
    done = report("--check")
    assert done.returncode == 0, done.stderr


def test_paper_stands_beside_the_engine(tmp_path: Path) -> None:
    grid = grid_of(
        tmp_path,
        line("v2-none", tpot_ms=10.0), line("ngram", tpot_ms=8.0),
        line("v2-none", tpot_ms=10.0, c=16), line("ngram", tpot_ms=4.0, c=16),
    )  # fmt: skip
    point = {"policy": "curve", "k": 16, "workload": "low"}
    points = [
        {**point, "drafter": "ngram-latest", "requests": 16, "ratio": 2.0},
        {**point, "drafter": "ngram-latest", "requests": 64, "ratio": 1.5},
        {**point, "drafter": "ngram-latest", "requests": 256, "ratio": 1.1},
        {**point, "drafter": "ngram-latest", "policy": "fixed", "requests": 64},
    ]
    points.append({**points[1], "policy": "engine", "ratio": 1.0})
    points.append({**points[2], "policy": "engine", "ratio": 1.05})
    record = {"points": points, "commit": "abc", "command": "python x"}
    text = part("paper").paper(grid, record)
    cells = "2.00 / - / 2.50 (+25%) | 1.50 / 1.00 / 1.25 (+25%) | 1.10 / 1.05 / -"
    assert f"| ngram:16 | low | {cells} |" in text
    assert "not run yet" in part("paper").paper(grid, None)


def test_step_costs_are_told_a_row() -> None:
    record = {
        "rows_ms": [[1, 0.0], [65, 0.32], [129, 1.6]],
        "wide_ms": 0.25,
        "points": 12,
        "runs": ["first", "second"],
        "command": "python bench/fit_step_cost.py",
        "commit": "abc",
        "errors": {"ngram:16": {"1": 0.01, "16": -0.04}, "suffix:16": {"1": 0.02}},
    }
    text = part("paper").step_cost(record)
    assert "| 1 to 65 | 5.0 |\n| 65 to 129 | 20.0 |" in text
    assert "0.25 ms for any draft" in text
    assert "12 points of first, second" in text
    assert "at most 4% (ngram:16, c=16)" in text
    assert "not run yet" in part("paper").step_cost(None)


def costs_line(**changes: Any) -> dict[str, Any]:
    """Return what an engine measured, as the grid writes it."""
    sizes = [1.0, 256.0, 448.0, 480.0, 1000.0]
    drafting = [[size, 4.0 + size / 64] for size in sizes]
    drafting[2][1] = 16.0
    return {
        "run_id": "r1",
        "arm": "ngram",
        "k": 16,
        "model": "llama-8b",
        "max_graph_tokens": 1000,
        "plain": [[1.0, 4.5], [256.0, 11.0]],
        "bare": [[1.0, 4.25], [256.0, 8.0]],
        "drafting": drafting,
        **{name: line()[name] for name in ("gpu", "driver", "torch", "vllm")},
        "commit": "abc1234",
        "command": "python bench/engine_grid.py run",
        **changes,
    }


def write_costs(folder: Path, lines: list[dict[str, Any]]) -> Path:
    path = folder / "engine_costs.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def test_measured_costs_name_the_sizes_that_are_slow(tmp_path: Path) -> None:
    dearer = [[size, 1.1 * ms] for size, ms in costs_line()["drafting"]]
    # A resumed run starts an engine again: the last measurement counts.
    again = costs_line(drafting=[[1.0, 99.0]])
    lines = [costs_line(arm="suffix"), costs_line(k=5, drafting=dearer)]
    lines = [again, *lines, costs_line()]
    costs = part("load").read_costs(write_costs(tmp_path, lines))
    text = part("costs").engine_costs(costs)
    assert "| 256 | 8.00 | 8.00 | 3.00 |\n| 448 | 16.00 | - | - |" in text
    # Of all sizes, though not all are shown.
    assert "| 1000 |" not in text
    assert "larger one: 448 (16.0 ms; 480: 11.5)." in text
    assert "median of 3 engines, which differ by up to 10% at a size" in text
    assert "ngram:16 of r1 (abc1234), suffix:16 of r1" in text
    assert "larger one: none." in part("costs").engine_costs(
        part("load").read_costs(
            write_costs(tmp_path, [costs_line(drafting=[[1, 4], [8, 5]])])
        )
    )
    assert part("load").read_costs(tmp_path / "none.jsonl") == []
    assert "recorded yet" in part("costs").engine_costs([])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"drafting": []}, "drafting is [], not a list of sizes and times"),
        ({"bare": [[1, 4.0], [1, 5.0]]}, "the sizes of bare do not rise"),
        (
            {"plain": [[1, 4.0, 5.0]]},
            "plain[0] is [1, 4.0, 5.0], not a size and a time",
        ),
        ({"plain": [[1, float("nan")]]}, "plain[0][1] is nan"),
        ({"k": 0}, "k is 0, not a whole number from 1"),
        ({"max_graph_tokens": None}, "max_graph_tokens is None, not a whole number"),
        ({"arm": ""}, "arm is '', not a text"),
        ({"gpu": "NVIDIA L20"}, "mixes llama-8b on NVIDIA H200 and llama-8b on"),
    ],
)
def test_costs_that_cannot_be_are_refused(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = write_costs(tmp_path, [costs_line(), costs_line(**changes)])
    load = part("load")
    with pytest.raises(load.ResultError, match=r"engine_costs\.jsonl") as raised:
        load.read_costs(path)
    assert why in str(raised.value)


def test_what_was_expected_of_drafts_stands_beside_what_came(tmp_path: Path) -> None:
    seen = {
        "mean_budget": 40.0, "expected_accepted": 20.0, "fillers": 600,
        "drafted": 1000, "accepted": 400, "reckoned_ms": 8.125, "took_ms": 9.0,
    }  # fmt: skip
    older = {
        **seen,
        "mean_budget": 50.0,
        "run_id": "r0",
        "time": "2026-11-29T01:00:00Z",
    }
    grid = grid_of(
        tmp_path,
        line(**seen),
        line(**older),
        line(c=256, **{**seen, "reckoned_ms": None}),
        line("suffix", method="suffix"),
        # Hardly any place.
        line(
            "suffix", method="suffix", c=256, **{**seen, "fillers": 0, "drafted": 450}
        ),
    )
    text = part("costs").reckoned(grid)
    # 400 of 1600 places came true.
    assert "| low | ngram:16 | 40: 50% / 25%, 8.1 / 9.0 ms | 40: 50% / 25% |" in text
    assert "| low | suffix:16 | - | - |" in text
    assert "yet" in part("costs").reckoned(grid_of(tmp_path, line()))


def test_what_was_measured_once_is_counted_once(tmp_path: Path) -> None:
    copied = {"workload": "agentic-cold", "measured_as": "agentic"}
    grid = grid_of(
        tmp_path,
        line("v2-none", workload="agentic"), line(workload="agentic"),
        line("v2-none", **copied), line(**copied),
    )  # fmt: skip
    assert grid.ratio(arm("ngram"), 64, "agentic-cold").value == 1.0
    found = part("arms").found_ratios(grid, [arm("ngram")])
    assert [workload for *_, workload in found] == ["agentic"]


MACHINE = {"gpu": "NVIDIA H200", "commit": "abc", "command": "python x"}


def test_a_real_model_is_reported_with_its_differences() -> None:
    point = {
        "label": "ngram:5", "c": 16, "tpot_ms": 2.0, "tok_s": 900.0,
        "tokens_per_step": 1.5, "different_tokens": 3, "tokens": 100,
    }  # fmt: skip
    first = {**point, "label": "v2-none"}
    del first["different_tokens"], first["tokens"]
    record = {
        **MACHINE, "points": [point, first], "model": "M", "batch_invariant": True,
        "compared_with": "v2-none",
    }  # fmt: skip
    text = part("engines").real_model({"smollm2_real": record})
    assert "| ngram:5 | 16 | 2.000 | 900 | 1.50 | 3 of 100 |" in text
    assert "| v2-none | 16 | 2.000 | 900 | 1.50 | - |" in text
    assert "M, greedy, with batch-invariant mode, compared with v2-none" in text


def test_the_profile_of_steps_is_shown_as_its_script_prints_it() -> None:
    host = {
        "wall_ms": 5.5, "ms": {}, "rest_ms": 0.5, "hooks_ms": {"a": 0.1},
        "ours_ms": 0.2, "asleep": 0.0, "awake_without": 0.1, "awake_with": 0.9,
        "mean_budget": 8.0, "steps": 30,
        "graphs": [{"mode": "FULL", "tokens": 64, "max_query_len": 2, "steps": 30}],
    }  # fmt: skip
    column = {
        "label": "ngram:16", "workload": "low", "c": 64, "point": "low c=64",
        "tpot_ms": 4.25, "tokens_per_step": 1.3, "wall": {"mean_ms": 5.4},
        "host": host, "kernels": {"busy_ms": 5.0, "groups_ms": {}},
    }  # fmt: skip
    text = part("engines").profile({"profile_step": {**MACHINE, "points": [column]}})
    assert "<summary>low c=64, ms a step</summary>" in text
    assert "4.250" in text
    assert "FULL 64 q<=2: 30" in text


def test_ranks_that_differ_are_shown() -> None:
    one = {
        "difference": None, "steps": 500, "plain_steps": 40, "budgets": 9,
        "draft_shapes": 8, "steps_with_budget": 300, "steps_asleep": 20, "naps": 2,
        "host_delay_ms": [3.0, 4.0], "device_delay_ms": [5.0, 6.0], "seconds": 60.0,
    }  # fmt: skip
    arms = {"ngram:5": one, "suffix:5": {**one, "difference": "step 7"}}
    text = part("engines").ranks(
        {"tp_ranks": {**MACHINE, "arms": arms, "failures": []}}
    )
    assert "- ngram:5: ranks AGREE in 500 steps" in text
    assert "- suffix:5: ranks DIFFER at step 7" in text


def test_sleep_is_a_share_of_the_steps(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, line("v2-none"), line("ngram", asleep=0.75))
    assert "| ngram:16 | low | 75% |" in part("grid_sections").asleep(grid)
    assert "v2-none" not in part("grid_sections").asleep(grid)


def test_memory_of_graphs_by_arm(tmp_path: Path) -> None:
    section = part("grid_sections").graph_memory
    assert "No point" in section(grid_of(tmp_path, line("v2-none")))
    lines = (
        line("v2-none", graph_mib=512.4),
        line("ngram", graph_mib=1400.0, c=1, time="2026-01-01T00:00:00Z"),
        line("ngram", graph_mib=1536.0, c=16, time="2026-01-02T00:00:00Z"),
    )
    found = section(grid_of(tmp_path, *lines))
    assert "| v2-none | 512 |" in found
    assert "| ngram:16 | 1536 |" in found and "1400" not in found
