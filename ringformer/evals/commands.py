"""`ringformer eval lines | needle | ruler`."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringformer.evals.cases import content_hash
from ringformer.evals.options import (
    add_case_options,
    add_model_options,
    number_list,
    opened,
    say,
    write_outputs,
)

if TYPE_CHECKING:
    from ringformer.evals.case_file import Row
    from ringformer.evals.cases import Case
    from ringformer.evals.runner import Answering, Score

Run = Callable[[argparse.Namespace], None]
CASES = 50
"""Cases of a length or a task; LongEval's number."""


def add_lines(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval lines`."""
    from ringformer.evals.lines import Numbers

    parser.description = (
        "LongEval's line retrieval: give the number in one line among many. An answer is correct if its last number "
        "is the line's. Reports accuracy by context, as in the paper's Figure 3."
    )
    add_model_options(parser, lengths_required=False)
    parser.add_argument(
        "--num_lines",
        type=number_list(int, "whole number"),
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
        default=Numbers().largest,
        help="the largest number in a line; outputs label any other range as not LongEval's",
    )
    add_case_options(parser, None, f"length; default: {CASES}, or all of a file")
    return _lines


def _lines(args: argparse.Namespace) -> None:
    from ringformer.evals import lines
    from ringformer.evals.figures import draw_accuracy
    from ringformer.evals.runner import check_fit
    from ringformer.evals.tables import lines_table

    numbers = lines.Numbers(args.min_value, args.max_value)
    if args.num_lines and args.cases:
        raise ValueError("--num_lines and --cases: give one of them")
    if not (args.num_lines or args.cases or args.lengths):
        raise ValueError("no contexts given: set --lengths, --num_lines or --cases")
    if args.cases and numbers != lines.Numbers():
        raise ValueError("--min_value and --max_value do not apply to --cases, whose rows have their own numbers")
    official = lines.read_official(args.cases) if args.cases else []
    settings = {"form": numbers.form, "contexts": "--num_lines" if args.num_lines else "--lengths"}
    if args.cases:
        content = Path(args.cases).read_bytes()
        settings = {
            "form": f"rows of {Path(args.cases).name}",
            "contexts": "--cases",
            "cases_hash": content_hash(content),
        }

    def groups(answering: "Answering", lengths: Sequence[int]) -> Iterable[list["Case"]]:
        count = args.num_cases or CASES
        if not (args.num_lines or args.cases):
            return (list(lines.cases_of_length(n, count, args.seed, numbers, answering.tokens)) for n in lengths)
        cases = [list(lines.cases_of_lines(n, count, args.seed, numbers)) for n in args.num_lines or ()]
        for size in sorted({case.labels["num_lines"] for case in official}):
            cases.append([case for case in official if case.labels["num_lines"] == size][: args.num_cases])
        check_fit(chain.from_iterable(cases), answering)
        return cases

    title = f"line retrieval ({settings['form']})"
    _evaluate(args, "lines", title, settings, groups, lines.score, lines_table, draw_accuracy)


def add_needle(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval needle`."""
    parser.description = (
        "Needle in a haystack: sentences with a magic number each, hidden in a long text. Reports the share of the "
        "requested numbers that the answer has, by context and depth, as a heat map."
    )
    add_model_options(parser)
    parser.add_argument(
        "--depths",
        type=number_list(float, "number"),
        default=[10.0 * i for i in range(11)],
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

    def groups(answering: "Answering", lengths: Sequence[int]) -> Iterable[list["Case"]]:
        for length in lengths:
            yield list(
                needle.cases_of_length(
                    length, args.depths, args.num_cases, args.seed, needles, haystack, answering.tokens
                )
            )

    settings = {
        "haystack": haystack.name,
        "haystack_hash": content_hash("".join(haystack.pieces).encode()),
        "needles": args.needles,
        "asked": args.asked,
    }
    subject = "needle" if args.needles == 1 else f"{args.asked} of {args.needles} needles"
    title, table = f"{subject} in a haystack ({haystack.name})", partial(cross_table, field="depth", label="{:g}%")
    _evaluate(args, "needle", title, settings, groups, needle.score, table, draw_heat_map)


def add_ruler(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval ruler`."""
    parser.description = (
        "The tasks of RULER with its prompts and its metric: the share of the references that occur in the answer, "
        "times 100. Six of the thirteen tasks need no other data; the rest need the files named below."
    )
    add_model_options(parser)
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

    def cases(answering: "Answering", lengths: Sequence[int], count: int) -> Iterable[list["Case"]]:
        for length in lengths:
            for task in tasks:
                yield list(ruler.cases_of_length(length, task, count, args.seed, answering.tokens, data))

    def groups(answering: "Answering", lengths: Sequence[int]) -> Iterable[list["Case"]]:
        list(cases(answering, lengths, 1))  # fail first if a task does not fit at some length, not only the shortest
        return cases(answering, lengths, args.num_cases)

    table = partial(cross_table, field="task")
    _evaluate(args, "ruler", "tasks of RULER", data.settings(), groups, ruler.score, table, draw_tasks)


def _evaluate(
    args: argparse.Namespace,
    name: str,
    title: str,
    settings: dict[str, Any],
    groups: "Callable[[Answering, Sequence[int]], Iterable[list[Case]]]",
    score: "Score",
    table: "Callable[[Sequence[Row]], str]",
    draw: Callable[..., None],
) -> None:
    """Run an evaluation whose cases are prompts.

    Args:
      settings: settings that decide an outcome, besides the model, the format of the prompts and the seed.
      groups: function from the answering model and the lengths to the cases, grouped by length.
    """
    from ringformer.evals.runner import Answering, answer_cases, row_checker

    with opened(args) as model:
        settings = model.text.settings(chat=args.chat) | {"seed": args.seed} | settings
        with model.cases(name, settings, row_checker(score)) as file:
            longest = max(model.lengths)
            answering = Answering(model.load(longest), longest, args.batch_size, args.chat)
            answer_cases(groups(answering, model.lengths), answering, score, file, say)
            rows = list(file.rows.values())
            title = f"{title}: {model.name}{', chat' if args.chat else ''}"
            write_outputs(file, title, table(rows), draw, rows)
