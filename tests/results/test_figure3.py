"""What our form of the paper's Figure 3 reached, as results/figure3.json has it, and as the page says it."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "results" / "figure3.json").read_text())
RUNS = {run["name"]: run for run in RESULTS["runs"]}
PAGE = (ROOT / "docs" / "evaluation.md").read_text()
K = 1024
NAMES = ("seed-0", "seed-1", "seed-2", "control")
CURVES = [(name, curve) for name, run in RUNS.items() for curve in run["curves"]]
IDS = [f"{name}-{curve['trained'] // K}K" for name, curve in CURVES]


def own(curve):
    """What a model reached at the context that it was trained at, if that was measured."""
    return next((row for row in curve["accuracy"] if row["context"] == curve["trained"]), None)


def cells(first):
    """The cells of the row of the page that begins with a cell."""
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def said(row):
    """How the page writes an accuracy."""
    if row is None:
        return "-"
    low, high = row["interval"]
    return f"{row['accuracy']:.1%} ({100 * low:.0f}-{100 * high:.0f})"


@pytest.mark.parametrize(("name", "curve"), CURVES, ids=IDS)
def test_every_model_finds_its_lines_at_its_own_context(name, curve):
    """At least 95%, with an interval from 90%."""
    row = own(curve)
    assert row is None or (row["accuracy"] >= 0.95 and row["interval"][0] >= 0.9)


@pytest.mark.parametrize(("name", "curve"), CURVES, ids=IDS)
def test_no_context_is_called_trained_that_no_record_reached(name, curve):
    (stage,) = [s for s in RUNS[name]["stages"] if s["seq_len"] == curve["trained"] and s["stage"] >= 4]
    row = own(curve)
    assert row is None or row["prompt_tokens"] < stage["longest_record"] <= curve["trained"]
    assert curve["cases_seed"] == (7927 if curve["trained"] <= 8 * K else 7933), "cases that no choice was made with"


@pytest.mark.parametrize(("name", "curve"), CURVES, ids=IDS)
def test_the_numbers_of_a_curve_agree(name, curve):
    """200 cases a context; fifths of the record add up; Wilson's interval has the shares from which the accuracy lies
    1.96 standard deviations."""
    for row in curve["accuracy"]:
        depths = row["depths"]
        assert (row["cases"], row["documents"]) == (200, 200 if row["context"] <= 8 * K else 10)
        assert sum(part["cases"] for part in depths) == 200
        right = sum(part["cases"] * part["accuracy"] for part in depths if part["cases"])
        assert right / 200 == pytest.approx(row["accuracy"], abs=1e-3)
        low, high = row["interval"]
        assert low <= row["accuracy"] <= high
        for p in (low, high):
            if row["documents"] == 200 and 0 < p < 1:
                assert abs(row["accuracy"] - p) == pytest.approx(1.96 * (p * (1 - p) / 200) ** 0.5, abs=2e-4)


def test_the_model_without_a_ring_finds_the_same_lines():
    """As the page says: by its accuracy in each fifth of the record."""
    of_ring = {curve["trained"]: own(curve) for curve in RUNS["seed-0"]["curves"]}
    alone = {curve["trained"]: own(curve) for curve in RUNS["control"]["curves"]}
    assert {4 * K, 8 * K} <= set(alone) and alone.items() <= of_ring.items()


def test_the_page_has_every_accuracy():
    family = {
        curve["trained"]: {row["context"]: row for row in curve["accuracy"]} for curve in RUNS["seed-0"]["curves"]
    }
    for trained, rows in family.items():
        assert cells(f"trained at {trained // K}K") == [said(rows.get(K << i)) for i in range(7)]
    for trained in family:
        by_run = {name: own(curve) for name, curve in CURVES if curve["trained"] == trained}
        assert cells(f"own context, {trained // K}K") == [said(by_run.get(name)) for name in NAMES]


def test_the_page_has_every_time():
    stages = {name: {stage["stage"]: stage for stage in run["stages"]} for name, run in RUNS.items()}
    for number, stage in stages["seed-0"].items():
        found = [stages.get(name, {}).get(number) for name in NAMES]
        seconds = [f"{stage['seconds']:,.0f} s" if stage else "-" for stage in found]
        assert cells(f"stage {number}") == [f"{stage['seq_len'] // K}K", f"{stage['steps']:,}", *seconds]


def test_what_is_missing_is_said():
    text = " ".join(PAGE.split())
    assert ("The figure is partial" in text) == bool(RESULTS["missing"])
    assert f"{len(RESULTS['missing'])} models or evaluations of it are missing" in text or not RESULTS["missing"]
    assert (ROOT / "docs" / "figures" / "figure3.png").is_file()
