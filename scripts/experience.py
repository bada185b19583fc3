"""Helpers of scripts/experience.sh: make chains of the dark room (scripts/dark_room.py), and let models play.

python scripts/experience.py make FOLDER --seed=N [--share=X]
python scripts/experience.py play RUN --seed=N --episodes=1,4,16 --count=N --out=FILE [--control=NAME]
python scripts/experience.py compare RUN RUN --seed=N --out=FILE
python scripts/experience.py chain RUN FILE
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

sys.path.insert(0, str(Path(__file__).parent))

from dark_room import (
    CONTROLS,
    LONGEST,
    MIDDLE,
    MOVES,
    ROWS,
    SIDE,
    STEPS,
    Case,
    Cell,
    case,
    goals,
    optimal,
    parse,
    text,
    total,
    training_chain,
    visited,
    walk,
)

END = "</s>"
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Chat template that concatenates messages, with the end token after the answer."""
CHAINS = {4: 50_000, 16: 8_000, 32: 8_000, 64: 1_500, 128: 900}
"""Chains to make, by their number of episodes. The stages of configs/in_context_rl.py select chains by length."""
BATCH = 45
"""Chains that are played at once."""


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer.json with a token for each character of a chain."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    write_whole(folder / "tokenizer_config.json", json.dumps(content, indent=1))


def make(folder: Path, seed: int, share: float) -> None:
    """Write the tokenizer and the chains (chains.jsonl) of a seed, unless the folder has them.

    Raises ValueError for a folder with other chains, and for a share that is no share.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"--share={share} must lie between 0 and 1")
    settings = {"seed": seed, "share": share, "chains": {str(n): count for n, count in CHAINS.items()}}
    made = folder / "made.json"
    if made.is_file():
        if json.loads(made.read_text()) != settings:
            raise ValueError(f"{folder} has chains of other settings ({made}): name another folder, or remove it")
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
    write_whole(made, json.dumps(settings, indent=1) + "\n")
    print(f"{folder}/chains.jsonl: {len(lines):,} chains")


def load(run: Path, episodes: int) -> Any:
    """Return the text generator of a run that was trained on as many episodes; raises ValueError for fewer."""
    from ringformer.inference.text.text_generator import TextGenerator

    trained = json.loads((run / "config.json").read_text())["seq_len"]
    needed = episodes * (3 * STEPS + 1)
    if needed > trained:
        raise ValueError(f"{episodes} episodes take {needed:,} tokens or more; {run} was trained on {trained:,}")
    return TextGenerator.load(run, max_length=episodes * LONGEST + 64)


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


def record(case_: Case, actions: str) -> dict[str, Any]:
    """Return what the results keep of an episode: the goal, the cell with the stars, and what the model did."""
    steps = walk(actions)
    kept = {"goal": case_.goal.text(), "shown": case_.shown, "actions": actions, "return": total(steps, case_.goal)}
    if case_.starred not in (None, case_.goal):
        kept |= {"starred": case_.starred.text(), "followed": total(steps, case_.starred)}
    return kept


def play_cases(run: Path, seed: int, lengths: Sequence[int], count: int, control: str, out: Path) -> None:
    """Let a run's model play `count` cases of each number of episodes; skips what `out` has of the same checkpoint."""
    made = {"seed": seed, "count": count, "control": control, **identity(run)}
    saved = json.loads(out.read_text()) if out.is_file() else {}
    played = saved.pop("episodes", {})
    if saved != made:
        played = {}
    missing = [n for n in lengths if str(n) not in played]
    model = load(run, max(missing)) if missing else None
    for n in lengths:
        if n in missing:
            cases = [case(seed, n, i, control) for i in range(count)]
            actions = [a for i in range(0, count, BATCH) for a in play(model, cases[i : i + BATCH])]
            played[str(n)] = [record(*pair) for pair in zip(cases, actions, strict=True)]
            write_whole(out, json.dumps(made | {"episodes": played}) + "\n")
        share = np.mean([row["return"] / optimal(Cell.parse(row["goal"])) for row in played[str(n)]])
        shown = np.mean([row["shown"] for row in played[str(n)]])
        name = f", {CONTROLS[control]}" if control else ""
        print(
            f"{run}, n = {n}: {share:.3f} of the optimal return, goal in {shown:.0%} of the contexts{name}", flush=True
        )


def compare(runs: Sequence[Path], seed: int, lengths: Sequence[int], out: Path) -> None:
    """Write how much the logits of actions of two runs differ, after contexts of unseen goals."""
    texts = [case(seed, n, i).text for n in lengths for i in range(9)]
    found = []
    for run in runs:
        model = load(run, max(lengths))
        session = model.generator.session(len(texts))
        session.append([model.encode(context_) for context_ in texts])
        found.append(np.asarray(session.logits, np.float64)[:, [model.encode(name)[0] for name in MOVES]])
    first, second = found
    difference = {
        "contexts": len(texts),
        "relative_norm": float(np.linalg.norm(first - second) / np.linalg.norm(second)),
        "largest_difference": float(np.abs(first - second).max()),
        "largest_logit": float(np.abs(second).max()),
        "same_actions": float((first.argmax(axis=1) == second.argmax(axis=1)).mean()),
        "checkpoints": [identity(run)["checkpoint"] for run in runs],
    }
    write_whole(out, json.dumps(difference, indent=1) + "\n")
    print(f"logits of actions after {len(texts)} contexts: relative difference {difference['relative_norm']:.1e}")


def play_chain(run: Path, file: Path) -> None:
    """Play an episode after the chain in a file, and print it with a map of the room."""
    explorations, goal = parse(file.read_text())
    model = load(run, len(explorations) + 1)
    (actions,) = play(model, [Case(explorations, goal, goal)])
    steps = walk(actions)
    print(text(steps, goal))
    names = {MIDDLE: "o"} | {cell: "." for cell in visited(explorations)}
    for number, (_, cell) in enumerate(steps, 1):
        if cell != MIDDLE and names.get(cell, ".") == ".":
            names[cell] = str(number % 10)
    for row, letter in enumerate(ROWS):
        cells = [Cell(row, column) for column in range(SIDE)]
        print(letter, *(names.get(cell, " ") + ("*" if cell == goal else " ") for cell in cells), sep="  ")
    print("o: begin; digits: the step that reaches a cell; dots: cells of the explorations; star: goal")
    if goal:
        print(f"return {total(steps, goal)} of {optimal(goal)}")


def numbers(text_: str) -> list[int]:
    """Parse numbers of episodes."""
    try:
        found = [int(part) for part in text_.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text_} is no list of numbers of episodes, e.g. 1,4,16")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("make", help="write chains and their tokenizer")
    verb.add_argument("folder", type=Path)
    verb.add_argument("--share", type=float, default=1.0, help="share of the chains to make (default: 1)")
    verb.add_argument("--seed", type=int, required=True)
    verb = verbs.add_parser("play", help="let a model play after explorations, and write its episodes")
    verb.add_argument("run", type=Path)
    verb.add_argument("--control", default="", choices=list(CONTROLS))
    verb.add_argument("--count", type=int, required=True, help="cases of each number of episodes")
    add_common(verb)
    verb = verbs.add_parser("compare", help="compare the logits of actions of two models")
    verb.add_argument("runs", type=Path, nargs=2)
    add_common(verb)
    verb = verbs.add_parser("chain", help="play an episode after a chain of one's own")
    verb.add_argument("run", type=Path)
    verb.add_argument("file", type=Path)
    args = parser.parse_args()
    try:
        if args.verb == "make":
            make(args.folder, args.seed, args.share)
        elif args.verb == "play":
            play_cases(args.run, args.seed, args.episodes, args.count, args.control, args.out)
        elif args.verb == "compare":
            compare(args.runs, args.seed, args.episodes, args.out)
        else:
            play_chain(args.run, args.file)
    except (ValueError, OSError) as error:
        print(f"scripts/experience.py: {error}", file=sys.stderr)
        sys.exit(2)


def add_common(verb: argparse.ArgumentParser) -> None:
    """Add the arguments that name cases and a file."""
    verb.add_argument("--seed", type=int, required=True)
    verb.add_argument("--episodes", type=numbers, required=True, help="numbers of episodes, e.g. 1,4,16")
    verb.add_argument("--out", type=output_argument, required=True)


if __name__ == "__main__":
    main()
