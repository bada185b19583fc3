"""The dark room: its episodes, its chains, and what an expert reaches."""

import random
from collections import Counter

import pytest

from experiments import dark_room as room
from experiments.dark_room import Cell

pytestmark = pytest.mark.slow


def test_a_room_has_forty_eight_goals_of_which_nine_are_never_trained_on():
    """The nine are at least three steps from the middle, at most two of a row or a column."""
    for seed in range(20):
        trained, unseen = room.goals(seed)
        assert len(trained) == 39 and len(unseen) == 9
        assert {*trained, *unseen} == {Cell(i, j) for i in range(7) for j in range(7)} - {Cell(3, 3)}
        assert all(abs(cell.row - 3) + abs(cell.column - 3) >= 3 for cell in unseen)
        for axis in (0, 1):
            assert max(Counter(cell[axis] for cell in unseen).values()) == 2
    assert len({frozenset(room.goals(seed)[1]) for seed in range(20)}) == 20


def test_an_episode_as_text():
    """By hand: up, up into row b, left to column 3, stay there, away and back."""
    goal = Cell(1, 2)
    steps = room.walk("uulsdsulus")
    written = "uc4ub4lb3*sb3*dc3sc3ub3*lb2ua2sa2"
    assert room.text(steps, goal) == written and room.total(steps, goal) == 3
    assert room.context([steps[:4], steps[:4]], None) == "\nuc4ub4lb3sb3\nuc4ub4lb3sb3\n"
    assert room.parse(f"\n{written}\n") == ([steps], goal)
    assert room.parse("") == ([], None)


@pytest.mark.parametrize("goal", room.GOALS, ids=lambda goal: goal.text())
def test_the_expert_reaches_the_optimal_return(goal):
    """The best that any actions can: to reach the goal by a shortest path, and to stay."""
    steps = room.with_expert("", goal)
    assert room.walk("".join(action for action, _ in steps)) == steps and len(steps) == 10
    assert room.total(steps, goal) == room.optimal(goal) == 11 - abs(goal.row - 3) - abs(goal.column - 3)


def test_walls_stop_a_step():
    assert Cell(0, 0).after("u") == Cell(0, 0).after("l") == Cell(0, 0) and Cell(6, 6).after("r") == Cell(6, 6)


def test_explorations_do_not_stay_and_find_one_goal_in_eleven():
    rng, found = random.Random(0), Counter()
    for _ in range(3000):
        steps = room.exploration(rng)
        assert len(steps) == 10 and {action for action, _ in steps} <= set("udlr")
        found.update({cell for _, cell in steps})
    far = [goal for goal in room.GOALS if abs(goal.row - 3) + abs(goal.column - 3) >= 3]
    assert len(far) == 36 and 0.085 < sum(found[goal] for goal in far) / 36 / 3000 < 0.1


@pytest.mark.parametrize("episodes", [4, 16])
def test_a_training_chain_shows_the_goal_that_its_expert_goes_to(episodes):
    """The goal is one of those to train on. Some steps of an exploration come first in eight of seventeen chains."""
    trained, unseen = room.goals(3)
    wandered = 0
    for i in range(200):
        question, answer = room.training_chain(random.Random(i), episodes, trained)
        assert (question["role"], answer["role"]) == ("user", "assistant")
        explored, goal = room.parse(question["content"].rpartition("\n")[0])
        assert len(explored) == episodes - 1 and goal in trained and goal not in unseen
        whole, again = room.parse(question["content"] + answer["content"])
        begin = question["content"].rpartition("\n")[2]
        wandered += begin != ""
        played, taken = whole[-1], len(begin.replace("*", "")) // 3
        assert again == goal and whole[:-1] == explored and taken <= 8
        assert played == room.with_expert("".join(action for action, _ in played[:taken]), goal)
    assert 70 < wandered < 115


def test_an_expert_does_not_go_to_a_goal_that_the_context_does_not_show():
    trained, _ = room.goals(0)
    for i in range(100):
        question, _ = room.training_chain(random.Random(i), 2, trained)
        assert "*" in question["content"].rpartition("\n")[0]


WHOLE = "uc4ub4lb3sb3dc3sc3ub3lb2ua2sa2"


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (WHOLE[:-1], "episode 1 is not 10 steps such as ub4 or sc1.: it may have been cut"),
        (f"{WHOLE}\n{WHOLE[:-3]}", "episode 2 is not 10 steps"),
        (f"{WHOLE}sa2", "episode 1 is not 10 steps"),
        (WHOLE.replace("l", "x", 1), "episode 1 has the unknown character 'x'; characters: "),
        (WHOLE.replace("lb3", "bl3"), "episode 1 is not 10 steps"),
        (WHOLE.replace("ub4", "ub5"), "episode 1, step 2: u ends in b4, not in b5"),
        (WHOLE.replace("ua2", "ua2*").replace("lb2", "lb2*").replace("sa2", "sa2*"), "a2 has one, and b2 has one"),
        ("uc4dd4*" * 5, "d4, where episodes begin, has a star"),
        (WHOLE.replace("lb3", "lb3*"), "b3 has one, and b3 has none in another step"),
        (f"{WHOLE.replace('sa2', 'sa2*').replace('ua2', 'ua2*')}\n{WHOLE}", "a2 has one, and a2 has none"),
    ],
)
def test_a_chain_that_cannot_be_is_refused(chain, message):
    with pytest.raises(ValueError, match=message):
        room.parse(chain)
