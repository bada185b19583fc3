"""The four forms of rows that HELMET's files have, and what the prompts of each hold, as its `data.py` writes them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]

SHOTS = 2
"""Solved examples before a question, in the authors' configs."""


class Question(NamedTuple):
    """A question, which a row asks."""

    fields: dict[str, str]
    """Texts of the prompt, by the names that the task's prompt has for them."""
    answers: tuple[str, ...]
    relevant: dict[str, int]
    """Relevance of documents by their ID, of tasks that rank; those of 0 are left out."""


class Form(NamedTuple):
    """A form of rows."""

    is_right: Callable[[Row], bool]
    """Check of a row: True if it has the form; errors of a lookup mean that it does not."""
    question: Callable[[Row, Sequence[Row]], Question]
    """Function from a row, and the solved examples that come before it, to what it asks."""


def _are_texts(*values: Any) -> bool:
    return all(type(value) is str for value in values)


def _needle_answers(row: Row) -> list[Any]:
    given = row["answer"] if "answer" in row else row["outputs"]
    if isinstance(given, str):
        return [given]
    return list(given)


def _is_needle(row: Row) -> bool:
    answers = _needle_answers(row)
    return _are_texts(row["context"], row["query"], row["type_needle_v"], *answers) and bool(answers)


def _of_needle(row: Row, examples: Sequence[Row]) -> Question:
    fields = {"context": row["context"], "query": row["query"], "type_needle_v": row["type_needle_v"]}
    return Question(fields, tuple(_needle_answers(row)), {})


def _is_pair(row: Row) -> bool:
    texts = [row["context"], row["question"], row["answer"]]
    for key, value in row["demos"]:
        texts += [key, value]
    return _are_texts(*texts)


def _of_pair(row: Row, examples: Sequence[Row]) -> Question:
    demos = ""
    for key, value in row["demos"][:SHOTS]:
        demos += f"Key: {key}\nCorresponding value: {value}\n\n"
    fields = {"context": row["context"], "question": row["question"], "demos": demos}
    return Question(fields, (row["answer"],), {})


def _is_question(row: Row) -> bool:
    texts = [row["question"], *row["answers"]]
    for document in row["ctxs"]:
        texts += [document["title"], document["text"]]
    return _are_texts(*texts) and bool(row["answers"])


def _of_question(row: Row, examples: Sequence[Row]) -> Question:
    demos = ""
    for example in examples:
        demos += f"{_documents(example)}\n\nQuestion: {example['question']}\nAnswer: {example['answers'][0]}\n\n"
    fields = {"context": _documents(row), "question": row["question"], "demos": demos}
    return Question(fields, tuple(row["answers"]), {})


def _documents(row: Row) -> str:
    return "\n\n".join(f"Document (Title: {x['title']}): {x['text']}" for x in row["ctxs"])


def _is_query(row: Row) -> bool:
    documents = row["ctxs"]
    texts = [row["query"], row["qid"]]
    for document in documents:
        texts += [document["id"], document["text"]]
        if "title" in documents[0]:
            texts.append(document["title"])
        if type(document["label"]) is not int:
            return False
    return bool(documents) and _are_texts(*texts)


def _of_query(row: Row, examples: Sequence[Row]) -> Question:
    titled = "title" in row["ctxs"][0]
    demos = ""
    for example in examples:
        demos += f"{_numbered(example, titled)}\n\nQuery: {example['query']}\nRanking: {_ranking(example)}\n\n"
    fields = {"context": _numbered(row, titled), "question": row["query"], "demos": demos}
    relevant = {document["id"]: document["label"] for document in row["ctxs"] if document["label"] > 0}
    return Question(fields, (_ranking(row),), relevant)


def _numbered(row: Row, titled: bool) -> str:
    """Return the documents to rank, with their IDs."""
    written = []
    for document in row["ctxs"]:
        title = f" (Title: {document['title']})" if titled else ""
        written.append(f"[ID: {document['id']}] Document{title}: {document['text']}")
    return "\n\n".join(written)


def _ranking(row: Row) -> str:
    ordered = sorted(row["ctxs"], key=lambda document: document["label"], reverse=True)
    return " > ".join(document["id"] for document in ordered)


NEEDLES = Form(_is_needle, _of_needle)
PAIRS = Form(_is_pair, _of_pair)
DOCUMENTS = Form(_is_question, _of_question)
PASSAGES = Form(_is_query, _of_query)
