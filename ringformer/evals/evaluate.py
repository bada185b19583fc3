"""The evaluations whose cases are prompts: their settings, their cases and their outputs."""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby, product
from pathlib import Path
from typing import Any

from ringformer.evals import lines, needle
from ringformer.evals.case_file import Row
from ringformer.evals.cases import Case
from ringformer.evals.evaluation_setup import opened, parse_numbers, say, write_outputs
from ringformer.evals.figures import draw_accuracy, draw_heat_map, draw_scores, draw_tasks
from ringformer.evals.mrcr import conversations as mrcr
from ringformer.evals.nolima import associations as nolima
from ringformer.evals.ruler import tasks as ruler
from ringformer.evals.ruler.data import SHIPPED, read_data
from ringformer.evals.runner import Answering, Score, answer_cases, check_fit, row_checker
from ringformer.evals.tables import cross_table, lines_table
from ringformer.evals.texts.shipped import NAME, read_text_of
from ringformer.files.hashes import content_hash
from ringformer.settings import whole_number


def evaluate_lines(args: argparse.Namespace) -> None:
    """Run `ringformer eval lines`."""
    numbers = lines.Numbers(args.min_value, args.max_value)
    sizes = parse_numbers(args.num_lines, whole_number, "whole number") if args.num_lines else []
    if args.num_lines and args.cases:
        raise ValueError("--num_lines and --cases: give one of them")
    if not (args.num_lines or args.cases or args.lengths):
        raise ValueError("no contexts given: set --lengths, --num_lines or --cases")
    if args.cases and numbers != lines.Numbers():
        raise ValueError("--min_value and --max_value do not apply to --cases, whose rows have their own numbers")
    if args.cases and args.questions != 1:
        raise ValueError("--questions does not apply to --cases, whose rows have one question each")
    settings = {"form": numbers.form, "contexts": "--num_lines" if args.num_lines else "--lengths"}
    official: list[Case] = []
    if args.cases:
        official = lines.read_official(args.cases)
        content = Path(args.cases).read_bytes()
        form = f"rows of {Path(args.cases).name}"
        settings = {"form": form, "contexts": "--cases", "cases_hash": content_hash(content)}
    if args.questions > 1:
        settings["questions"] = args.questions

    def groups(answering: Answering, lengths: Sequence[int]) -> Iterable[list[Case]]:
        options = {"count": args.num_cases or lines.CASES, "seed": args.seed, "numbers": numbers}
        options["questions"] = args.questions
        if args.cases:
            by_size = defaultdict(list)
            for case in official:
                by_size[case.labels["num_lines"]].append(case)
            cases = [by_size[size][: args.num_cases] for size in sorted(by_size)]
            check_fit(chain.from_iterable(cases), answering)
            return cases
        if args.num_lines:
            of_lines = partial(lines.cases_of_lines, **options)
            check_fit(chain.from_iterable(map(of_lines, sizes)), answering)
            drawn = map(of_lines, sizes)
        else:
            drawn = map(partial(lines.cases_of_length, tokens=answering.tokens, **options), lengths)
        if args.questions == 1:
            return map(list, drawn)
        if not answering.model.generator.can_append:
            say("the model's attention reads all of its text at once: each question reads its document again")
        return _by_document(drawn)

    title = f"line retrieval ({settings['form']})"
    _evaluate(args, "lines", title, settings, groups, lines.score, lines_table, draw_accuracy)


def _by_document(drawn: Iterable[Iterable[Case]]) -> Iterator[list[Case]]:
    """Yield the cases of each document."""
    for cases in drawn:
        for _, of_document in groupby(cases, lambda case: case.index):
            yield list(of_document)


def evaluate_needle(args: argparse.Namespace) -> None:
    """Run `ringformer eval needle`."""
    haystack = needle.Haystack.load(args.haystack)
    needles = needle.Needles(args.needles, args.asked)
    depths = parse_numbers(args.depths, float, "number")
    needle.check(needles, depths)

    def groups(answering: Answering, lengths: Sequence[int]) -> Iterable[list[Case]]:
        options = {"seed": args.seed, "needles": needles, "haystack": haystack, "tokens": answering.tokens}
        for length in lengths:
            yield list(needle.cases_of_length(length, depths, args.num_cases, **options))

    settings = haystack.settings | {"needles": args.needles, "asked": args.asked}
    subject = "needle" if args.needles == 1 else f"{args.asked} of {args.needles} needles"
    title = f"{subject} in a haystack ({haystack.name})"
    _evaluate(args, "needle", title, settings, groups, needle.score, needle.table, draw_heat_map)


def evaluate_nolima(args: argparse.Namespace) -> None:
    """Run `ringformer eval nolima`."""
    haystack = needle.Haystack.load(args.haystack)
    depths = parse_numbers(args.depths, float, "number")
    needle.check(needle.Needles(), depths)
    nolima.usable(haystack)

    def groups(answering: Answering, lengths: Sequence[int]) -> Iterable[list[Case]]:
        options = {"seed": args.seed, "haystack": haystack, "tokens": answering.tokens, "direct": args.direct}
        for length in lengths:
            yield list(nolima.cases_of_length(length, depths, args.num_cases, **options))

    settings = haystack.settings | {"direct": args.direct}
    kind = "asked for in its words" if args.direct else "without a literal match"
    title = f"needle {kind} ({haystack.name})"
    _evaluate(args, "nolima", title, settings, groups, nolima.score, needle.table, draw_heat_map)


def evaluate_ruler(args: argparse.Namespace) -> None:
    """Run `ringformer eval ruler`."""
    data = read_data(args.words, args.essays, args.squad, args.hotpotqa)
    tasks = ruler.choose(args.tasks.split(",") if args.tasks else None, data)

    def cases(answering: Answering, lengths: Sequence[int], count: int) -> Iterable[list[Case]]:
        for length, task in product(lengths, tasks):
            yield list(ruler.cases_of_length(length, task, count, args.seed, answering.tokens, data))

    def groups(answering: Answering, lengths: Sequence[int]) -> Iterable[list[Case]]:
        list(cases(answering, lengths, 1))  # fail at once if a task does not fit some length
        return cases(answering, lengths, args.num_cases)

    title = "tasks of RULER"
    if args.essays == SHIPPED:
        title += f" (essays: {NAME}, not the original's)"
    table = partial(cross_table, field="task")
    _evaluate(args, "ruler", title, data.settings, groups, ruler.score, table, draw_tasks)


def evaluate_mrcr(args: argparse.Namespace) -> None:
    """Run `ringformer eval mrcr`."""
    mrcr.check(args.needles)
    name, text = read_text_of("--text", args.text)
    passages = mrcr.passages_of(text)

    def groups(answering: Answering, lengths: Sequence[int]) -> Iterable[list[Case]]:
        options = {"passages": passages, "tokens": answering.tokens, "chat": args.chat}
        for length in lengths:
            yield list(mrcr.cases_of_length(length, args.num_cases, args.seed, args.needles, **options))

    settings = {"text": name, "text_hash": content_hash(text.encode()), "needles": args.needles}
    title = f"MRCR, {args.needles} needles ({name})"
    _evaluate(args, "mrcr", title, settings, groups, mrcr.score, mrcr.table, draw_scores)


def _evaluate(
    args: argparse.Namespace,
    name: str,
    title: str,
    settings: dict[str, Any],
    groups: Callable[[Answering, Sequence[int]], Iterable[list[Case]]],
    score: Score,
    table: Callable[[Sequence[Row]], str],
    draw: Callable[..., None],
) -> None:
    """Run an evaluation whose cases are prompts.

    Args:
      settings: settings that determine an outcome, besides the model, the format of the prompts and the seed.
      groups: function from the answering model and the lengths to the cases, grouped by length.
    """
    with opened(args) as model:
        if not args.chat and (earlier := model.text.beginning.describe_earlier()):
            say(earlier)
        settings = model.text.settings(chat=args.chat) | {"seed": args.seed} | settings
        with model.cases(name, settings, row_checker(score)) as file:
            longest = max(model.lengths)
            answering = Answering(model.load(longest), longest, args.batch_size, args.chat)
            answer_cases(groups(answering, model.lengths), answering, score, file, say)
            rows = list(file.rows.values())
            write_outputs(file, model.title(title), table(rows), draw, rows)
