"""Cycles of kernels that walk a list of pairs: a grid of known answer, and what is committed of ours."""

import json
from pathlib import Path

import pytest

from benchmarks.flash_cycles import write_table
from ringformer.estimate.machine_code import BOTH_CORES, Grid, grid_of, read_instruction, read_kernel
from tests.estimate.test_machine_code import BRANCH, END, PLAIN, bundles

ROWS = [row | {"chip": chip} for chip, said in
        json.loads((Path(__file__).parents[2] / "results" / "flash_cycles.json").read_text())["targets"].items()
        for row in said["rows"]]  # fmt: skip


def test_a_grid_is_counted_by_what_its_name_says():
    """Of each step 14 bundles; 300 without a mask, 400 with; 250 at a visit."""

    def part(predicate, length, at):
        return [[BRANCH, predicate, at + length + 1], *[[PLAIN]] * length]

    lines = [[PLAIN]] * 10
    for predicate, length in ((1, 250), (2, 300), (3, 400)):
        lines += part(predicate, length, len(lines))
    lines += [[BRANCH, 9, 0], [END]]
    text = bundles(*lines)
    for grid, cycles in (((1, 0, 0), 314), ((0, 1, 0), 414), ((5, 3, 2), 5 * 314 + 3 * 414 + 2 * 250)):
        assert read_kernel(text, Grid(*grid)).cycles == cycles
    assert read_kernel(text).cycles == len(lines)


def test_two_cores_walk_half_of_a_grid_each():
    """A step of 9 bundles and a body of 300; one core where the program does not wait for the other."""
    lines = [[PLAIN]] * 4 + [[BRANCH, 1, 305], *[[PLAIN]] * 300]
    lines += [[BRANCH, 2, 606], *[[PLAIN]] * 300, [BRANCH, 9, 0], [END]]
    text = bundles(*lines)
    name = "flash_forward_16_whole_4_masked_2_visits.1"
    alone = read_instruction(name, text).cycles
    assert alone == read_kernel(text, Grid(16, 4, 2)).cycles
    assert read_instruction(name, f"/* {BOTH_CORES} */\n{text}").cycles == alone / 2


def test_only_kernels_of_pairs_have_a_grid():
    assert grid_of("transpose_jvp_flash_backward_3968_whole_256_masked_16_visits__.2") == (3968, 256, 16)
    assert grid_of("fusion.12") is grid_of("flash_forward.1") is None


def test_the_committed_page_has_these_numbers(tmp_path):
    root = Path(__file__).parents[2]
    page = tmp_path / "page.md"
    page.write_text((root / "docs" / "performance.md").read_text())
    write_table(page, json.loads((root / "results" / "flash_cycles.json").read_text())["targets"])
    assert page.read_text() == (root / "docs" / "performance.md").read_text()


LEAST = {  # the share of the matrix products at the units' full rate that a step without a mask reaches
    ("forward", 1024, 1024): {"v5e": 0.88, "v5p": 0.87, "v4": 0.68, "v6e": 0.64},
    ("backward", 1024, 1024): {"v5e": 0.92, "v5p": 0.92, "v4": 0.88, "v6e": 0.83},
    ("backward", 2048, 1024): {"v5e": 0.95, "v5p": 0.95, "v4": 0.89, "v6e": 0.90},
}
BEST_FORWARD = {"v5e": 0.93, "v5p": 0.91, "v4": 0.69, "v6e": 0.87}


def shares(chip, **wanted):
    usual = {"packed": 0, "heads": 1, "d": 128}
    return {(row["kernel"], row["q_chunk"], row["k_chunk"]): row["share_of_ideal"] for row in ROWS
            if row["chip"] == chip and all(row[name] == x for name, x in (usual | wanted).items())}  # fmt: skip


@pytest.mark.parametrize("chip", sorted({row["chip"] for row in ROWS}))
def test_a_pair_keeps_the_matrix_units_busy(chip):
    found = shares(chip)
    for kernel, least in LEAST.items():
        if kernel in found:
            assert found[kernel] >= least[chip], kernel
    assert max(share for (kind, *_), share in found.items() if kind == "forward") >= BEST_FORWARD[chip]


@pytest.mark.parametrize("chip", sorted({row["chip"] for row in ROWS}))
def test_masks_segments_and_groups_of_heads_cost_little(chip):
    """On v5e and v5p; the others' vector units have more to do."""
    usual = shares(chip)["forward", 1024, 1024], shares(chip)["backward", 1024, 1024]
    packed, grouped = shares(chip, packed=1), shares(chip, heads=4)
    for kind, share in zip(("forward", "backward"), usual, strict=True):
        assert packed[kind, 1024, 1024] >= share / (1.08 if chip in ("v5e", "v5p") else 1.25)
        if (kind, 1024, 1024) in grouped:
            assert grouped[kind, 1024, 1024] >= 0.95 * share
    for row in ROWS:
        if row["chip"] == chip and row["d"] == 128:
            assert row["masked_step_cycles"] <= (1.08 if chip in ("v5e", "v5p") else 1.25) * row["step_cycles"]
