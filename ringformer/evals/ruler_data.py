"""External data for RULER's tasks, from the files that the original reads: words, essays, questions.

ringformer contains none of it, only words of its own.
"""

import hashlib
import json
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.evals.words import ADJECTIVES, NOUNS

WORD_LISTS = ("adjectivelist.txt", "nounlist.txt", "verblist.txt")
"""Files of the package wonderwords, in its folder `assets`."""


class Words(NamedTuple):
    """Words for keys, ADJECTIVE-NOUN, and for the lists of `cwe`."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    listed: tuple[str, ...]
    """Distinct words for lists."""
    adjectives_of_pairs: tuple[str, ...]
    nouns_of_pairs: tuple[str, ...]
    """Parts of the pairs that replace `listed` for lists that need more words."""


class Question(NamedTuple):
    """A question about documents."""

    text: str
    answers: tuple[str, ...]
    """Accepted answers; any one is correct."""
    documents: tuple[int, ...]
    """Documents with the answer."""
    related: tuple[int, ...]
    """Documents to show beside them before any others."""


class Questions(NamedTuple):
    """Questions about documents, which are distinct and sorted."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]


def own_words() -> Words:
    """Return ringformer's words. No word of `listed` or of the pairs is part of another, so a match in an answer is
    unambiguous: able-arm does not occur in stable-army."""
    words = [*ADJECTIVES, *(set(NOUNS) - set(ADJECTIVES))]
    listed = tuple(sorted(word for word in words if not any(word in other for other in words if other != word)))
    singles = frozenset(listed)
    adjectives, nouns = (tuple(word for word in own if word in singles) for own in (ADJECTIVES, NOUNS))
    return Words(ADJECTIVES, NOUNS, listed, adjectives, nouns)


def read_words(folder: str | Path) -> Words:
    """Read the words of `WORD_LISTS` in a folder, one per line, as the original does."""
    adjectives, nouns, verbs = (
        tuple(dict.fromkeys(line.strip() for line in _text(Path(folder) / name).splitlines() if line.strip()))
        for name in WORD_LISTS
    )
    return Words(adjectives, nouns, tuple(sorted({*adjectives, *nouns, *verbs})), adjectives, nouns)


def read_essays(path: str | Path) -> tuple[str, ...]:
    """Read the words of a text file, or of a JSON object's "text" as in the original's PaulGrahamEssays.json."""
    text = _text(path)
    if Path(path).suffix == ".json":
        text = _checked(path, text, lambda essays: essays["text"], 'an object with a "text"')
    if not (words := tuple(text.split())):
        raise ValueError(f"{path} has no words")
    return words


def sentences(text: str) -> list[str]:
    """Split a text into sentences, which end after a full stop, question mark or exclamation mark and any quotation
    mark or bracket that follows it."""
    return re.split(r"(?<=[.?!]) +|(?<=[.?!][\"')\]]) +", text)


def read_squad(path: str | Path) -> Questions:
    """Read the answerable questions of SQuAD 2.0, dev-v2.0.json."""

    def read(squad: dict[str, Any]) -> Questions:
        articles = [article["paragraphs"] for article in squad["data"]]
        documents = _sorted(paragraph["context"] for paragraphs in articles for paragraph in paragraphs)
        number = {text: i for i, text in enumerate(documents)}
        questions = []
        for paragraphs in articles:
            beside = [number[paragraph["context"]] for paragraph in paragraphs]
            for own, paragraph in zip(beside, paragraphs, strict=True):
                related = tuple(i for i in beside if i != own)
                questions += [
                    Question(asked["question"], tuple(answer["text"] for answer in asked["answers"]), (own,), related)
                    for asked in paragraph["qas"]
                    if not asked["is_impossible"]
                ]
        return Questions(tuple(questions), documents)

    return _checked(path, _text(path), read, "SQuAD 2.0, as dev-v2.0.json")


def read_hotpotqa(path: str | Path) -> Questions:
    """Read the questions of HotpotQA, hotpot_dev_distractor_v1.json."""

    def read(rows: list[dict[str, Any]]) -> Questions:
        texts = [[f"{title}\n{''.join(lines)}" for title, lines in row["context"]] for row in rows]
        documents = _sorted(text for own in texts for text in own)
        number = {text: i for i, text in enumerate(documents)}
        questions = [
            Question(row["question"], (row["answer"],), tuple(number[text] for text in own), ())
            for row, own in zip(rows, texts, strict=True)
        ]
        return Questions(tuple(questions), documents)

    return _checked(path, _text(path), read, "HotpotQA, as hotpot_dev_distractor_v1.json")


class Data:
    """Data of the tasks; each file is read when it is first needed.

    Args:
      words: the folder of `WORD_LISTS`; None: ringformer's own words.
      essays, squad, hotpotqa: files; None where no task needs it.
    """

    def __init__(
        self,
        words: str | None = None,
        essays: str | None = None,
        squad: str | None = None,
        hotpotqa: str | None = None,
    ):
        self.paths = {"words": words, "essays": essays, "squad": squad, "hotpotqa": hotpotqa}

    @cached_property
    def words(self) -> Words:
        return read_words(self.paths["words"]) if self.paths["words"] else own_words()

    @cached_property
    def essays(self) -> tuple[str, ...]:
        return read_essays(self._named("essays"))

    @cached_property
    def squad(self) -> Questions:
        return read_squad(self._named("squad"))

    @cached_property
    def hotpotqa(self) -> Questions:
        return read_hotpotqa(self._named("hotpotqa"))

    def _named(self, name: str) -> str:
        if (path := self.paths[name]) is None:
            raise ValueError(f"--{name} is not given")
        return path

    def settings(self) -> dict[str, str | None]:
        """Hash the content of each file, for the settings in a file of cases."""
        hashes: dict[str, str | None] = {}
        for name, path in self.paths.items():
            files = [Path(path) / each for each in WORD_LISTS] if path and name == "words" else [path] if path else []
            content = b"".join(_bytes(file) for file in files)
            hashes[name] = hashlib.blake2b(content, digest_size=16).hexdigest() if files else None
        return hashes


def _sorted(texts) -> tuple[str, ...]:
    return tuple(sorted(set(texts)))


def _bytes(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _text(path: str | Path) -> str:
    try:
        return _bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None


def _checked(path: str | Path, text: str, read: Callable[[Any], Any], name: str) -> Any:
    """Parse JSON with `read`. Raises ValueError, naming the expected format, if the text has a different format."""
    try:
        data = read(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not {name}: {error!r}") from None
    if isinstance(data, Questions) and not (data.questions and all(each.answers for each in data.questions)):
        raise ValueError(f"{path} is not {name}: it has no questions, or one without an answer")
    return data
