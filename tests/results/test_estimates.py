"""What is committed of the machine code: parts against whole steps, cycles against XLA's own estimates."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.plans import PLANS as WANTED
from ringformer.estimate.seconds.program_seconds import efficiency
from ringformer.estimate.workloads.programs import PROGRAMS
from ringformer.hardware import CHIPS

ROOT = Path(__file__).parents[2]
CELLS = json.loads((ROOT / "results" / "part_cycles.json").read_text())["cells"]


@pytest.mark.parametrize("chip", CELLS)
def test_seconds_by_a_part_are_those_of_the_whole_step(chip):
    cell = CELLS[chip]
    assert cell["by_parts"]["seconds"] == pytest.approx(cell["by_whole"]["seconds"], rel=0.25)
    assert cell["by_parts"]["counted"] > 0.85 and cell["by_whole"]["counted"] > 0.95


@pytest.mark.parametrize("chip", CELLS)
def test_what_is_assumed_without_machine_code_is_what_it_says(chip):
    """Of the chips whose whole steps were read, to a tenth: so --quick, a search and the closed forms rank alike."""
    cell = CELLS[chip]
    assert cell["assumed"]["seconds"] == pytest.approx(cell["by_whole"]["seconds"], rel=0.1)


@pytest.mark.parametrize("chip", CELLS)
def test_no_product_is_faster_than_the_matrix_units(chip):
    """Cycles of all of a step's products: no fewer than their FLOPs need; outside of attention what is assumed of this
    chip where no machine code says it."""
    products, cores = CELLS[chip]["products"], CHIPS[chip].tensor_cores
    for product in products:
        ideal = product["flops"] / (cores.count * cores.matrix_flops_per_cycle)
        assert ideal < product["cycles"] and product["share_of_peak"] == pytest.approx(ideal / product["cycles"])
    rest = [p for p in products if not p["chunk_pair"]]
    busy = sum(p["executed"] * p["cycles"] * p["share_of_peak"] for p in rest)
    assert busy / sum(p["executed"] * p["cycles"] for p in rest) == pytest.approx(efficiency(chip).products, rel=0.03)


def test_products_that_xla_estimates_otherwise_are_listed():
    """Over 40% apart: each once in docs/estimating.md, by its chip and its name in the program."""
    apart = {
        (chip, p["instruction"])
        for chip, cell in CELLS.items()
        for p in cell["products"]
        if not 1 / 1.4 <= p["of_xla_estimate"] <= 1.4
    }
    page = (ROOT / "docs" / "estimating.md").read_text()
    table = page.partition("<!-- products: results/part_cycles.json -->")[2].partition("<!-- end of products -->")[0]
    rows = [line.split("|")[1:5] for line in table.splitlines() if line.startswith("| v")]
    listed = [(chip.strip(), name) for chip, names, *_ in rows for name in re.findall(r"[\w.\-]+", names)]
    assert sorted(listed) == sorted(apart)


PLANS = json.loads((ROOT / "results" / "plans.json").read_text())["plans"]


@pytest.mark.parametrize("name", [f"{model}/{target}" for model, target in WANTED])
def test_what_a_plan_recommends_compiles_and_no_neighbour_is_faster(name):
    """Every program of the run to machine code; half or double the head groups, remat groups and chunks at most 5%
    faster."""
    plan = PLANS[name]
    assert not plan["reasons_against"]
    assert len(plan["programs"]) == len(PROGRAMS)
    assert all(program["fits"] and program["generated_code"] for program in plan["programs"])
    nearby = [seconds for seconds in plan["seconds_nearby"].values() if isinstance(seconds, float)]
    assert nearby and plan["seconds"] < 1.05 * min(nearby)
