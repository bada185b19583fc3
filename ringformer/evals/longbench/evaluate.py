"""`ringformer eval longbench`."""

import argparse
from pathlib import Path

from ringformer.data.optional_packages import needed_for
from ringformer.evals.evaluation_setup import opened, say, write_outputs
from ringformer.evals.figures import draw_tasks
from ringformer.evals.longbench.cases import cases_of_length, is_plain, score
from ringformer.evals.longbench.official_files import config_hash, read_tasks
from ringformer.evals.longbench.scores import EXTRA, import_packages
from ringformer.evals.runner import Answering, answer_cases, row_checker
from ringformer.evals.tables import tasks_table


def evaluate_longbench(args: argparse.Namespace) -> None:
    """Run `ringformer eval longbench`."""
    names = [name.strip() for name in args.tasks.split(",") if name.strip()] if args.tasks else None
    tasks = read_tasks(Path(args.data), names)
    with needed_for("LongBench's summaries and Chinese tasks", EXTRA), opened(args) as model:
        import_packages([task.name for task in tasks])
        if earlier := model.text.beginning.describe_earlier():
            say(earlier)
        settings = model.text.settings(chat=args.chat) | {"config_hash": config_hash(Path(args.data))}
        with model.cases("longbench", settings, row_checker(score)) as file:
            longest = max(model.lengths)
            generator = model.load(longest)
            for chat in sorted({False, args.chat}):
                answering = Answering(generator, longest, args.batch_size, chat)
                groups = (
                    list(cases_of_length(length, task, args.num_cases, model.text.tokenizer, answering.tokens))
                    for length in model.lengths
                    for task in tasks
                    if (args.chat and not is_plain(task.name)) == chat
                )
                answer_cases(groups, answering, score, file, say)
            rows = list(file.rows.values())
            title = f"LongBench: {model.name}{', chat' if args.chat else ''}"
            write_outputs(file, title, tasks_table(rows), draw_tasks, rows)
