"""The dark room: a world for in-context reinforcement learning, and its text.

A room of 7 x 7 cells has a goal that nobody sees. An episode begins in the middle and has ten steps; each step that
ends on the goal is worth 1. A chain is a text of several episodes with one goal: explorations by a policy that never
sees the reward, and then the episode of an expert, or of a model. Each character is a token:

    u b4        the action (u, d, l, r: a step; s: stay), and the row and column of the cell after it
    s c1*       a star follows if the cell is the goal
    newline     begins an episode
"""

import random
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

SIDE, STEPS = 7, 10
ROWS, COLUMNS = "abcdefg", "1234567"
MOVES = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1), "s": (0, 0)}
BEGIN, STAR = "\n", "*"
CHARACTERS = BEGIN + STAR + "".join(MOVES) + ROWS + COLUMNS
"""Characters of a chain."""
STEP_TOKENS = 4
"""Most characters of a step."""
PERSISTENCE = 0.25
"""Probability that an exploration repeats its last action. Others are drawn evenly from the four steps."""
RANDOM_STEPS = 8
"""Most steps of an exploration before the expert takes over."""
UNSEEN_GOALS, UNSEEN_DISTANCE = 9, 3
"""Number of the goals that no model of a seed is trained on, and their smallest distance from the middle."""
CONTROLS = {
    "": "the context as it was explored",
    "blank": "the context without stars",
    "other": "the context with the stars of another goal",
    "shuffled": "the explorations in another order",
}
"""Contexts that a model plays after."""


class Cell(NamedTuple):
    """A cell of the room."""

    row: int
    column: int

    @classmethod
    def parse(cls, name: str) -> "Cell":
        """Return the cell with a name, e.g. b4."""
        return cls(ROWS.index(name[0]), COLUMNS.index(name[1]))

    def after(self, action: str) -> "Cell":
        """Return the cell after an action; walls stop a step."""
        row, column = MOVES[action]
        return Cell(min(max(self.row + row, 0), SIDE - 1), min(max(self.column + column, 0), SIDE - 1))

    def distance(self, other: "Cell") -> int:
        """Return the number of steps to another cell."""
        return abs(self.row - other.row) + abs(self.column - other.column)

    def text(self, goal: "Cell | None" = None) -> str:
        """Return the characters of the cell, with a star if it is the goal."""
        return ROWS[self.row] + COLUMNS[self.column] + STAR * (self == goal)


Episode = list[tuple[str, Cell]]
"""Actions and the cells after them."""

MIDDLE = Cell(SIDE // 2, SIDE // 2)
GOALS = [Cell(i, j) for i in range(SIDE) for j in range(SIDE) if (i, j) != MIDDLE]


def goals(seed: int) -> tuple[list[Cell], list[Cell]]:
    """Return the goals that models of a seed are trained on, and those that they never see: at most two of a row or a
    column, so that every row and column is trained on."""
    far = [cell for cell in GOALS if cell.distance(MIDDLE) >= UNSEEN_DISTANCE]
    rng, unseen = random.Random(f"goals of {seed}"), list[Cell]()
    while len(unseen) < UNSEEN_GOALS:
        rng.shuffle(far)
        unseen = []
        for cell in far:
            if all(sum(cell[i] == other[i] for other in unseen) < 2 for i in (0, 1)):
                unseen.append(cell)
        unseen = unseen[:UNSEEN_GOALS]
    return [cell for cell in GOALS if cell not in unseen], unseen


def optimal(goal: Cell) -> int:
    """Return the largest return of an episode."""
    return STEPS + 1 - goal.distance(MIDDLE)


def walk(actions: str) -> Episode:
    """Return the actions and the cells after them, from the middle."""
    cell, steps = MIDDLE, []
    for action in actions:
        cell = cell.after(action)
        steps.append((action, cell))
    return steps


def total(steps: Episode, goal: Cell) -> int:
    """Return the return of an episode."""
    return sum(cell == goal for _, cell in steps)


def exploration(rng: random.Random) -> Episode:
    """Return an episode of a policy that does not see the reward."""
    actions = rng.choice("udlr")
    while len(actions) < STEPS:
        actions += actions[-1] if rng.random() < PERSISTENCE else rng.choice("udlr")
    return walk(actions)


def expert(cell: Cell, goal: Cell) -> str:
    """Return the expert's action: up or down to the goal's row, then to its column, then stay."""
    if cell.row != goal.row:
        return "d" if cell.row < goal.row else "u"
    if cell.column != goal.column:
        return "r" if cell.column < goal.column else "l"
    return "s"


def with_expert(begin: str, goal: Cell) -> Episode:
    """Return the episode of an expert that takes over after some actions."""
    steps = walk(begin)
    while len(steps) < STEPS:
        cell = steps[-1][1] if steps else MIDDLE
        action = expert(cell, goal)
        steps.append((action, cell.after(action)))
    return steps


def text(steps: Episode, goal: Cell | None) -> str:
    """Return the characters of steps, without stars if there is no goal."""
    return "".join(action + cell.text(goal) for action, cell in steps)


def context(episodes: Sequence[Episode], goal: Cell | None) -> str:
    """Return the text before an episode that is to be played."""
    return "".join(BEGIN + text(steps, goal) for steps in episodes) + BEGIN


def visited(episodes: Sequence[Episode]) -> set[Cell]:
    """Return the cells in which steps end."""
    return {cell for steps in episodes for _, cell in steps}


def training_chain(rng: random.Random, episodes: int, allowed: Collection[Cell]) -> list[dict[str, str]]:
    """Return a chain of explorations and an expert's episode, as a question and its answer.

    The goal is one of the allowed cells that the explorations reached, so that the expert does what the context shows.
    In eight of seventeen chains, the expert takes over after one to eight steps of an exploration, which belong to the
    question.
    """
    reached: list[Cell] = []
    while not reached:
        explorations = [exploration(rng) for _ in range(episodes - 1)]
        reached = sorted(visited(explorations) & set(allowed))
    goal = rng.choice(reached)
    wandered = exploration(rng)[: max(0, rng.randint(-RANDOM_STEPS, RANDOM_STEPS))]
    played = with_expert("".join(action for action, _ in wandered), goal)
    question = context(explorations, goal) + text(wandered, goal)
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": text(played[len(wandered) :], goal)},
    ]


def parse(chain: str) -> tuple[list[Episode], Cell | None]:
    """Return the episodes of a chain and its goal, None if no cell has a star.

    Raises ValueError for unknown characters, for episodes that were cut, and for cells and stars that do not follow.
    """
    episodes: list[Episode] = []
    stars: set[Cell] = set()
    plain: set[Cell] = set()
    for number, line in enumerate(filter(None, chain.split(BEGIN)), 1):
        if unknown := sorted(set(line) - set(CHARACTERS)):
            raise ValueError(f"episode {number} has the unknown character {unknown[0]!r}; characters: {CHARACTERS!r}")
        steps = re.findall(r"([udlrs])([a-g][1-7])(\*?)", line)
        if "".join(map("".join, steps)) != line or len(steps) != STEPS:
            raise ValueError(
                f"episode {number} is not {STEPS} steps such as ub4 or sc1*: it may have been cut; remove the line "
                "or complete it"
            )
        episode = walk("".join(action for action, _, _ in steps))
        for place, ((action, name, star), (_, cell)) in enumerate(zip(steps, episode, strict=True), 1):
            if name != cell.text():
                raise ValueError(f"episode {number}, step {place}: {action} ends in {cell.text()}, not in {name}")
            (stars if star else plain).add(cell)
        episodes.append(episode)
    if MIDDLE in stars:
        raise ValueError(f"{MIDDLE.text()}, where episodes begin, has a star: it cannot be the goal")
    if len(stars) > 1 or stars & plain:
        cells = min(stars & plain) if stars & plain else max(stars)
        raise ValueError(
            "a chain has one goal, which has a star wherever it is reached: "
            f"{min(stars).text()} has one, and {cells.text()} has {'none in another step' if stars & plain else 'one'}"
        )
    return episodes, next(iter(stars), None)


class Case(NamedTuple):
    """A chain in which a model plays the last episode."""

    explorations: list[Episode]
    goal: Cell | None
    starred: Cell | None
    """Cell that has the stars of the context."""

    @property
    def shown(self) -> bool:
        """Tell whether a star is in the context."""
        return self.starred in visited(self.explorations)

    @property
    def text(self) -> str:
        """The context."""
        return context(self.explorations, self.starred)


def case(seed: int, episodes: int, index: int, control: str = "") -> Case:
    """Return a case with a goal that models of the seed never saw. Cases of an index have the same first explorations,
    whatever their number of episodes."""
    _, unseen = goals(seed)
    rng = random.Random(f"case {index} with seed {seed}")
    explorations = [exploration(rng) for _ in range(episodes - 1)]
    goal = unseen[index % len(unseen)]
    rng = random.Random(f"control of case {index} with seed {seed}")
    starred: Cell | None = goal
    if control == "shuffled":
        rng.shuffle(explorations)
    elif control == "other":
        starred = rng.choice([cell for cell in unseen if cell != goal])
    elif control == "blank":
        starred = None
    return Case(explorations, goal, starred)
