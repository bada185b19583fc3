"""Helpers of experiments/experience.sh: make chains of the dark room (experiments/dark_room.py), and let models play.

python experiments/experience.py make FOLDER --seed=N [--share=X]
python experiments/experience.py play RUN --episodes=1,4,16 --count=N --out=FILE [--control=NAME] [--beyond]
python experiments/experience.py compare RUN RUN --episodes=1,4,16 --out=FILE
python experiments/experience.py chain RUN FILE
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ringformer.cli.parser import output_argument
from ringformer.evals.model_folder import identity
from ringformer.files.atomic import write_whole
from ringformer.files.run_layout import CONFIG
from ringformer.files.untrusted import read_object

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import dark_room as room
from experiments.dark_room import (
    CHARACTERS,
    CONTROLS,
    MIDDLE,
    MOVES,
    ROWS,
    SIDE,
    STEP_TOKENS,
    STEPS,
    Case,
    Cell,
    goals,
    optimal,
    parse,
    text,
    total,
    training_chain,
    visited,
    walk,
)
from scripts.byte_tokenizer import write_tokenizer

CHAINS = {4: 50_000, 16: 8_000, 32: 8_000, 64: 1_500, 128: 900}
"""Chains to make, by their number of episodes. The stages of configs/in_context_rl.py select chains by length."""
MADE = "made.json"
"""File with the settings of a folder's chains."""
BATCH = 45
"""Chains that are played at once."""


def make(folder: Path, seed: int, share: float) -> None:
    """Write the tokenizer and the chains (chains.jsonl) of a seed, unless the folder has them.

    Raises ValueError for a folder with other chains, and for a share that is no share.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"--share={share} must lie between 0 and 1")
    settings = {"seed": seed, "share": share, "chains": {str(n): count for n, count in CHAINS.items()}}
    if (folder / MADE).is_file():
        if read_object(folder, MADE, "remove the folder") != settings:
            raise ValueError(f"{folder} has chains of other settings ({MADE}): name another folder, or remove it")
        print(f"{folder} has its chains")
        return
    write_tokenizer(folder / "tokenizer")
    allowed, _ = goals(seed)
    lines = []
    for episodes, count in CHAINS.items():
        rng = random.Random(f"chains of {episodes} with seed {seed}")
        for _ in range(max(20, round(count * share))):
            lines.append(json.dumps({"messages": training_chain(rng, episodes, allowed)}) + "\n")
    write_whole(folder / "chains.jsonl", "".join(lines))
    write_whole(folder / MADE, json.dumps(settings, indent=1) + "\n")
    print(f"{folder}/chains.jsonl: {len(lines):,} chains")


def settings_of(run: Path) -> tuple[int, Path]:
    """Return the context in tokens that a stage of a run was trained at, and the folder of its chains.

    Raises ValueError if the folder is no stage of such a run.
    """
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run} is no stage of a run: name one, e.g. runs/experience/seed-1/run/stage-3-4096")
    config = read_object(run, CONFIG)
    trained, data = config.get("seq_len"), config.get("data")
    source = data.get("source") if isinstance(data, dict) else None
    if not isinstance(trained, int) or not isinstance(source, str):
        raise ValueError(f"{run} is no stage of a run: its {CONFIG} has no seq_len or no data.source")
    return trained, Path(source.removeprefix("jsonl:")).parent


def seed_of(run: Path) -> int:
    """Return the seed of the chains that a run was trained on, which decides the goals that it never saw."""
    _, chains = settings_of(run)
    seed = read_object(chains, MADE).get("seed") if (chains / MADE).is_file() else None
    if not isinstance(seed, int):
        raise ValueError(f"{run} was trained on chains of {chains}, which has no {MADE} with their seed")
    return seed


def load(run: Path, tokens: int, beyond: bool = False) -> Any:
    """Return the text generator of a run.

    Raises ValueError if its tokens are not characters or, unless `beyond`, if it was trained on fewer tokens.
    """
    from ringformer.inference.text.text_generator import TextGenerator

    trained, _ = settings_of(run)
    if tokens > trained and not beyond:
        raise ValueError(f"the context takes {tokens:,} tokens; {run} was trained on {trained:,}")
    model = TextGenerator.load(run, max_length=tokens + STEP_TOKENS * STEPS)
    if any(len(model.encode(character)) != 1 for character in CHARACTERS):
        raise ValueError(f"{run} has another tokenizer: here a token is a character")
    return model


def longest(cases: Sequence[Case]) -> int:
    """Return the most tokens that a context and the episode after it take."""
    return max(len(case.text) for case in cases) + STEPS * STEP_TOKENS


def play(model: Any, cases: Sequence[Case]) -> list[str]:
    """Return the actions of a model in an episode after each context: at each step, its likeliest."""
    session, names = model.generator.session(len(cases)), list(MOVES)
    ids = [model.encode(name)[0] for name in names]
    session.append([model.encode(case.text) for case in cases])
    cells, actions = [MIDDLE] * len(cases), [""] * len(cases)
    for step in range(STEPS):
        chosen = [names[i] for i in np.asarray(session.logits)[:, ids].argmax(axis=1)]
        actions = [taken + action for taken, action in zip(actions, chosen, strict=True)]
        cells = [cell.after(action) for cell, action in zip(cells, chosen, strict=True)]
        if step < STEPS - 1:
            rows = zip(cases, cells, chosen, strict=True)
            session.append([model.encode(action + cell.text(case.goal)) for case, cell, action in rows])
    return actions


def record(case: Case, actions: str) -> dict[str, Any]:
    """Return what the results keep of an episode: the goal, the cell with the stars, and what the model did."""
    assert case.goal is not None, "an episode is played for a goal"
    steps = walk(actions)
    kept = {"goal": case.goal.text(), "shown": case.shown, "actions": actions, "return": total(steps, case.goal)}
    if case.starred is not None and case.starred != case.goal:
        kept |= {"starred": case.starred.text()}
    return kept


def play_cases(args: argparse.Namespace) -> None:
    """Let a run's model play cases of each number of episodes; skip what the file has of the same checkpoint."""
    out: Path = args.out
    seed = seed_of(args.run)
    made = {"seed": seed, "count": args.count, "control": args.control}
    made |= {"checkpoint": identity(args.run)["checkpoint"]}
    saved = read_object(out.parent, out.name, "remove it") if out.is_file() else {}
    played = saved.pop("episodes", {})
    if saved != made:
        played = {}
    cases = {n: [room.case(seed, n, i, args.control) for i in range(args.count)] for n in args.episodes}
    missing = [n for n in cases if str(n) not in played]
    tokens = max((longest(cases[n]) for n in missing), default=0)
    model = load(args.run, tokens, args.beyond) if missing else None
    for n, of_n in cases.items():
        if n in missing:
            actions = [a for i in range(0, len(of_n), BATCH) for a in play(model, of_n[i : i + BATCH])]
            played[str(n)] = [record(*pair) for pair in zip(of_n, actions, strict=True)]
            write_whole(out, json.dumps(made | {"episodes": played}) + "\n")
        share = np.mean([row["return"] / optimal(Cell.parse(row["goal"])) for row in played[str(n)]])
        shown = np.mean([row["shown"] for row in played[str(n)]])
        control = f", {CONTROLS[args.control]}" if args.control else ""
        counts = f"{share:.3f} of the optimal return, {shown:.0%} of the contexts show the goal"
        print(f"{args.run}, n = {n}: {counts}{control}", flush=True)


def compare(args: argparse.Namespace) -> None:
    """Write how much the logits of actions of two runs differ, after contexts of goals that both never saw."""
    seed, other = map(seed_of, args.runs)
    if seed != other:
        raise ValueError(
            f"{args.runs[0]} was trained on chains of seed {seed}, {args.runs[1]} on those of seed {other}"
        )
    checkpoints = [identity(run)["checkpoint"] for run in args.runs]
    if checkpoints[0] == checkpoints[1]:
        raise ValueError(f"{args.runs[0]} and {args.runs[1]} have the same checkpoint")
    cases = [room.case(seed, n, i) for n in args.episodes for i in range(9 if n > 1 else 1)]
    logits = []
    for run in args.runs:
        model = load(run, longest(cases))
        session = model.generator.session(len(cases))
        session.append([model.encode(case.text) for case in cases])
        logits.append(np.asarray(session.logits, np.float64)[:, [model.encode(name)[0] for name in MOVES]])
    first, second = logits
    difference = {
        "contexts": len(cases),
        "relative_norm": float(np.linalg.norm(first - second) / np.linalg.norm(second)),
        "largest_difference": float(np.abs(first - second).max()),
        "largest_logit": float(np.abs(second).max()),
        "same_actions": float((first.argmax(axis=1) == second.argmax(axis=1)).mean()),
        "checkpoints": checkpoints,
    }
    write_whole(args.out, json.dumps(difference, indent=1) + "\n")
    print(f"logits of actions after {len(cases)} contexts: relative difference {difference['relative_norm']:.1e}")


def play_chain(args: argparse.Namespace) -> None:
    """Play an episode after the chain in a file, and print it with a map of the room."""
    try:
        explorations, goal = parse(args.file.read_text(encoding="utf-8"))
        if not explorations:
            raise ValueError("it has no episode")
    except ValueError as error:
        raise ValueError(f"{args.file}: {error}") from None
    chain = Case(explorations, goal, goal)
    (actions,) = play(load(args.run, longest([chain])), [chain])
    steps = walk(actions)
    print(text(steps, goal))
    marks = {cell: "." for cell in visited(explorations)} | {MIDDLE: "o"}
    for number, (_, cell) in enumerate(steps, 1):
        if marks.get(cell, ".") == ".":
            marks[cell] = str(number % 10)
    for row, letter in enumerate(ROWS):
        cells = [Cell(row, column) for column in range(SIDE)]
        print(letter, *(marks.get(cell, " ") + ("*" if cell == goal else " ") for cell in cells), sep="  ")
    print("o: begin; digits: the step that reaches a cell first, 0 for the tenth; dots: explored; star: goal")
    if goal:
        print(f"return {total(steps, goal)} of {optimal(goal)}")


def numbers(text: str) -> list[int]:
    """Parse numbers of episodes."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no list of numbers of episodes, e.g. 1,4,16")
    return found


def count(text: str) -> int:
    """Parse a number of cases."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of cases")
    return int(text)


def add_common(verb: argparse.ArgumentParser) -> None:
    """Add the arguments that name cases and a file."""
    verb.add_argument("--episodes", type=numbers, required=True, help="numbers of episodes, e.g. 1,4,16")
    verb.add_argument("--out", type=output_argument, required=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("make", help="write chains and their tokenizer")
    verb.add_argument("folder", type=Path)
    verb.add_argument("--share", type=float, default=1.0, help="share of the chains to make (default: 1)")
    verb.add_argument("--seed", type=int, required=True)
    verb.set_defaults(run_verb=lambda args: make(args.folder, args.seed, args.share))
    verb = verbs.add_parser("play", help="let a model play after explorations, and write its episodes")
    verb.add_argument("run", type=Path)
    verb.add_argument("--control", default="", choices=list(CONTROLS))
    verb.add_argument("--count", type=count, required=True, help="cases of each number of episodes")
    verb.add_argument("--beyond", action="store_true", help="allow contexts longer than those trained on")
    add_common(verb)
    verb.set_defaults(run_verb=play_cases)
    verb = verbs.add_parser("compare", help="compare the logits of actions of two models")
    verb.add_argument("runs", type=Path, nargs=2)
    add_common(verb)
    verb.set_defaults(run_verb=compare)
    verb = verbs.add_parser("chain", help="play an episode after a chain of one's own")
    verb.add_argument("run", type=Path)
    verb.add_argument("file", type=Path)
    verb.set_defaults(run_verb=play_chain)
    args = parser.parse_args()
    try:
        args.run_verb(args)
    except (ValueError, OSError) as error:
        print(f"experiments/experience.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
