"""The tasks of HELMET (Yen et al. 2024, arXiv:2410.02694) that its data files hold and no model judges: recall,
retrieval-augmented generation and re-ranking, with the prompts of its `data.py` and the sizes of its `configs/`.
"""

from typing import Literal, NamedTuple

from ringformer.evals.helmet import forms
from ringformer.evals.helmet.forms import Form

LENGTHS = (8192, 16384, 32768, 65536, 131072)
"""Contexts, in tokens, that the authors have made files for."""


class Task(NamedTuple):
    """A task: its files, and how its prompts are written. Texts in braces are fields of a question."""

    name: str
    file: str
    """File below `data/`; {size} stands for one of `sizes`."""
    sizes: tuple[int, ...]
    """Size of the file of each of the `LENGTHS`: tokens, pairs or documents."""
    form: Form
    """Form of the rows."""
    user: str
    """The prompt, as a chat's message."""
    answer: str
    """Beginning of the answer, a line that follows where there is no chat template."""
    max_new_tokens: int
    examples: str = ""
    """File of the solved examples that come before a question; none for tasks whose rows have their own or none."""
    examples_are: Literal["of another split", "other questions", "not asked"] = "of another split"
    """The examples that may come before a question: all; all but the question; or none that is drawn, if there are more
    than two for each row that is."""
    rare: bool = False
    """True if only questions about subjects of few views count."""
    first_line: bool = False
    """True if an answer ends with its first line."""


NUMBERS_OF_DOCUMENTS = (50, 105, 220, 440, 1000)
NUMBERS_OF_PAIRS = (105, 220, 440, 900, 1800)
NUMBERS_OF_PASSAGES = (50, 130, 285, 600, 1000)
QUESTION = (
    "Use the given documents to write a concise and short answer to the question. Write your answer in the following "
    "format:\nAnswer: [answer]\n\n{demos}{context}\n\nQuestion: {question}"
)
RANKING = (
    "You are provided with a list of documents, each indicated by their ID. Rank each document based on their "
    "relevance to the question in descending order from most relelvant to least relevant texts. Include all documents "
    "in the rankings. Write your answer using the unique IDs, with the following format:\n"
    "Ranking: ID3 > ID1 > ID2\n\n{demos}{context}\n\nQuery: {question}"
)
"""The misspelling is the authors'."""
VALUE_OF_KEY = (
    "{context}\n\nExtract the value corresponding to the specified key in the JSON object below.\n\n"
    "{demos}Key: {question}"
)
ONE_NEEDLE = (
    "A special magic {type_needle_v} is hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {type_needle_v} afterwards.\n{context}\n"
    "What is the special magic {type_needle_v} for {query} mentioned in the provided text?"
)
ALL_NEEDLES = (
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will quiz "
    "you about the {type_needle_v} afterwards.\n{context}\n"
    "What are all the special magic {type_needle_v} for {query} mentioned in the provided text?"
)
NEEDLE_ANSWER = "The special magic {type_needle_v} for {query} mentioned in the provided text"


def _ruler(name: str, folder: str, user: str, verb: str, max_new_tokens: int) -> Task:
    file = f"ruler/{folder}/validation_{{size}}.jsonl"
    return Task(f"ruler_{name}", file, LENGTHS, forms.NEEDLES, user, f"{NEEDLE_ANSWER} {verb}", max_new_tokens)


def _kilt(name: str, rows: str, examples: str, depths: int) -> Task:
    return Task(
        f"kilt_{name}",
        f"kilt/{rows}_1000_k{{size}}_dep{depths}.jsonl",
        NUMBERS_OF_DOCUMENTS,
        forms.DOCUMENTS,
        QUESTION,
        "Answer:",
        20,
        f"kilt/{examples}_1000_k3_dep{depths}.jsonl",
        first_line=True,
    )


TASKS = (
    _ruler("niah_mk_2", "niah_multikey_2", ONE_NEEDLE, "is", 50),
    _ruler("niah_mk_3", "niah_multikey_3", ONE_NEEDLE, "is", 100),
    _ruler("niah_mv", "niah_multivalue", ALL_NEEDLES, "are", 50),
    Task(
        "json_kv",
        "json_kv/test_k{size}_dep6.jsonl",
        NUMBERS_OF_PAIRS,
        forms.PAIRS,
        VALUE_OF_KEY,
        "Corresponding value:",
        100,
    ),
    _kilt("nq", "nq-dev-multikilt", "nq-train-multikilt", 6),
    _kilt("triviaqa", "triviaqa-dev-multikilt", "triviaqa-train-multikilt", 6),
    _kilt("hotpotqa", "hotpotqa-dev-multikilt", "hotpotqa-train-multikilt", 3),
    _kilt("popqa_3", "popqa_test", "popqa_test", 6)._replace(examples_are="other questions", rare=True),
    Task(
        "msmarco_rerank_psg",
        "msmarco/test_reranking_data_k{size}_dep3.jsonl",
        NUMBERS_OF_PASSAGES,
        forms.PASSAGES,
        RANKING,
        "Ranking:",
        200,
        "msmarco/test_reranking_data_k10_dep3.jsonl",
        examples_are="not asked",
        first_line=True,
    ),
)
BY_NAME = {task.name: task for task in TASKS}
