"""`ringformer eval lines | needle | ruler`."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringformer.evals.cases import content_hash
from ringformer.evals.options import EvaluationOptions, add_options, opened, parse_numbers, say, write_outputs
from ringformer.inference.options import add_template_option

if TYPE_CHECKING:
    from ringformer.evals.case_file import Row
    from ringformer.evals.cases import Case
    from ringformer.evals.runner import Answering, Score

Run = Callable[[argparse.Namespace], None]
CASES = 50
"""Cases of a length or a task; LongEval's number."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions(EvaluationOptions):
    """Options of an evaluation whose cases are prompts."""

    seed: int = 0
    """Seed of the cases (default: 0)."""
    chat: bool = False
    """Format prompts with the model's chat template."""


@dataclass(frozen=True, kw_only=True)
class LinesOptions(PromptOptions):
    """Options of `ringformer eval lines`."""

    lengths: str | None = None
    """Contexts in tokens, for prompt and answer together, e.g. 4096,8192 or 4K,8K."""
    num_lines: str | None = None
    """Instead of --lengths: these numbers of lines, separated by commas, regardless of their tokens."""
    cases: str | None = None
    """Instead of --lengths: a file with LongEval's rows (JSONL), used unchanged."""
    min_value: int = 1
    """The smallest number in a line."""
    max_value: int = 50_000
    """The largest number in a line; outputs label any other range as not LongEval's."""
    num_cases: int | None = None
    """Cases of each length; default: 50, or all of a file."""


@dataclass(frozen=True, kw_only=True)
class NeedleOptions(PromptOptions):
    """Options of `ringformer eval needle`."""

    depths: str = "0,10,20,30,40,50,60,70,80,90,100"
    """Depths of the first needle asked for, in percent; default: 0 to 100 in steps of 10."""
    needles: int = 1
    """Number of needles hidden, including those asked for."""
    asked: int = 1
    """Number of needles asked for."""
    haystack: str | None = None
    """File with a UTF-8 text, repeated if it is too short; default: a neutral built-in text, repeated."""
    num_cases: int = 3
    """Cases of each length and depth."""


@dataclass(frozen=True, kw_only=True)
class RulerOptions(PromptOptions):
    """Options of `ringformer eval ruler`."""

    tasks: str | None = None
    """Names of the tasks to run, separated by commas; default: all whose data are given."""
    essays: str | None = None
    """For niah_single_2 and _3, niah_multikey_1, niah_multivalue and niah_multiquery: the file of the original's essays,
    PaulGrahamEssays.json, or a text file."""
    squad: str | None = None
    """For qa_1: the file dev-v2.0.json of SQuAD."""
    hotpotqa: str | None = None
    """For qa_2: the file hotpot_dev_distractor_v1.json."""
    words: str | None = None
    """Folder of adjectivelist.txt, nounlist.txt and verblist.txt from the package wonderwords, the original's words;
    default: ringformer's own words."""
    num_cases: int = CASES
    """Cases of each length and task; the original has 500."""


def add_lines(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval lines`."""
    parser.description = (
        "LongEval's line retrieval: give the number in one line among many. An answer is correct if its last number "
        "is the line's. Reports accuracy by context, as in the paper's Figure 3."
    )
    return _add_options(parser, LinesOptions, _lines)


def add_needle(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval needle`."""
    parser.description = (
        "Needle in a haystack: sentences with a magic number each, hidden in a long text. Reports the share of the "
        "requested numbers that the answer has, by context and depth, as a heat map."
    )
    return _add_options(parser, NeedleOptions, _needle)


def add_ruler(parser: argparse.ArgumentParser) -> Run:
    """Add the arguments of `ringformer eval ruler`."""
    parser.description = (
        "The tasks of RULER with its prompts and its metric: the share of the references that occur in the answer, "
        "times 100. Six of the thirteen tasks need no other data; the rest need the files named below."
    )
    return _add_options(parser, RulerOptions, _ruler)


def _add_options(parser: argparse.ArgumentParser, options: type[PromptOptions], run: Run) -> Run:
    add_options(parser, options)
    add_template_option(parser)
    return run


def _lines(args: argparse.Namespace) -> None:
    from ringformer.evals import lines
    from ringformer.evals.figures import draw_accuracy
    from ringformer.evals.runner import check_fit
    from ringformer.evals.tables import lines_table

    numbers = lines.Numbers(args.min_value, args.max_value)
    sizes = parse_numbers(args.num_lines, int, "whole number") if args.num_lines else []
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
        cases = [list(lines.cases_of_lines(n, count, args.seed, numbers)) for n in sizes]
        for size in sorted({case.labels["num_lines"] for case in official}):
            cases.append([case for case in official if case.labels["num_lines"] == size][: args.num_cases])
        check_fit(chain.from_iterable(cases), answering)
        return cases

    title = f"line retrieval ({settings['form']})"
    _evaluate(args, "lines", title, settings, groups, lines.score, lines_table, draw_accuracy)


def _needle(args: argparse.Namespace) -> None:
    from ringformer.evals import needle
    from ringformer.evals.figures import draw_heat_map
    from ringformer.evals.tables import cross_table

    haystack, needles = needle.Haystack.load(args.haystack), needle.Needles(args.needles, args.asked)
    depths = parse_numbers(args.depths, float, "number")
    needle.check(needles, depths)

    def groups(answering: "Answering", lengths: Sequence[int]) -> Iterable[list["Case"]]:
        cases = partial(needle.cases_of_length, needles=needles, haystack=haystack, tokens=answering.tokens)
        return (list(cases(length, depths, args.num_cases, args.seed)) for length in lengths)

    settings = {
        "haystack": haystack.name,
        "haystack_hash": content_hash("".join(haystack.pieces).encode()),
        "needles": args.needles,
        "asked": args.asked,
    }
    subject = "needle" if args.needles == 1 else f"{args.asked} of {args.needles} needles"
    title, table = f"{subject} in a haystack ({haystack.name})", partial(cross_table, field="depth", label="{:g}%")
    _evaluate(args, "needle", title, settings, groups, needle.score, table, draw_heat_map)


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
