"""Facts of compiled steps: they compute and send what is due, and the page has the table."""

import json
from pathlib import Path

import pytest

from benchmarks.compiled_facts import BEGIN, LARGE, STAGES, table
from ringformer.estimate.workloads.targets import find_target

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "results" / "compiled_facts.json").read_text())["rows"]


def test_the_shipped_steps_are_there_and_the_page_has_them():
    assert set(STAGES) < set(ROWS)
    assert f"{BEGIN}\n\n{table(ROWS)}" in (ROOT / "docs" / "overlap.md").read_text()


@pytest.mark.parametrize("name", ROWS)
def test_a_step_computes_and_sends_what_is_due(name):
    """Products within 5% of the closed form. Weights are gathered at most twice, and gradients summed once. On chips
    without SparseCores, all-reduces sum them, which send twice the bytes."""
    row = ROWS[name]
    assert 0.95 <= row["flops_over_closed_form"] <= 1.05
    assert 0.9 <= row["gathered_over_weights"] <= 1.03
    cores = find_target(row["target"]).chip.tensor_cores
    times = 1 if cores is None or cores.sparse_cores else 2
    assert 0.97 * times <= row["reduced_over_weights"] <= 1.03 * times


@pytest.mark.parametrize("name", ROWS)
def test_no_large_gradient_is_summed_while_the_device_waits(name):
    """On chips that can send while they compute; the norms of the layers are 2.1 MB together."""
    row = ROWS[name]
    cores = find_target(row["target"]).chip.tensor_cores
    assert all(each["bytes"] > LARGE for each in row["synchronous"])
    if cores is None or cores.sparse_cores:
        sums = [each for each in row["synchronous"] if each["purpose"] == "gradients reduced"]
        assert all(each["bytes"] < 2.2e6 for each in sums)
