"""External data for RULER's tasks, from the files that the original reads: words, essays and questions.

ringformer contains none of these data; it has words of its own, and a text that may take the place of the essays.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.evals.texts import shipped
from ringformer.evals.texts.words import ADJECTIVES, NOUNS
from ringformer.files.hashes import content_hash
from ringformer.files.json_text import parse_json
from ringformer.files.untrusted import check_readable

WORD_LISTS = ("adjectivelist.txt", "nounlist.txt", "verblist.txt")
"""Files of the package wonderwords, in its folder `assets`."""
SHIPPED = "shipped"
"""Instead of a file of essays: the text that ringformer ships."""


class Words(NamedTuple):
    """Words for keys, ADJECTIVE-NOUN, and for the lists of `cwe`."""

    keys: tuple[Sequence[str], Sequence[str]]
    """Adjectives and nouns of keys."""
    listed: Sequence[str]
    """Distinct words for lists, sorted."""
    pairs: tuple[Sequence[str], Sequence[str]]
    """Adjectives and nouns of the pairs that replace `listed` if a list needs more words."""


class Question(NamedTuple):
    """A question about documents."""

    text: str
    answers: Sequence[str]
    """Accepted answers; any one is correct."""
    documents: Sequence[str]
    """Documents with the answer."""
    related: Sequence[str]
    """Documents to show together with `documents`, before any others."""


class Questions(NamedTuple):
    """Questions about documents, which are distinct and sorted."""

    questions: Sequence[Question]
    documents: Sequence[str]


NO_QUESTIONS = Questions([], [])


def own_words() -> Words:
    """Return ringformer's words. No word of `listed` or of the pairs is part of another, so a match in an answer is
    unambiguous: able-arm does not occur in stable-army."""
    words = {*ADJECTIVES, *NOUNS}
    separate = set()
    for word in words:
        if sum(word in other for other in words) == 1:  # in itself
            separate.add(word)
    adjectives = [word for word in ADJECTIVES if word in separate]
    nouns = [word for word in NOUNS if word in separate]
    return Words((ADJECTIVES, NOUNS), sorted(separate), (adjectives, nouns))


def read_words(folder: str | Path) -> Words:
    """Read the words of `WORD_LISTS` in a folder, one per line, as the original does."""
    adjectives, nouns, verbs = map(_lines, _word_lists(folder))
    return Words((adjectives, nouns), sorted({*adjectives, *nouns, *verbs}), (adjectives, nouns))


def _word_lists(folder: str | Path) -> list[Path]:
    return [Path(folder) / name for name in WORD_LISTS]


def read_essays(path: str | Path) -> list[str]:
    """Read the words of a text file, of a JSON object's "text" as in the original's PaulGrahamEssays.json, or of the
    text that ringformer ships."""
    if path == SHIPPED:
        return shipped.read_text().split()
    if Path(path).suffix == ".json":
        words = _parse(path, lambda essays: essays["text"].split(), 'an object with a "text"')
    else:
        words = _text(path).split()
    if not words:
        raise ValueError(f"{path} has no words")
    return words


def sentences(text: str) -> list[str]:
    """Split a text into sentences. A sentence ends after a full stop, question mark or exclamation mark, including any
    quotation mark or bracket that follows it."""
    return re.split(r"(?<=[.?!]) +|(?<=[.?!][\"')\]]) +", text)


def read_squad(path: str | Path) -> Questions:
    """Read the answerable questions of SQuAD 2.0, dev-v2.0.json."""

    def read(squad: dict[str, Any], questions: list[Question]) -> Iterator[str]:
        for article in squad["data"]:
            texts = [paragraph["context"] for paragraph in article["paragraphs"]]
            yield from texts
            for text, paragraph in zip(texts, article["paragraphs"], strict=True):
                related = [other for other in texts if other != text]
                for asked in paragraph["qas"]:
                    if not asked["is_impossible"]:
                        answers = [answer["text"] for answer in asked["answers"]]
                        questions.append(Question(asked["question"], answers, [text], related))

    return _read_questions(path, read, "SQuAD 2.0, as dev-v2.0.json")


def read_hotpotqa(path: str | Path) -> Questions:
    """Read the questions of HotpotQA, hotpot_dev_distractor_v1.json."""

    def read(rows: list[dict[str, Any]], questions: list[Question]) -> Iterator[str]:
        for row in rows:
            texts = [f"{title}\n{''.join(lines)}" for title, lines in row["context"]]
            yield from texts
            questions.append(Question(row["question"], [row["answer"]], texts, []))

    return _read_questions(path, read, "HotpotQA, as hotpot_dev_distractor_v1.json")


def _read_questions(path: str | Path, read: Callable[[Any, list[Question]], Iterator[str]], name: str) -> Questions:
    """Read JSON with `read`, which yields the documents and appends the questions to a list."""
    questions: list[Question] = []
    documents = _parse(path, lambda content: sorted(set(read(content, questions))), name)
    if not (questions and all(question.answers for question in questions)):
        raise ValueError(f"{path} is not {name}: it has no questions, or one without an answer")
    return Questions(questions, documents)


class Data(NamedTuple):
    """Data of the tasks; a field is empty if no file was given for it."""

    words: Words
    essays: Sequence[str]
    squad: Questions
    hotpotqa: Questions
    settings: dict[str, str | None]
    """Hash of the content of each file or folder, by its option; None if it was not given. These hashes are part of the
    settings in a file of cases."""


def read_data(
    words: str | None = None, essays: str | None = None, squad: str | None = None, hotpotqa: str | None = None
) -> Data:
    """Read the data of the tasks.

    Args:
      words: the folder of `WORD_LISTS`; None: ringformer's own words.
      essays, squad, hotpotqa: files; None if no task needs the file. essays may be `SHIPPED`.
    """
    paths = {"words": words, "essays": essays, "squad": squad, "hotpotqa": hotpotqa}
    hashes: dict[str, str | None] = dict.fromkeys(paths)
    for name, path in paths.items():
        if (name, path) == ("essays", SHIPPED):
            hashes[name] = shipped.SHA256
        elif path:
            files = _word_lists(path) if name == "words" else [path]
            hashes[name] = content_hash(b"".join(map(_bytes, files)))
    return Data(
        read_words(words) if words else own_words(),
        read_essays(essays) if essays else [],
        read_squad(squad) if squad else NO_QUESTIONS,
        read_hotpotqa(hotpotqa) if hotpotqa else NO_QUESTIONS,
        hashes,
    )


def _bytes(path: str | Path) -> bytes:
    try:
        check_readable(path)
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def _text(path: str | Path) -> str:
    try:
        return _bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None


def _lines(path: Path) -> list[str]:
    """Return the distinct lines of a file that are not blank, in their order."""
    lines = map(str.strip, _text(path).splitlines())
    return list(dict.fromkeys(filter(None, lines)))


def _parse(path: str | Path, read: Callable[[Any], Any], name: str) -> Any:
    """Read a file of JSON with `read`. Raises ValueError, which names the expected format, for a different format."""
    text = _text(path)
    try:
        return read(parse_json(text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not {name}: {error!r}") from None
