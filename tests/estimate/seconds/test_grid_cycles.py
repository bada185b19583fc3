"""Cycles of kernels that walk a list of pairs: grids of known answer."""

import pytest

from ringformer.estimate.seconds.machine_code import Grid, grid_of, read_cycles
from tests.estimate.seconds.test_machine_code import BRANCH, END, PLAIN, PRODUCT, TEST, bundles


def test_a_grid_is_counted_by_what_its_name_says():
    """Of each step 14 bundles; 300 without a mask, 400 with; 250 at a visit."""

    def part(predicate, length, at):
        product = [[PRODUCT]] if predicate > 1 else [[PLAIN]]
        return [[BRANCH, predicate, at + length + 1], *product, *[[PLAIN]] * (length - 1)]

    lines = [[PLAIN]] * 10
    for predicate, length in ((1, 250), (2, 300), (3, 400)):
        lines += part(predicate, length, len(lines))
    lines += [[BRANCH, 9, 0], [END]]
    text = bundles(*lines)
    for grid, cycles in (((1, 0, 0), 314), ((0, 1, 0), 414), ((5, 3, 2), 5 * 314 + 3 * 414 + 2 * 250)):
        assert read_cycles(text, Grid(*grid)) == cycles
    assert read_cycles(text) == len(lines)


def test_one_body_runs_at_every_step_and_the_trips_of_the_steps_do_not_count():
    """Of each step 8 bundles and one body of 300; 250 at a visit."""
    lines = [[PLAIN]] * 4 + [[BRANCH, 1, 255], *[[PLAIN]] * 250, [BRANCH, 2, 556], [PRODUCT], *[[PLAIN]] * 299]
    text = bundles(*lines, [TEST, 9, 4096], [BRANCH, 9, 0], [END])
    for grid, cycles in (((1, 0, 0), 308), ((0, 1, 0), 308), ((2, 1, 1), 3 * 308 + 250)):
        assert read_cycles(text, Grid(*grid)) == cycles


def test_cycles_are_plain_numbers():
    """What is made of them goes into JSON: no bool of numpy's."""
    assert type(read_cycles(bundles([PLAIN], [END]))) is float


def test_only_kernels_of_pairs_have_a_grid():
    name = "transpose_jvp_flash_backward_3968_whole_256_masked_16_visits_8_heads__.2"
    assert grid_of(name) == (3968, 256, 16, 8)
    assert grid_of("fusion.12") is grid_of("flash_forward.1") is None


def test_the_cores_of_a_device_share_the_heads():
    """Of 3 heads one core takes 2; of one head the other core has nothing to do."""
    core = "{} : > {{ %s9 = sld [smem:[#allocation0]] /* megacore core id */ }}"
    lines = [[core], [PLAIN], [BRANCH, 1, 303], [PRODUCT], *[[PLAIN]] * 299, [BRANCH, 9, 1], [END]]
    step = 303
    for heads, share in ((1, 1), (2, 1 / 2), (3, 2 / 3), (8, 1 / 2)):
        assert read_cycles(bundles(*lines), Grid(24, 0, 0, heads)) == pytest.approx(24 * step * share)
