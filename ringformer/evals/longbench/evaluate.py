"""`ringformer eval longbench`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ringformer.data.optional_packages import needed_for
from ringformer.evals.case_file import Row
from ringformer.evals.evaluation_setup import opened, say, write_outputs
from ringformer.evals.figures import draw_tasks
from ringformer.evals.longbench.cases import cases_of_length, is_plain, score
from ringformer.evals.longbench.official_files import config_hash, read_tasks
from ringformer.evals.longbench.scores import EXTRA, import_packages
from ringformer.evals.runner import Answering, answer_cases, row_checker
from ringformer.evals.tables import grouped, mean, mean_scores, score_interval


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
            write_outputs(file, title, table(rows), draw_tasks, rows)


def table(rows: Sequence[Row]) -> str:
    """Tabulate the mean scores times 100 by task and context, and their mean over the tasks, as the authors do."""
    text = [f"{'task':>22} {'context':>9} cases  cut  score  95% interval"]
    for length, of_length in grouped(rows, "length").items():
        by_task = grouped(of_length, "task")
        for task, rows_of_task in by_task.items():
            low, high = score_interval(rows_of_task)
            cut = sum(row["cut"] > 0 for row in rows_of_task)
            text.append(
                f"{task:>22} {length:>9,} {len(rows_of_task):>5} {cut:>4} {100 * mean(rows_of_task):>6.1f}  "
                f"{100 * low:.1f}-{100 * high:.1f}"
            )
        of_tasks = [mean_scores(rows_of_task, [length])[0] for rows_of_task in by_task.values()]
        text.append(f"{'mean of the tasks':>22} {length:>9,} {'':>10} {100 * sum(of_tasks) / len(of_tasks):>6.1f}")
    return "\n".join(text)
