"""`ringformer eval longbench`."""

import argparse
from functools import partial
from itertools import product, starmap
from pathlib import Path

from ringformer.data.optional_packages import needed_for
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
            for chat in sorted({False, args.chat}):
                answering = Answering(generator, longest, args.batch_size, chat)
                of_kind = [task for task in tasks if (args.chat and not is_plain(task.name)) == chat]
                cases = partial(
                    cases_of_length, number=args.num_cases, tokens=model.text.tokenizer, count=answering.tokens
                )
                groups = starmap(cases, product(model.lengths, of_kind))
                answer_cases(map(list, groups), answering, score, file, say)
            rows = list(file.rows.values())
            write_outputs(file, model.title("LongBench"), tasks_table(rows), draw_tasks, rows)
