"""Helpers of experiments/retrieval.sh: make a tokenizer and training records, and write the file of results.

python experiments/retrieval.py make FOLDER [--largest=99] [--share=1.0] [--seed=0]
python experiments/retrieval.py report RESULTS_JSON FOLDER... --measured_on=... [--command=...] [--evaluation=lines]
    [--add]
"""

import argparse
import json
import math
import platform
import random
import sys
from collections.abc import Sequence
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.result_files import made, write_results
from ringformer.cli.parser import output_argument
from ringformer.evals.case_file import Row, read_cases
from ringformer.evals.cases import seeded
from ringformer.evals.intervals import wilson
from ringformer.evals.lines import FOOTER, HEADER, LARGEST, LINE, record_text, score
from ringformer.evals.model_folder import identity
from ringformer.evals.runner import row_checker
from ringformer.evals.tables import contexts, mean, mean_tokens
from ringformer.evals.texts.words import ADJECTIVES, NOUNS, distinct_pairs
from ringformer.runs.metrics import read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.byte_tokenizer import write_tokenizer


class Records(NamedTuple):
    """Records of one kind. The stages of configs/retrieval.py select records by length."""

    number: int
    lines: tuple[int, int]
    """Minimum and maximum number of lines in a record."""
    questions: int
    """Number of questions per record. Lines can repeat, so that no question can be answered by elimination."""
    context: int | None = None
    """Number of tokens that the longest record fills. Every third record has the most lines, one more than an
    evaluation's case of this many tokens, and room for twelve questions only."""
    lines_per_word: int | None = None
    """Number of lines that share a noun, and an adjective; None draws them independently. Without sharing, most nouns
    identify their line alone, and the model does not learn adjectives."""
    drills: float = 0.0
    """Share of the questions that are a `drill`. If all are drills, the record has no lines."""
    zipf: bool = False
    """Whether nouns are distinct and drawn by Zipf's law (the n-th with a frequency of 1/n). With few nouns, the model
    finds the match soon but memorises it. With many nouns, the match works for all of them, but some seeds never find
    it. Zipf's law combines both, as language does (Chan et al. 2022, arXiv:2205.05055)."""


KINDS = (
    Records(4_000, (7, 7), 7, drills=1.0, zipf=True),
    Records(4_000, (4, 4), 10, drills=0.5, zipf=True),
    Records(2_000, (4, 16), 16),
    Records(2_000, (27, 115), 16, 1024, lines_per_word=3),
    Records(270, (116, 499), 64, 4096),
    Records(100, (500, 1011), 64, 8192),
    Records(80, (1012, 2035), 64, 16_384),
    Records(60, (2036, 4083), 64, 32_768),
)
"""Kinds of records, by stage.

A line and a question have eight tokens each, the text before them has one, and a drill has up to ten. Records of these
kinds have at most 71, 133, 257, 1,017, 4,089, 8,185, 16,377 and 32,761 tokens. A five-digit number has two more tokens.
With such numbers, the longest records of a kind go to the next stage, and records of more than 32,768 tokens are not
used."""

TOKENS_OF_LINE = 8
"""Number of tokens of a line, and of a question with its answer."""

FEWEST = 60
"""Smallest number of records of a kind, whatever the share."""
MOST_RECORDS = 100
"""Largest share."""


def record(kind: int, number: int, largest: int, seed: int = 0) -> dict[str, Any]:
    """Return a conversation: the record with its first question, the answer, and more questions with their answers.

    Its random numbers differ from those of every evaluation, because evaluations have integer seeds.

    Args:
      kind: index in `KINDS`.
      number: number of the record among its kind.
      largest: largest number in a line.
      seed: seed of the run; another seed draws other records.
    """
    _, (fewest, most), questions, context, lines_per_word, drills, zipf = KINDS[kind]
    rng = seeded("records to train on", seed, kind, number)
    count = int(math.exp(rng.uniform(math.log(fewest), math.log(most + 1))))  # evenly over orders of magnitude
    if context and number % 3 == 0:
        count = most
    if context:
        questions = min(questions, (context - 1) // TOKENS_OF_LINE - count)
    words = [
        rng.sample(known, math.ceil(count / lines_per_word)) if lines_per_word else known
        for known in (ADJECTIVES, NOUNS)
    ]
    indices = zipf_indices(rng, count) if zipf else islice(distinct_pairs(rng, *words), count)
    lines = [(index, rng.randint(1, largest)) for index in indices]
    before = record_text(lines if drills < 1 else [])
    messages = []
    for index, number_of_line in rng.choices(lines, k=questions):
        question, answer = FOOTER.format(index=index), str(number_of_line)
        if rng.random() < drills:
            question, answer = drill(rng, index, number_of_line)
        messages += [{"role": "user", "content": before + question}, {"role": "assistant", "content": answer}]
        before = ""
    return {"messages": messages}


def zipf_indices(rng: random.Random, count: int) -> list[str]:
    """Return indices `adjective-noun` with distinct nouns, drawn by Zipf's law."""
    nouns: dict[str, None] = {}
    while len(nouns) < count:
        nouns.setdefault(NOUNS[int((len(NOUNS) + 1) ** rng.random()) - 1])
    return [f"{adjective}-{noun}" for adjective, noun in zip(rng.sample(ADJECTIVES, count), nouns, strict=True)]


def drill(rng: random.Random, index: str, number: int) -> tuple[str, str]:
    """Return a text, and its noun or number as the answer. It trains the model to copy a line's noun to its number.

    To match a question with a line, the model compares their nouns. The first layer must therefore copy a line's noun
    to the position where the second layer reads its number, and the question's noun to the start of the answer. If the
    model trains only on the task, the first layer collects the record's numbers instead and the model guesses one of
    them, so the second layer never has two nouns to compare. Both answers are equally likely; otherwise the model
    learns the noun and not the number.
    """
    noun = index.split("-")[1]
    if rng.random() < 0.5:
        return FOOTER.format(index=index), noun
    behind = rng.choice(("", ">", ">\n"))
    text = LINE.format(index=index, number=number).removesuffix(">\n") + behind
    # Directly after the number, its digits would merge with those of the answer into other tokens.
    return text, str(number) if behind and rng.random() < 0.5 else noun


def pieces() -> list[str]:
    """Return the tokens of the task: each fixed phrase, each word, and each number of one or two digits."""
    before, between, behind = LINE.replace("{number}", "{index}").split("{index}")
    question, rest = FOOTER.split("{index}")
    # The space at the end of a prompt is a separate token. The distance from a question's noun to the answer's number
    # then equals the distance from a line's noun to the line's number.
    phrases = [HEADER, before, "-", between, *behind, question, rest.rstrip(" "), " "]
    return [*phrases, *ADJECTIVES, *NOUNS, *map(str, range(100))]


def make(folder: Path, share: float, largest: int, seed: int = 0) -> None:
    """Write the tokenizer and the records (records.jsonl) if they do not exist.

    Raises ValueError if different ones exist, and if the share or the largest number is invalid.
    """
    if not 1 <= largest <= LARGEST:
        raise ValueError(f"--largest={largest} must lie between 1 and LongEval's {LARGEST:,}")
    if not 0 <= share <= MOST_RECORDS:  # nor NaN
        raise ValueError(f"--share={share} must lie between 0, for {FEWEST} records of a kind, and {MOST_RECORDS}")
    made, settings = folder / "made.json", {"largest": largest, "share": share, "seed": seed, "kinds": KINDS}
    settings = json.loads(json.dumps(settings))
    if made.is_file():
        try:
            same = json.loads(made.read_text()) == settings
        except ValueError:
            raise ValueError(f"{made} is damaged: remove {folder}, or name another folder") from None
        if not same:
            raise ValueError(f"{folder} holds other records: name another folder, or remove it")
        print(f"{folder} has them")
        return
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder / "tokenizer", pieces())
    with (folder / "records.jsonl").open("w") as file:
        for kind, records in enumerate(KINDS):
            count, (fewest, most) = max(FEWEST, round(records.number * share)), records.lines
            for number in range(count):
                file.write(json.dumps(record(kind, number, largest, seed)) + "\n")
            print(f"{file.name}: {count:,} records of {fewest} to {most} lines")
    made.write_text(json.dumps(settings))


def losses(run_dir: Path, every: int = 20) -> list[float]:
    """Return the loss of a run in nats per trained token, averaged over every `every` steps."""
    found = [row["loss"] for row in read_metrics(run_dir / "metrics.jsonl") if "loss" in row]
    return [round(sum(part) / len(part), 4) for i in range(0, len(found), every) if (part := found[i : i + every])]


def reached(folder: Path, evaluation: str) -> tuple[dict[str, Any], list[Row]]:
    """Return the results of a run of experiments/retrieval.sh, and the cases that measured them.

    The results are its seed, its stages with their losses, without those that were not begun, and its accuracy by
    context.

    Args:
      evaluation: folder of the cases: lines, or test (cases that were not used to choose the recipe).

    Raises:
      FileNotFoundError: `folder` contains no such run.
      ValueError: a stage is not finished, the evaluation belongs to another checkpoint or has different numbers of
        cases per context, or a file was changed after it was written.
    """
    stages = json.loads((folder / "run" / "stages.json").read_text())
    stages = [stage for stage in stages if stage["state"] != "not begun"]
    last = folder / "run" / stages[-1]["run_dir"]
    if unfinished := [stage["stage"] for stage in stages if stage["state"] != "finished"]:
        raise ValueError(f"{folder}: stage {unfinished[0]} is not finished: the command that trains it goes on")
    path = last / "evals" / evaluation / "cases.jsonl"
    settings, rows = read_cases(path, "lines", row_checker(score))
    if settings is None or not rows:
        raise ValueError(f"{path} holds no cases: the command of the evaluation makes them")
    if settings["checkpoint"] != identity(last)["checkpoint"]:
        raise ValueError(f"{path} has the cases of another checkpoint than {last} has")
    by_context = contexts(list(rows.values()))
    if len({len(found) for found in by_context.values()}) > 1:
        counts = ", ".join(f"{len(found)} of {context:,}" for context, found in by_context.items())
        raise ValueError(f"{path} has not as many cases of each context ({counts}): the evaluation was interrupted")
    accuracy = [
        {
            "context": context,
            "prompt_tokens": round(mean_tokens(found)),
            "cases": len(found),
            "accuracy": mean(found),
            "interval": [round(end, 4) for end in wilson(mean(found), len(found))],
        }
        for context, found in by_context.items()
    ]
    for stage in stages:
        stage["losses"] = losses(folder / "run" / stage["run_dir"])
        if not stage["losses"]:
            raise ValueError(f"{folder}/run/{stage['run_dir']}/metrics.jsonl has no losses")
    saved = json.loads((folder / "run" / stages[0]["run_dir"] / "config.json").read_text())
    run = {"seed": saved["seed"], "cases_seed": settings["seed"], "form": settings["form"]}
    return run | {"stages": stages, "accuracy": accuracy}, [run | row for row in rows.values()]


def report(
    path: Path, folders: Sequence[Path], measured_on: str, commands: Sequence[str], evaluation: str, add: bool
) -> None:
    """Write the results of runs (`folders` of experiments/retrieval.sh), and their cases beside them, to
    NAME_cases.jsonl.

    Args:
      evaluation: as for `reached`.
      add: add to the existing runs, commands and cases.

    Raises the errors of `reached`, and ValueError if a run is listed twice.
    """
    before = json.loads(path.read_text()) if add else {"runs": [], "commands": []}
    runs = {(run["form"], run["seed"], run["cases_seed"]): run for run in before["runs"]}
    cases: list[Row] = []
    for folder in folders:
        try:
            found, rows = reached(folder, evaluation)
        except (KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
            raise ValueError(f"{folder}: a file of the run is damaged: {error!r}") from None
        if (run := (found["form"], found["seed"], found["cases_seed"])) in runs:
            raise ValueError(f"{folder}: there is a run of {run[0]}, seed {run[1]}, before it")
        runs[run] = found
        cases += rows
    with path.with_name(f"{path.stem}_cases.jsonl").open("a" if add else "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in cases)
    content = {
        "measured_on": measured_on,
        **made(),
        "commands": [*before["commands"], *commands],
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("jax", "flax", "optax")}},
        "runs": list(runs.values()),
    }
    write_results(path, content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("make")
    verb.add_argument("folder", type=Path)
    verb.add_argument("--largest", type=int, default=99, help="largest number in a line")
    verb.add_argument("--share", type=float, default=1.0, help="share of the records to make")
    verb.add_argument("--seed", type=int, default=0, help="seed of the records")
    verb = verbs.add_parser("report")
    verb.add_argument("results", type=output_argument)
    verb.add_argument("folders", type=Path, nargs="+")
    verb.add_argument("--measured_on", required=True, help="description of the machine")
    verb.add_argument("--command", action="append", default=[], help="command that made the results; may be repeated")
    verb.add_argument("--evaluation", default="test", help="folder of the cases: test, or lines")
    verb.add_argument("--add", action="store_true", help="add to the results in the file")
    args = parser.parse_args()
    try:
        if args.verb == "make":
            make(args.folder, args.share, args.largest, args.seed)
        else:
            report(args.results, args.folders, args.measured_on, args.command, args.evaluation, args.add)
    except (ValueError, OSError) as error:
        print(f"experiments/retrieval.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
