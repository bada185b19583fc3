"""In-context reinforcement learning, as results/experience.json has it, and as the page says it.

Every return is counted again from the actions, and every context is drawn again from its seed.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import dark_room as room

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "results" / "experience.json").read_text())
SUMMARY = {(row["model"], row["n"]): row for row in RESULTS["summary"]}
PAGE = (ROOT / "docs" / "experience.md").read_text()
SEEDS = [int(name.removeprefix("seed ")) for name in RESULTS["episodes"]]


def played(seed, model, n):
    """The goals, actions and contexts of a seed's episodes."""
    kept = RESULTS["episodes"][f"seed {seed}"][f"{model}, n = {n}"]
    control = model.partition("-")[2]
    words = zip(kept["goal"].split(), kept["actions"].split(), kept["return"].split(), kept["shown"], strict=True)
    return [(room.case(seed, n, i, control), *word) for i, word in enumerate(words)]


def share_of_optimal(actions, goal):
    """Steps that end on a goal over the most that can, counted here."""
    cell, reached = room.MIDDLE, 0
    for action in actions:
        cell = cell.after(action)
        reached += cell == goal
    return reached / (11 - abs(goal.row - 3) - abs(goal.column - 3))


def near_normal(interval, values, groups):
    """An interval against the normal approximation, by the spread of the groups' sums around the mean."""
    sums = {}
    for value, group in zip(values, groups, strict=True):
        sums.setdefault(group, []).append(value - np.mean(values))
    spread = 1.96 * sum(sum(of_group) ** 2 for of_group in sums.values()) ** 0.5 / len(values)
    assert interval == pytest.approx([np.mean(values) - spread, np.mean(values) + spread], abs=0.01 + 0.2 * spread)


@pytest.mark.parametrize(("model", "n"), SUMMARY, ids=lambda value: str(value))
def test_every_return_is_that_of_the_actions(model, n):
    shares, reached, shown, goals = [], [], [], []
    for seed in SEEDS:
        _, unseen = room.goals(seed)
        for case, goal, actions, total, star in played(seed, model, n):
            assert goal == case.goal.text() and case.goal in unseen and len(actions) == room.STEPS
            assert star == "01"["*" in case.text]
            shares.append(share_of_optimal(actions, case.goal))
            assert int(total) == pytest.approx(shares[-1] * room.optimal(case.goal))
            reached.append(share_of_optimal(actions, case.starred or case.goal) > 0)
            shown.append(star == "1")
            goals.append((seed, goal))
    row = SUMMARY[model, n]
    assert row["episodes"] == len(shares) and row["return"] == pytest.approx(np.mean(shares), abs=1e-4)
    assert row["goal_in_context"] == pytest.approx(np.mean(shown), abs=1e-4)
    assert ("reached_starred" in row) == (model == "run-other")
    if model == "run-other":
        assert row["reached_starred"] == pytest.approx(np.mean(reached), abs=1e-4)
    if len(set(shares)) > 1 and np.mean(shares) > 0.05:
        near_normal(row["interval"], shares, range(len(shares)))
        near_normal(row["interval_over_goals"], shares, goals)


@pytest.mark.parametrize("row", RESULTS["comparisons"], ids=lambda row: f"{row['of']} over {row['over']}")
def test_every_comparison_is_over_the_same_cases(row):
    """With the explorations of the shorter context, or the same in another order."""
    (model, n), (base, base_n) = (
        (text.split(", n = ")[0], int(text.split(" = ")[1])) for text in (row["of"], row["over"])
    )
    differences, goals = [], []
    for seed in SEEDS:
        for one, other in zip(played(seed, model, n), played(seed, base, base_n), strict=False):
            assert one[0].goal == other[0].goal
            if model == base:
                assert one[0].explorations[: base_n - 1] == other[0].explorations
            else:
                assert sorted(one[0].explorations) == sorted(other[0].explorations)
            differences.append(share_of_optimal(one[2], one[0].goal) - share_of_optimal(other[2], other[0].goal))
            goals.append((seed, one[1]))
    assert len(differences) == row["pairs"] >= 400
    assert row["difference"] == pytest.approx(np.mean(differences), abs=1e-4)
    near_normal(row["interval"], differences, range(len(differences)))
    near_normal(row["interval_over_goals"], differences, goals)


def test_every_seed_played_everything():
    assert len(SEEDS) >= 3 and 0 not in SEEDS, "seed 0 chose the recipe"
    played_by_all = {f"{model}, n = {n}" for model, n in SUMMARY}
    assert all(set(of_seed) == played_by_all for of_seed in RESULTS["episodes"].values())
    numbers = {"run": [1, 4, 16, 32, 128], "short": [1, 4, 16, 32]}
    numbers |= {name: [16, 32] for name in ("run-blank", "run-other", "run-shuffled")}
    assert set(SUMMARY) == {(model, n) for model, of_model in numbers.items() for n in of_model}
    assert all(row["episodes"] >= 400 for row in SUMMARY.values())
    assert len({frozenset(room.goals(seed)[1]) for seed in SEEDS}) == len(SEEDS)
    for stages in RESULTS["stages"].values():
        assert [(stage["seq_len"], stage["state"]) for stage in stages] == [
            (512, "finished"),
            (1024, "finished"),
            (4096, "finished"),
        ]


def test_experience_helps():
    """The limits that were set beforehand: at n = 1, 16, 32; 32 above 16; 128 not below 32."""
    returns = {n: SUMMARY["run", n]["return"] for n in (1, 4, 16, 32, 128)}
    assert returns[1] <= 0.1 and returns[16] >= 0.55 and returns[32] >= 0.65 and returns[128] >= returns[32]
    paired = {(row["of"], row["over"]): row for row in RESULTS["comparisons"]}
    more = paired["run, n = 32", "run, n = 16"]
    assert more["interval"][0] > 0 and more["interval_over_goals"][0] > 0


def test_the_context_alone_makes_the_difference():
    """Without stars, the model finds little; with the stars of another goal, it goes there; the order of the
    explorations does not matter; and a model that was trained on four episodes alone fails in longer contexts."""
    one = SUMMARY["run", 1]
    for n in (16, 32):
        blank, other, plain = (SUMMARY[model, n] for model in ("run-blank", "run-other", "run"))
        assert blank["return"] <= one["return"] + 0.05
        assert other["return"] <= 0.1 and other["reached_starred"] > 0.85 * other["goal_in_context"]
        assert other["reached_goal"] <= 0.2
        (shuffled,) = [row for row in RESULTS["comparisons"] if row["of"] == f"run-shuffled, n = {n}"]
        assert abs(shuffled["difference"]) < 0.05
        assert SUMMARY["short", n]["return"] < 0.5 * plain["return"]
    short = SUMMARY["short", 4]
    assert short["return"] > 0.8 * short["goal_in_context"], "it learned what it was trained on"


def test_the_ring_trains_the_model_of_one_device():
    assert sorted(RESULTS["ring_over_one_device"]) == sorted(map(str, SEEDS))
    for ring in RESULTS["ring_over_one_device"].values():
        assert ring["same_actions"] == 1 and len(set(ring["checkpoints"])) == 2
        assert f"{ring['relative_norm']:.1e}" in PAGE


@pytest.mark.xfail(strict=True, reason="after 200 steps of AdamW, which amplifies the rounding of float32")
def test_the_logits_of_the_ring_are_within_the_limit_of_those_of_one_device():
    """The toy run of the script, two steps, is within it (`tests/experiments/test_experience.py`)."""
    assert all(ring["relative_norm"] <= 1e-5 for ring in RESULTS["ring_over_one_device"].values())


def test_the_page_has_these_numbers():
    number = r"(\d\.\d{3})"
    rows = re.findall(rf"^\| ([a-z0-9 ]+) \| (\d+) \| {number} \({number} to {number}\) \|", PAGE, re.MULTILINE)
    names = {
        "trained on up to 128 episodes": "run",
        "trained on 4 episodes alone": "short",
        "context without stars": "run-blank",
        "stars of another goal": "run-other",
        "explorations in another order": "run-shuffled",
    }
    assert {(names[name], int(n)) for name, n, *_ in rows} == set(SUMMARY)
    for name, n, mean, low, high in rows:
        row = SUMMARY[names[name], int(n)]
        assert [float(mean), float(low), float(high)] == pytest.approx([row["return"], *row["interval"]], abs=6e-4)
