"""The mutants of the usual suite's cut: every one was tried, and what is lost is counted."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "results" / "mutants.json").read_text())


def test_every_mutant_was_tried():
    assert RESULTS["mutants"]["all"]["drawn"] == 300
    for counts in RESULTS["mutants"].values():
        assert counts["drawn"] == counts["tried"] == counts["caught"] + counts["lost"] + counts["survived"]


def test_the_shares_follow_from_the_counts():
    """At least 97% of what the suite caught before its cut is caught again, with the tests that were added since."""
    caught = RESULTS["mutants"]["all"]["caught"]
    lost = RESULTS["lost"]
    assert len(lost) == RESULTS["mutants"]["all"]["lost"]
    assert RESULTS["caught_over_before"] == round(caught / (caught + len(lost)), 4)
    since = [mutant for mutant in lost if "caught_since_by" in mutant]
    assert RESULTS["since"]["caught_over_before"] == round((caught + len(since)) / (caught + len(lost)), 4)
    assert RESULTS["since"]["caught_over_before"] >= 0.97


def test_the_tests_that_catch_lost_mutants_exist():
    for mutant in RESULTS["lost"]:
        for key in mutant.keys() & {"caught_by", "caught_since_by"}:
            path, name = mutant[key].split("[")[0].split("::")
            assert f"def {name}(" in (ROOT / path).read_text(), mutant[key]
