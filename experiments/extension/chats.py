"""Chats whose answers can be checked: questions of common knowledge, and words that a right answer has."""

import json
import re
from pathlib import Path
from typing import NamedTuple


class Question(NamedTuple):
    """A question, and the words of which a right answer has one."""

    text: str
    right: tuple[str, ...]


QUESTIONS = (
    Question("What is the capital of France?", ("paris",)),
    Question("What is the capital of Japan?", ("tokyo",)),
    Question("What is the capital of Italy?", ("rome",)),
    Question("How many days are in a week?", ("seven", "7")),
    Question("How many months are in a year?", ("twelve", "12")),
    Question("What is 2 + 2?", ("four", "4")),
    Question("What is 10 minus 3?", ("seven", "7")),
    Question("What is 5 times 5?", ("twenty-five", "25")),
    Question("Which planet is known as the Red Planet?", ("mars",)),
    Question("Which is the largest planet of the solar system?", ("jupiter",)),
    Question("What is the chemical formula of water?", ("h2o", "h₂o")),
    Question("Which gas do plants take in from the air?", ("carbon", "co2", "co₂")),
    Question("Who wrote Romeo and Juliet?", ("shakespeare",)),
    Question("Which language is spoken in Brazil?", ("portuguese",)),
    Question("What color is the sky on a clear day?", ("blue",)),
    Question("What is the opposite of hot?", ("cold",)),
    Question("How many legs does a spider have?", ("eight", "8")),
    Question("Which animal is called man's best friend?", ("dog", "dogs")),
    Question("In which country are the pyramids of Giza?", ("egypt",)),
    Question("Who was the first president of the United States?", ("washington",)),
)
NEW_TOKENS = 64
"""Most tokens of an answer."""


def is_right(question: Question, answer: str) -> bool:
    """Return whether an answer has one of the right words, as a whole word."""
    words = re.findall(r"[\w-]+", answer.lower())
    return not set(question.right).isdisjoint(words)


def write_prompts(path: Path) -> None:
    """Write the file that `ringformer generate --prompts` reads."""
    path.write_text("".join(json.dumps({"prompt": question.text}) + "\n" for question in QUESTIONS))


def read_answers(path: Path) -> list[str]:
    """Return the answers of `ringformer generate --out`, in the order of the questions. Raises ValueError for a file of
    other questions."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if [row.get("prompt") for row in rows] != [question.text for question in QUESTIONS]:
        raise ValueError(f"{path} has answers to other questions: remove it")
    return [row["text"] for row in rows]
