"""Answers of the questions are true of the document, by counting anew; questions depend on its content alone."""

import re
from collections import Counter

from ringformer.data.sources.retrieval_tasks import add_tasks
from tests.data.sources.test_compressibility import WORDS

TEXT = " ".join(
    f"{WORDS[i % 17].capitalize()} number {i} and {' '.join(WORDS[i % 5 : i % 5 + 6])} again." for i in range(80)
)


def test_answers_are_true():
    text, counts = add_tasks(TEXT, 12, bytes(range(16)))
    assert text.startswith(TEXT + "\n\nQuestion: ")
    questions = text[len(TEXT) :].split("\n\nQuestion: ")[1:]
    assert len(questions) == 12
    counted = continued = 0
    words = Counter(re.sub(r"[^a-z]", " ", TEXT.lower()).split())
    for question in questions:
        asked, _, answer = question.partition("\nAnswer: ")
        if match := re.fullmatch(
            r"How often does each of these words occur in the text above: (\w+), (\w+), (\w+)\?", asked
        ):
            assert answer == ", ".join(f"{word} {words[word]}" for word in match.groups())
            assert len(set(match.groups())) == 3
            counted += 1
        else:
            sentence = re.fullmatch(r"Which sentence of the text above follows this one: (.*)", asked)[1]
            assert TEXT.count(f"{sentence} {answer}") == TEXT.count(sentence) == 1
            continued += 1
    assert counted == counts["retrieval tasks added: words counted"] == 6
    assert continued == counts["retrieval tasks added: sentences continued"] == 6
    assert len(set(questions)) > 10


def test_the_digest_decides():
    assert add_tasks(TEXT, 4, b"a" * 16) == add_tasks(TEXT, 4, b"a" * 16) != add_tasks(TEXT, 4, b"b" * 16)


def test_a_short_document_stays_as_it_is():
    text, counts = add_tasks("Too short.", 2, bytes(16))
    assert text == "Too short."
    assert counts == {"retrieval tasks left out: the document has too few words or sentences for them": 2}


def test_words_are_those_of_the_text():
    """As written, but for capitals: no Strasse for Straße, no couldn of couldn't. Other marks end sentences."""
    text = "Die Straße, der Gruß und die STRASSE: ich couldn't, I couldn’t. " * 3 + "Straße, Gruß, maße. " * 2
    asked = add_tasks(text, 20, bytes(16))[0][len(text) :]
    assert "strasse" in asked and "straße" in asked and "couldn't" in asked
    assert not re.search(r"\bcouldn\b(?!['’])", asked)
    japanese = "".join(f"これはリングの{i}番目の文で、キーと値を運びます。" for i in range(9))
    _, counts = add_tasks(japanese, 2, bytes(16))
    assert counts["retrieval tasks added: sentences continued"] == 1
