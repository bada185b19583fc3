"""`ringformer eval lines | needle | ruler`."""

import argparse
import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ringformer.evals.options import add_case_options, add_lengths, add_model_options, opened, out_folder, say

if TYPE_CHECKING:
    from ringformer.evals.case_file import Row
    from ringformer.evals.cases import Case, CountTokens

Run = Callable[[argparse.Namespace], None]
CASES = 50
"""Cases of a length or a task; LongEval's number."""


def add_lines(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval lines`."""
    from ringformer.evals.lines import LARGEST, Numbers

    parser.description = (
        "LongEval's line retrieval: give the number in one line among many. An answer is correct if its last number "
        "is the line's. Reports accuracy by context, as in the paper's Figure 3."
    )
    add_model_options(parser)
    add_lengths(parser, required=False)
    parser.add_argument(
        "--num_lines",
        type=_numbers,
        metavar="LINES,...",
        help="instead of --lengths: this many lines, regardless of their tokens",
    )
    parser.add_argument(
        "--cases", metavar="FILE", help="instead of --lengths: the rows of one of LongEval's JSONL files, unchanged"
    )
    parser.add_argument("--min_value", type=int, default=Numbers().smallest, help="the smallest number in a line")
    parser.add_argument(
        "--max_value",
        type=int,
        default=LARGEST,
        help="the largest number in a line; outputs label any other range as not LongEval's",
    )
    add_case_options(parser, None, f"length; default: {CASES}, or all of a file")
    return _lines


def _lines(args: argparse.Namespace) -> None:
    from ringformer.evals import lines
    from ringformer.evals.figures import draw_accuracy
    from ringformer.evals.tables import lines_table

    numbers = lines.Numbers(args.min_value, args.max_value)
    ways = {"--num_lines": args.num_lines, "--cases": args.cases}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) == 2:
        raise ValueError("--num_lines and --cases: give one of them")
    if not given and args.lengths is None:
        raise ValueError("no contexts given: set --lengths, --num_lines or --cases")
    rows = lines.read_official(args.cases) if args.cases else []
    if args.cases and numbers != lines.Numbers():
        raise ValueError("--min_value and --max_value do not apply to --cases, whose rows have their own numbers")

    def groups(tokens: "CountTokens", lengths: Sequence[int]) -> Iterable[list["Case"]]:
        if args.cases:
            return [group[: args.num_cases] for group in _by_lines(rows)]
        count = args.num_cases or CASES
        if args.num_lines:
            return [list(lines.cases_of_lines(n, count, args.seed, numbers)) for n in args.num_lines]
        return (list(lines.cases_of_length(n, count, args.seed, numbers, tokens)) for n in lengths)

    source = f"rows of {Path(args.cases).name}" if args.cases else numbers.form
    settings = {"form": source, "contexts": given[0] if given else "--lengths"}
    if args.cases:
        settings["cases_hash"] = _hash(Path(args.cases).read_bytes())
    _evaluate(
        args,
        Evaluation(
            "lines",
            f"line retrieval ({source})",
            settings,
            groups,
            lines.score,
            lines_table,
            draw_accuracy,
            fixed=bool(given),
        ),
    )


def _by_lines(cases: "Sequence[Case]") -> list[list["Case"]]:
    ordered = sorted(cases, key=lambda case: case.labels["num_lines"])
    return [list(group) for _, group in groupby(ordered, key=lambda case: case.labels["num_lines"])]


def add_needle(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval needle`."""
    parser.description = (
        "Needle in a haystack: sentences with a magic number each, hidden in a long text. Reports the share of the "
        "requested numbers that the answer has, by context and depth, as a heat map."
    )
    add_model_options(parser)
    add_lengths(parser, required=True)
    parser.add_argument(
        "--depths",
        type=_depths,
        default=_depths("0,10,20,30,40,50,60,70,80,90,100"),
        metavar="PERCENT,...",
        help="depths of the first needle asked for; default: 0 to 100 in steps of 10",
    )
    parser.add_argument("--needles", type=int, default=1, help="number of needles hidden, including those asked for")
    parser.add_argument("--asked", type=int, default=1, help="number of needles asked for")
    parser.add_argument(
        "--haystack",
        metavar="FILE",
        help="a UTF-8 text, repeated if it is too short; default: a neutral built-in text, repeated",
    )
    add_case_options(parser, 3, "length and depth")
    return _needle


def _needle(args: argparse.Namespace) -> None:
    from ringformer.evals import needle
    from ringformer.evals.figures import draw_heat_map
    from ringformer.evals.tables import cross_table

    haystack, needles = needle.Haystack.load(args.haystack), needle.Needles(args.needles, args.asked)
    needle.check(needles, args.depths)

    def groups(tokens: "CountTokens", lengths: Sequence[int]) -> Iterable[list["Case"]]:
        return (
            list(needle.cases_of_length(n, args.depths, args.num_cases, args.seed, needles, haystack, tokens))
            for n in lengths
        )

    settings = {
        "haystack": haystack.name,
        "haystack_hash": _hash("".join(haystack.pieces).encode()),
        "needles": args.needles,
        "asked": args.asked,
    }
    what = "needle" if args.needles == 1 else f"{args.asked} of {args.needles} needles"
    _evaluate(
        args,
        Evaluation(
            "needle",
            f"{what} in a haystack ({haystack.name})",
            settings,
            groups,
            needle.score,
            lambda rows: cross_table(rows, "depth", "depth", "{:g}%"),
            draw_heat_map,
        ),
    )


def add_ruler(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval ruler`."""
    parser.description = (
        "The tasks of RULER with its prompts and its metric: the share of the references that occur in the answer, "
        "times 100. Six of the thirteen tasks need no other data; the rest need the files named below."
    )
    add_model_options(parser)
    add_lengths(parser, required=True)
    parser.add_argument("--tasks", metavar="NAME,...", help="tasks to run; default: all whose data are given")
    essays = "for niah_single_2 and _3, niah_multikey_1, niah_multivalue and niah_multiquery: the original's essays, "
    parser.add_argument("--essays", metavar="FILE", help=f"{essays}PaulGrahamEssays.json, or a text file")
    parser.add_argument("--squad", metavar="FILE", help="for qa_1: SQuAD's dev-v2.0.json")
    parser.add_argument("--hotpotqa", metavar="FILE", help="for qa_2: hotpot_dev_distractor_v1.json")
    parser.add_argument(
        "--words",
        metavar="DIR",
        help="the folder of adjectivelist.txt, nounlist.txt and verblist.txt from the package wonderwords, the "
        "original's words; default: ringformer's own words",
    )
    add_case_options(parser, CASES, "length and task; the original has 500")
    return _ruler


def _ruler(args: argparse.Namespace) -> None:
    from ringformer.evals import ruler
    from ringformer.evals.figures import draw_tasks
    from ringformer.evals.ruler_data import Data
    from ringformer.evals.tables import cross_table

    data = Data(args.words, args.essays, args.squad, args.hotpotqa)
    tasks = ruler.choose(args.tasks.split(",") if args.tasks else None, data)
    settings = data.settings()

    def groups(tokens: "CountTokens", lengths: Sequence[int]) -> Iterable[list["Case"]]:
        for length in lengths:  # fail first if a task does not fit; cwe's example is longer from 4,096 tokens on
            list(ruler.cases_of_length(length, tasks, 1, args.seed, tokens, data))
        return (
            list(ruler.cases_of_length(n, [task], args.num_cases, args.seed, tokens, data))
            for n in lengths
            for task in tasks
        )

    _evaluate(
        args,
        Evaluation(
            "ruler",
            "tasks of RULER",
            settings,
            groups,
            ruler.score,
            lambda rows: cross_table(rows, "task", "task"),
            draw_tasks,
        ),
    )


class Evaluation(NamedTuple):
    """Definition of an evaluation whose cases are prompts."""

    name: str
    title: str
    settings: dict[str, Any]
    """Settings that decide an outcome, besides the model and the seed."""
    groups: "Callable[[CountTokens, Sequence[int]], Iterable[list[Case]]]"
    """Function from a token counter and lengths to cases, grouped by length."""
    score: "Callable[[Case, str], float]"
    table: "Callable[[Sequence[Row]], str]"
    draw: Callable[..., None]
    """Function of (rows, title, path=...) that writes the figure."""
    fixed: bool = False
    """True if the cases do not depend on the lengths."""


def _evaluate(args: argparse.Namespace, evaluation: Evaluation) -> None:
    """Answer the cases, then write the table and the figure of all cases in the file."""
    from ringformer.evals.case_file import CaseFile
    from ringformer.evals.model_folder import check_lengths
    from ringformer.evals.runner import Answering, answer_cases, check_fit, row_checker

    with opened(args) as model:
        lengths = args.lengths or ([model.text.context] if model.text.context else [])
        if not lengths:
            raise ValueError(f"{args.run} does not name its context: set --lengths")
        check_lengths(lengths, model.text.context, allow_longer=args.allow_longer)
        settings = model.settings | model.text.settings(chat=args.chat) | {"seed": args.seed} | evaluation.settings
        with out_folder(args, evaluation.name) as folder:
            file = CaseFile(folder / "cases.jsonl", evaluation.name, settings, row_checker(evaluation.score))
            answering = Answering(model.load(max(lengths)), max(lengths), args.batch_size, args.chat)
            groups = evaluation.groups(answering.tokens, lengths)
            if evaluation.fixed:
                groups = list(groups)
                check_fit([case for group in groups for case in group], answering)
            answer_cases(groups, answering, evaluation.score, file, say)
            rows = list(file.rows.values())
            title = f"{evaluation.title}: {Path(args.run).resolve().name}, step {settings['step'] or 0}"
            title += ", chat" if args.chat else ""
            write_outputs(folder, evaluation.name, f"{title}\n{evaluation.table(rows)}")
            evaluation.draw(rows, title, path=folder / f"{evaluation.name}.png")


def write_outputs(folder: Path, name: str, table: str) -> None:
    """Write table.txt; print it and the folder of the outputs. The caller writes the figure NAME.png."""
    (folder / "table.txt").write_text(table + "\n", encoding="utf-8")
    print(table)
    say(f"{folder}: cases.jsonl, table.txt, {name}.png")


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _numbers(text: str) -> list[int]:
    return _parse(text, int, "whole number")


def _depths(text: str) -> list[float]:
    return _parse(text, float, "number")


def _parse(text: str, kind: Callable, name: str) -> list:
    """Parse a comma-separated list of numbers; return them sorted, without duplicates."""
    values = set()
    for part in text.split(","):
        try:
            values.add(kind(part))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is not a {name}") from None
    return sorted(values)
