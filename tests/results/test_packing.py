"""The tables of docs/data.md on packed documents are those that their command writes."""

import pytest

from benchmarks.packing import ON_RINGS, PAGE, RINGS_BEGIN, SPEEDS_BEGIN, ring_row, speed_table


@pytest.mark.parametrize("name", [name for name in ON_RINGS if "log-normal" in name])
def test_the_balance_on_rings_is_todays(name):
    assert ring_row(name) in PAGE.read_text().partition(RINGS_BEGIN)[2]


def test_every_distribution_is_there():
    table = PAGE.read_text().partition(RINGS_BEGIN)[2].partition("<!-- end -->")[0]
    assert all(f"| {name} |" in table for name in ON_RINGS)


def test_the_speeds_are_todays():
    assert "\n".join(speed_table()) in PAGE.read_text().partition(SPEEDS_BEGIN)[2]
