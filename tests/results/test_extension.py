"""The extension of a released model: what the page says is what was measured."""

import json

import pytest

from experiments.extension.page import PAGE, RESULTS, written
from experiments.extension.plans import LONG, PLANS, RELEASED, SHIFTED, THETA
from experiments.extension.results import WHAT

FOUND = json.loads(RESULTS.read_text())
GPU, CORE = FOUND["gpu"], FOUND["core"]
TRAINED = [(GPU, LONG), (CORE, SHIFTED)]


def changes(found, of, base):
    return {row["from"]: row for row in found["differences"][f"{of} - {base}"]}


def test_the_page_has_these_tables():
    assert FOUND["what"] == WHAT
    page = PAGE.read_text()
    assert written(page, FOUND) == page


@pytest.mark.parametrize(("found", "model"), TRAINED, ids=["gpu", "core"])
def test_training_is_below_theta_at_every_position(found, model):
    """And its interval excludes 0; at short positions it is not above the released model."""
    assert len(changes(found, model, THETA)) >= 7
    for row in changes(found, model, THETA).values():
        assert row["interval"][1] < 0
    for first, row in changes(found, model, RELEASED).items():
        assert row["interval"][1] < 0.05, first


@pytest.mark.parametrize(("found", "model"), TRAINED, ids=["gpu", "core"])
def test_theta_costs_near_and_repairs_far(found, model):
    for first, row in changes(found, THETA, RELEASED).items():
        low, high = row["interval"]
        assert low > 0.02 if first < 8192 else high < -1.5, first


def test_what_the_page_says_of_the_numbers():
    losses = {model: {row["from"]: row["nats"] for row in rows} for model, rows in GPU["losses"].items()}
    far = [losses[RELEASED][first] for first in (16384, 32768, 65536)]
    assert min(far) > 8.5 and max(far) < 9.6
    assert 2.4 < losses[THETA][16384] < losses[THETA][65536] < 3.1 and round(losses[LONG][65536], 2) == 1.42
    for found, ends in ((GPU, (0.26, 0.60)), (CORE, (0.07, 0.10))):
        near = [row["nats"] for first, row in changes(found, THETA, RELEASED).items() if first < 8192]
        assert (round(min(near), 2), round(max(near), 2)) == ends
        assert {row["documents"] for rows in found["losses"].values() for row in rows} == {8}
    assert all(row["score"] == 0 and row["cases"] == 10 for row in GPU["tasks"])
    assert all(row["score"] == 0 and row["cases"] == 5 for row in CORE["tasks"])
    assert round(changes(CORE, THETA, RELEASED)[8192]["nats"], 1) == -2.8
    won = [row["nats"] for row in changes(CORE, SHIFTED, THETA).values()]
    assert (round(min(won), 2), round(max(won), 2)) == (-0.26, -0.16)
    assert [row["right"] for row in CORE["chats"]] == [15, 14, 14]
    assert round(sum(part["cpu_seconds"] for part in CORE["parts"].values()), -1) == 6410


def test_memory_is_as_estimated():
    """The seconds are not: the page says by how much."""
    assert [row["steps"] for row in GPU["training"]] == [16, 8, 10]
    assert round(GPU["parts"]["train-long"]["seconds"]) == 168
    for row in GPU["training"]:
        assert 0.99 < row["peak_memory_gib_estimate"] / row["peak_memory_gib"] < 1.01
        assert 1.25 < row["step_seconds"] / row["step_seconds_model"] < 1.45
    assert GPU["rope_theta"] == PLANS["gpu"].rope_theta and CORE["rope_theta"] == PLANS["core"].rope_theta


def test_the_page_says_how_long_a_decode_step_compiles():
    seconds = GPU["parts"]["chats-released"]["decode_compilation_seconds"]
    assert f"step of 20 rows takes {seconds:.0f} seconds there" in " ".join(PAGE.read_text().split())
