"""The metrics of LongBench (Bai et al. 2024, arXiv:2308.14508, table 1), as its `metrics.py` computes them.

Each compares an answer with one of the references; the best of the references counts. Scores are from 0 to 1.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import cache
from typing import Any

from ringformer.evals.texts.answers import normalized, without

Metric = Callable[[str, str, Sequence[str]], float]
"""Function from an answer, a reference and the classes of a task to the score."""

EXTRA = "longbench"
"""Extra of the packages that summaries and Chinese tasks need; they are imported when a score needs them."""
CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～"
    "｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
COMMENTS = ("`", "#", "//")
"""Marks of lines that are no code: the first line without one is the answer of a completion."""


def question_f1(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of the words, without case, punctuation and articles."""
    return _f1(normalized(answer).split(), normalized(reference).split())


def question_f1_chinese(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of the words that jieba cuts, without case and punctuation."""
    return _f1(_chinese_words(answer), _chinese_words(reference))


def rouge_l(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L's F of the package `rouge`; as the original, 0 where it fails: for a text without words, or texts with so
    much in common that it recurses too deeply."""
    try:
        (scores,) = _rouge().get_scores([answer], [reference])
    except (ValueError, RecursionError):
        return 0.0
    return float(scores["rouge-l"]["f"])


def rouge_l_chinese(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L of the words that jieba cuts."""
    cut = _jieba().cut
    return rouge_l(" ".join(cut(answer)), " ".join(cut(reference)))


def classification(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """1 over the number of classes that the answer names, if the reference is one of them; a class that is a part of
    the reference does not count."""
    named = [name for name in classes if name in answer]
    for name in named:  # as the original: it skips the class behind one that it removes
        if name in reference and name != reference:
            named.remove(name)
    return 1 / len(named) if reference in named else 0.0


def passage(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the answer's numbers that are the reference's: "Paragraph 7"."""
    return _share_of_numbers(answer, re.findall(PASSAGES[passage], reference)[0])


def passage_chinese(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the answer's numbers that are the reference's: "段落7"."""
    return _share_of_numbers(answer, re.findall(PASSAGES[passage_chinese], reference)[0])


def count(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the answer's numbers that are the reference."""
    return _share_of_numbers(answer, reference)


def code_similarity(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Ratio of matching characters of the first line of code, in whole percent."""
    line = _first_line_of_code(answer)
    if not line or not reference:
        return 0.0
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100


def _first_line_of_code(answer: str) -> str:
    for line in answer.split("\n"):
        if line.strip() and not any(mark in line for mark in COMMENTS):
            return line
    return ""


def _chinese_words(text: str) -> list[str]:
    words = []
    for cut in _jieba().cut(text):
        plain = without(cut.lower(), string.punctuation + CHINESE_PUNCTUATION)
        word = "".join(plain.split())
        if word:
            words.append(word)
    return words


def _f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    same = (Counter(answer) & Counter(reference)).total()
    if not same:
        return 0.0
    precision = same / len(answer)
    recall = same / len(reference)
    return 2 * precision * recall / (precision + recall)


def _share_of_numbers(answer: str, wanted: str) -> float:
    numbers = re.findall(r"\d+", answer)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


@cache
def _rouge() -> Any:
    from rouge import Rouge

    return Rouge()


@cache
def _jieba() -> Any:
    import jieba

    jieba.setLogLevel("ERROR")
    return jieba


METRICS: dict[str, Metric] = {
    "narrativeqa": question_f1,
    "qasper": question_f1,
    "multifieldqa_en": question_f1,
    "multifieldqa_zh": question_f1_chinese,
    "hotpotqa": question_f1,
    "2wikimqa": question_f1,
    "musique": question_f1,
    "dureader": rouge_l_chinese,
    "gov_report": rouge_l,
    "qmsum": rouge_l,
    "multi_news": rouge_l,
    "vcsum": rouge_l_chinese,
    "trec": classification,
    "triviaqa": question_f1,
    "samsum": rouge_l,
    "lsht": classification,
    "passage_retrieval_en": passage,
    "passage_retrieval_zh": passage_chinese,
    "passage_count": count,
    "lcc": code_similarity,
    "repobench-p": code_similarity,
}
"""Metric of each task."""
FIRST_LINE = frozenset({"trec", "triviaqa", "samsum", "lsht"})
"""Tasks by example, of whose answers the first line counts."""
PLAIN = FIRST_LINE | {"lcc", "repobench-p"}
"""Tasks that are texts to continue, also for a model with a chat template."""


PASSAGES = {passage: r"Paragraph (\d+)", passage_chinese: r"段落(\d+)"}
"""Form of the references of tasks whose answer is a passage."""


def base_task(task: str) -> str:
    """Return the task of which `task` is, `qasper_e` say, has the form: LongBench-E has the same prompts."""
    return task.removesuffix("_e")


def import_packages(tasks: Sequence[str]) -> None:
    """Import what the metrics of these tasks need. Raises ModuleNotFoundError for what is absent."""
    metrics = {METRICS[base_task(task)] for task in tasks}
    if metrics & {rouge_l, rouge_l_chinese}:
        _rouge()
    if metrics & {question_f1_chinese, rouge_l_chinese}:
        _jieba()


def fault_of(task: str, references: Sequence[str], classes: Sequence[str]) -> str | None:
    """Return why a row of a task could not be scored; None if it can."""
    metric = METRICS[base_task(task)]
    if metric is classification and not set(references) <= set(classes):
        return "all_classes does not have the answer"
    if metric in PASSAGES and not all(re.search(PASSAGES[metric], reference) for reference in references):
        return f"an answer is not of the form {PASSAGES[metric]}"
    return None


def score_of(task: str, answer: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """Return the score of an answer to a task: the best over the references."""
    of = base_task(task)
    if of in FIRST_LINE:
        answer = answer.lstrip("\n").split("\n")[0]
    return max(METRICS[of](answer, reference, classes) for reference in references)
