"""Text tables that summarize evaluations."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import nan
from typing import Any

from ringformer.evals.case_file import Row
from ringformer.evals.intervals import bootstrap, wilson


def column(rows: Sequence[Row], field: str) -> list[Any]:
    """Return the values of a field."""
    return [row[field] for row in rows]


def mean(rows: Sequence[Row]) -> float:
    """Mean score of some cases, from 0 to 1."""
    return sum(column(rows, "score")) / len(rows)


def accuracy_interval(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the 95% interval of the mean score of right or wrong cases: Wilson's or, if documents have several
    questions, from a bootstrap over documents. If all documents have the same share, which a bootstrap takes for
    certain, the result is Wilson's interval of as many cases as there are documents."""
    scores = _scores_by_index(rows)
    shares = {sum(of_document) / len(of_document) for of_document in scores}
    if len(scores) == len(rows) or len(shares) == 1:
        return wilson(mean(rows), len(scores))
    return bootstrap(list(map(sum, scores)), list(map(len, scores)))


def score_interval(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the 95% interval of the mean of scores between 0 and 1 of independent cases: from a bootstrap over cases.
    If all scores are the same, which a bootstrap takes for certain, it is that of right or wrong cases."""
    return _interval(rows, [[score] for score in column(rows, "score")])


def interval_of_questions(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the 95% interval of the mean of scores between 0 and 1, of which several may be of one question, its
    `index`: from a bootstrap over questions. If all scores are the same, it is that of right or wrong questions."""
    return _interval(rows, _scores_by_index(rows))


def _interval(rows: Sequence[Row], scores: list[list[float]]) -> tuple[float, float]:
    """Return the interval of the mean of scores, which are given in independent groups.

    A single group says as much as a single right or wrong case.
    """
    if len(scores) == 1 or len(set(column(rows, "score"))) == 1:
        return wilson(mean(rows), len(scores))
    return bootstrap(list(map(sum, scores)), list(map(len, scores)))


def _scores_by_index(rows: Sequence[Row]) -> list[list[float]]:
    """Return the scores of the rows of each document or question, which have the same `index`."""
    scores = []
    for of_index in grouped(rows, "index").values():
        scores.append(column(of_index, "score"))
    return scores


def mean_tokens(rows: Sequence[Row]) -> float:
    """Mean prompt length in tokens."""
    return sum(column(rows, "prompt_tokens")) / len(rows)


def grouped(rows: Sequence[Row], field: str) -> dict[Any, list[Row]]:
    """Group rows by the value of a field, in sorted order."""
    groups = defaultdict(list)
    for row in rows:
        groups[row[field]].append(row)
    return dict(sorted(groups.items()))


def contexts(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Group cases of line retrieval by context, or by number of lines if they have no context."""
    return grouped(rows, "num_lines" if rows[0]["length"] is None else "length")


def lines_table(rows: Sequence[Row]) -> str:
    """Tabulate accuracy by context, with its 95% interval."""
    unit = "lines" if rows[0]["length"] is None else "context"
    text = [f"{unit:>10}  prompt tokens         lines     cases  accuracy  95% interval"]
    for context, group in contexts(rows).items():
        documents = len(grouped(group, "index"))
        cases = f"{len(group)}"
        if len(group) > documents:
            cases = f"{documents} x {len(group) / documents:g}"
        low, high = accuracy_interval(group)
        text.append(
            f"{context:>10,} {mean_tokens(group):>14,.0f} {span(group, 'num_lines'):>13} {cases:>9} "
            f"{mean(group):>9.1%} {f'{100 * low:.1f}-{high:.1%}':>13}"
        )
    if "question" in rows[0]:
        text.append("cases: documents x questions about each; intervals are over documents")
    return "\n".join(text)


def span(rows: Sequence[Row], field: str) -> str:
    """Format the smallest and the largest number in a field."""
    counts = column(rows, field)
    low = min(counts)
    high = max(counts)
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def mean_scores(rows: Sequence[Row], lengths: Iterable[int]) -> list[float]:
    """Return the mean score of the rows of each length; NaN for a length without rows."""
    by_length = grouped(rows, "length")
    scores = []
    for length in lengths:
        of_length = by_length.get(length)
        scores.append(mean(of_length) if of_length else nan)
    return scores


def cross_table(rows: Sequence[Row], field: str, label: str = "{}") -> str:
    """Tabulate mean scores times 100, with a row for each value of a field and a column for each context."""
    lengths = grouped(rows, "length")
    columns = "".join(f"{length:>11,}" for length in lengths)
    text = [f"{field:>16}{columns}"]
    groups: dict[str, Sequence[Row]] = {}
    for value, of_value in grouped(rows, field).items():
        groups[label.format(value)] = of_value
    groups["mean"] = rows
    for name, group in groups.items():
        scores = "".join(f"{100 * score:>11.1f}" for score in mean_scores(group, lengths))
        text.append(f"{name:>16}{scores.replace('nan', '  -')}")
    return "\n".join(text)


def tasks_table(rows: Sequence[Row]) -> str:
    """Tabulate the mean scores times 100 by task and context, and their mean over the tasks. Rows of the same `index`
    are of one question, so that intervals are over questions; `cut` counts prompts that were too long."""
    text = [f"{'task':>22} {'context':>9} cases  cut  score  95% interval"]
    for length, of_length in grouped(rows, "length").items():
        scores = []
        for task, of_task in grouped(of_length, "task").items():
            scores.append(mean(of_task))
            low, high = interval_of_questions(of_task)
            cut = sum(row["cut"] > 0 for row in of_task)
            text.append(
                f"{task:>22} {length:>9,} {len(of_task):>5} {cut:>4} {100 * scores[-1]:>6.1f}  "
                f"{100 * low:.1f}-{100 * high:.1f}"
            )
        text.append(f"{'mean of the tasks':>22} {length:>9,} {'':>10} {100 * sum(scores) / len(scores):>6.1f}")
    return "\n".join(text)
