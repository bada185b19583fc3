"""The metrics of HELMET's tables for tasks that no model judges, as its `utils.py` computes them: from 0 to 1."""

import math
import re
from collections.abc import Mapping, Sequence

from ringformer.evals.helmet.forms import NEEDLES, PASSAGES
from ringformer.evals.helmet.tasks import Task
from ringformer.evals.texts.answers import normalized

RANKS = 10
"""Documents of a ranking that count."""


def score_of(task: Task, answer: str, references: Sequence[str], relevant: Mapping[str, int]) -> float:
    """Return the score of an answer.

    Recall of the references for needles, NDCG@10 for rankings, and else whether a reference is a part of the answer.
    """
    if task.first_line:
        answer = answer.split("\n")[0]
    if task.form is NEEDLES:
        return sum(reference.lower() in answer.lower() for reference in references) / len(references)
    if task.form is PASSAGES:
        return ndcg(ranking(answer), relevant)
    whole = normalized(answer)
    rest = normalized(without_prefix(answer, task.answer))
    for reference in map(normalized, references):
        if reference in whole or reference in rest:
            return 1.0
    return 0.0


def without_prefix(answer: str, prefix: str) -> str:
    """Return the rest of the line behind "Answer:", or the first line if it is nowhere."""
    escaped = re.escape(prefix)
    match = re.search(f"{escaped}(.*)", answer, re.IGNORECASE) or re.match("(.*)", answer)
    line = match[1].strip() if match else ""
    return re.sub(f"^{escaped}", "", line, flags=re.IGNORECASE).strip()


def ranking(answer: str) -> list[str]:
    """Return the IDs of the longest list such as "ID3 > ID1 > ID2", each once; the whole answer if it has no number."""
    plain = re.sub(r"[\[\]:]", "", answer).lower().replace("id", "")
    lists = re.findall(r"\d+(?:\s*>\s*\d+)*", plain)
    if not lists:
        return [plain]
    longest = max(lists, key=len)
    return list(dict.fromkeys(map(str.strip, longest.split(">"))))


def ndcg(ranked: Sequence[str], relevant: Mapping[str, int]) -> float:
    """Return the normalised discounted cumulative gain of the first ten of a ranking, as trec_eval's ndcg_cut_10."""
    gains = [relevant.get(name, 0) for name in ranked[:RANKS]]
    best = sorted(relevant.values(), reverse=True)[:RANKS]
    if not best:
        return 0.0
    return round(_discounted(gains) / _discounted(best), 5)


def _discounted(gains: Sequence[int]) -> float:
    return sum(gain / math.log2(place + 2) for place, gain in enumerate(gains))
