"""`ringformer eval longbench`."""

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from ringformer.data.optional_packages import needed_for
from ringformer.evals.cases import Case
from ringformer.evals.evaluation_setup import opened, parse_names, say, write_outputs
from ringformer.evals.figures import draw_tasks
from ringformer.evals.longbench.cases import cases_of_length, is_plain, score
from ringformer.evals.longbench.official_files import config_hash, read_tasks
from ringformer.evals.longbench.scores import EXTRA, import_packages
from ringformer.evals.runner import Answering, answer_cases, row_checker
from ringformer.evals.tables import tasks_table


def evaluate_longbench(args: argparse.Namespace) -> None:
    """Run `ringformer eval longbench`."""
    tasks = read_tasks(Path(args.data), parse_names(args.tasks))
    with needed_for("LongBench's summaries and Chinese tasks", EXTRA), opened(args) as model:
        import_packages([task.name for task in tasks])
        if earlier := model.text.beginning.describe_earlier():
            say(earlier)
        settings = model.text.settings(chat=args.chat) | {"config_hash": config_hash(Path(args.data))}
        with model.cases("longbench", settings, row_checker(score)) as file:
            longest = max(model.lengths)
            generator = model.load(longest)

            def groups(answering: Answering) -> Iterator[list[Case]]:
                for length, task in product(model.lengths, tasks):
                    if answering.chat == (args.chat and not is_plain(task.name)):
                        tokenizer = model.text.tokenizer
                        yield list(cases_of_length(length, task, args.num_cases, tokenizer, answering.tokens))

            for chat in sorted({False, args.chat}):
                answering = Answering(generator, longest, args.batch_size, chat)
                answer_cases(groups(answering), answering, score, file, say)
            rows = list(file.rows.values())
            write_outputs(file, model.title("LongBench"), tasks_table(rows), draw_tasks, rows)
