"""Needles: where they stand, by brute force; and what a model that finds them here and not there makes of the map."""

import hashlib
import re
from pathlib import Path

import pytest

from ringformer.evals import needle
from ringformer.evals.cases import Case
from ringformer.evals.texts import shipped
from ringformer.evals.texts.words import CITIES

NEEDLE = re.compile(r"\nThe special magic (\w+) number is: (\d{7})\n")


def tokens(prompt):
    return len(prompt) // 4


def haystack_of(prompt):
    """The text without its needles, and where in it each stood."""
    text = prompt[len(needle.INTRODUCTION) : prompt.rindex("\n\nWhat ")]
    places, without = {}, ""
    end = 0
    for found in NEEDLE.finditer(text):
        without += text[end : found.start()]
        places[found[1]] = len(without)
        end = found.end()
    return without + text[end:], places


@pytest.mark.parametrize(
    "text",
    [
        "One. Two is 3.14 long. Three!\nFour. And more",
        "No stop but the last.",
        ".A. B .",
        "a.b.c d. e",
    ],
)
def test_a_needle_stands_behind_the_full_stop_before_its_depth(text):
    """Brute force: every place that is 0, or has a full stop before it and white space or the end behind it."""
    allowed = [i for i in range(1, len(text) + 1) if text[i - 1] == "." and (i == len(text) or text[i].isspace())]
    assert needle.full_stops(text) == allowed
    for percent in range(0, 101):
        here = max([i for i in [0, *allowed] if i * 100 <= percent * len(text)])
        assert needle.place(needle.full_stops(text), len(text), percent) == here


@pytest.mark.parametrize("hidden", [(1, 1), (5, 2), (20, 20)])
def test_a_case_hides_its_needles_in_the_whole_haystack(hidden):
    hay, count = needle.Haystack.load(None), needle.Needles(*hidden)
    depths = [0.0, 33.0, 100.0]
    room = 3000 - 32 * count.asked
    for case in needle.cases_of_length(3000, depths, 2, 0, count, hay, tokens):
        text, places = haystack_of(case.prompt)
        assert text == hay.text(len(re.findall(r"\S+\s*", text)))
        assert room - 8 < tokens(case.prompt) <= room
        numbers = dict(NEEDLE.findall(case.prompt))
        assert len(numbers) == len(set(numbers.values())) == count.hidden and set(numbers) <= set(CITIES)
        asked = re.findall(
            r"[A-Z]\w+", case.prompt[case.prompt.rindex("\n\nWhat ") :].replace("What", "").replace("Answer", "")
        )
        assert [numbers[city] for city in asked] == list(case.expected) and len(asked) == count.asked
        stops = [0, *(i + 1 for i, c in enumerate(text) if c == "." and (i + 1 == len(text) or text[i + 1].isspace()))]
        expected = max(i for i in stops if i <= case.labels["depth"] / 100 * len(text))
        assert expected in [places[city] for city in asked]


def test_cases_are_the_seed_s_and_differ():
    hay = needle.Haystack.load(None)
    first, again, other = (
        list(needle.cases_of_length(1000, [50.0], 3, seed, needle.Needles(), hay, tokens)) for seed in (0, 0, 1)
    )
    assert first == again and first[0] != other[0]
    assert len({case.expected for case in first}) == 3


def test_the_share_of_the_asked_numbers_counts():
    case = Case(100, 0, "", ("1234567", "7654321"), 64, {})
    for answer, share in (("1234567 and 7654321", 1), ("7654321.", 0.5), ("12345677654321", 1), ("", 0), ("123", 0)):
        assert needle.score(case, answer) == share


def test_a_haystack_of_one_s_own(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("Eins 1234567. Zwei.\n\nDrei.", encoding="utf-8")
    hay = needle.Haystack.load(path)
    assert hay.name == "mine.txt" and hay.text(6) == "Eins 1234567. Zwei.\n\nDrei.\nEins 1234567. "
    path.write_bytes(b"\xff\xfe.")
    with pytest.raises(ValueError, match="is not UTF-8"):
        needle.Haystack.load(path)
    path.write_text("no sentence here")
    with pytest.raises(ValueError, match="has no full stop"):
        needle.Haystack.load(path)


def test_the_shipped_text_is_the_named_one():
    """Every byte of it: by its published hash; no table of contents, and nobody's notice of a licence."""
    text = shipped.read_text()
    assert hashlib.sha256(text.encode()).hexdigest() == shipped.SHA256 and len(text) == 996_439
    assert re.findall(r"^CHAPTER (\d+)\. ", text, re.MULTILINE) == [str(i) for i in range(1, 110)]
    assert text.startswith("CHAPTER 1. Loomings.\n\nCall me Ishmael. Some years ago") and "Gutenberg" not in text
    assert needle.Haystack.load(None).text(10**5) == text[: len(needle.Haystack.load(None).text(10**5))]
    assert Path(shipped.__file__).with_name("moby_dick.txt.bz2").stat().st_size < 300_000


def test_a_repeated_text_is_called_so(tmp_path):
    """From the first word that was there before, and in the table; not one word earlier."""
    path = tmp_path / "mine.txt"
    path.write_text("One. " * 100)
    hay = needle.Haystack.load(path)
    cases = [
        case
        for length in range(150, 240)
        for case in needle.cases_of_length(length, [0.0], 1, 0, needle.Needles(), hay, tokens)
    ]
    for case in cases:
        assert case.labels["repeats"] == (haystack_of(case.prompt)[0].count("One.") - 1) // 100
    rows = [{"length": case.length, "score": 1.0, **case.labels} for case in cases]
    repeated = [str(row["length"]) for row in rows if row["repeats"]]
    assert 10 < len(repeated) < 80
    assert needle.table(rows).splitlines()[-1] == f"the text is repeated in contexts of {', '.join(repeated)} tokens"
    assert "repeated" not in needle.table(rows[:3])


def test_no_number_is_one_of_the_haystack(tmp_path, monkeypatch):
    """The draw is narrowed to two numbers, of which the text has one."""
    path = tmp_path / "mine.txt"
    path.write_text("1000000. a.")
    monkeypatch.setattr("random.Random.randrange", lambda self, low, high: low + (self.random() < 0.5))
    hay = needle.Haystack.load(path)
    found = needle.cases_of_length(300, [50.0], 20, 0, needle.Needles(), hay, tokens)
    assert {case.expected for case in found} == {("1000001",)}


@pytest.mark.parametrize(
    ("needles", "depths", "said"),
    [
        ((1, 2), [0], "2 of 1 needles"),
        ((0, 0), [0], "0 of 0 needles"),
        ((1000, 1), [0], "1 of 1000 needles"),
        ((1, 1), [101.0], "101 is not a percentage"),
        ((1, 1), [-1.0], "-1 is not a percentage"),
    ],
)
def test_what_cannot_be_is_refused(needles, depths, said):
    with pytest.raises(ValueError, match=said):
        needle.check(needle.Needles(*needles), depths)
