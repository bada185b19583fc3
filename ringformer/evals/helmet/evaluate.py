"""`ringformer eval helmet`."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from ringformer.evals.cases import Case
from ringformer.evals.evaluation_setup import opened, parse_names, say, write_outputs
from ringformer.evals.figures import draw_tasks
from ringformer.evals.helmet.cases import cases_of_length, score
from ringformer.evals.helmet.official_files import read_questions, tasks_of
from ringformer.evals.helmet.tasks import BY_NAME
from ringformer.evals.runner import Answering, answer_cases, row_checker
from ringformer.evals.tables import tasks_table


def evaluate_helmet(args: argparse.Namespace) -> None:
    """Run `ringformer eval helmet`."""
    folder = Path(args.data)
    names = parse_names(args.tasks)
    with opened(args) as model:
        tasks = tasks_of(folder, model.lengths, names)
        if earlier := model.text.beginning.describe_earlier():
            say(earlier)
        left_out = [name for name, task in BY_NAME.items() if task not in tasks]
        if left_out:
            say(f"left out: {', '.join(left_out)}")
        for length in model.lengths:
            for task in tasks:
                read_questions(folder, task, length, args.num_cases)  # a fault is named before the model is loaded
        settings = model.text.settings(chat=args.chat) | {"num_cases": args.num_cases}
        with model.cases("helmet", settings, row_checker(score)) as file:
            longest = max(model.lengths)
            answering = Answering(model.load(longest), longest, args.batch_size, args.chat)

            def groups() -> Iterator[list[Case]]:
                for length in model.lengths:
                    for task in tasks:
                        questions = read_questions(folder, task, length, args.num_cases)
                        tokenizer = model.text.tokenizer
                        yield list(cases_of_length(length, task, questions, args.chat, tokenizer, answering.tokens))

            answer_cases(groups(), answering, score, file, say)
            rows = list(file.rows.values())
            write_outputs(file, model.title("HELMET"), tasks_table(rows), draw_tasks, rows)
