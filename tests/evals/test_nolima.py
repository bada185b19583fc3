"""Needles without a literal match: a reader who knows the world finds them, one who compares words does not."""

import re

import pytest

from ringformer.evals.needle import Haystack
from ringformer.evals.nolima import associations as nolima

HAYSTACK = Haystack.load(None)
REGIONS = {pair.landmark: pair.region for pair in nolima.PAIRS}


def tokens(prompt):
    return len(prompt) // 4


def cases(length=4000, count=2, seed=0, direct=False, depths=(0, 50, 100), haystack=HAYSTACK):
    return list(nolima.cases_of_length(length, depths, count, seed, haystack, tokens, direct=direct))


def sentences(prompt):
    text, _, question = prompt.removeprefix(nolima.INTRODUCTION).rpartition(nolima.INSTRUCTION)
    return re.split(r"(?<=\.)\s", text), question.removesuffix(nolima.ANSWER)


def words(text):
    return set(re.findall(r"\w+", text.lower()))


def needle_of(prompt):
    (found,) = re.findall(r"Actually, (\w+) lives beside (.*)\.", prompt)
    return found


def test_a_reader_who_knows_the_world_finds_the_name():
    for case in cases():
        name, landmark = needle_of(case.prompt)
        asked = re.search(r"Which character has been in (.*)\?", case.prompt)[1]
        assert REGIONS[landmark] == asked == case.labels["region"] and case.expected == (name,)
        assert nolima.score(case, f" {name}.") == 1 and nolima.score(case, "Ishmael") == 0


@pytest.mark.parametrize("direct", [False, True])
def test_a_reader_of_words_does_not_find_it(direct):
    """No word of the question is in the needle, and none of its own words in the text; with `direct`, all are: the
    control."""
    for case in cases(direct=direct):
        _, question = sentences(case.prompt)
        name, landmark = needle_of(case.prompt)
        shared = words(question) & words(f"Actually, {name} lives beside {landmark}.")
        assert shared >= words(f"lives beside {landmark}") if direct else not shared
        if not direct:
            text = case.prompt.rpartition(nolima.INSTRUCTION)[0]
            region = case.labels["region"]
            assert not re.search(rf"\b{region}\b", text, re.IGNORECASE)


def test_both_questions_are_about_the_same_needles():
    for plain, direct in zip(cases(), cases(direct=True), strict=True):
        assert needle_of(plain.prompt) == needle_of(direct.prompt) and plain.expected == direct.expected


@pytest.mark.parametrize("depth", [0, 30, 100])
def test_a_needle_is_at_its_depth_and_the_context_is_full(depth):
    for case in cases(length=9000, depths=(depth,)):
        text = case.prompt.removeprefix(nolima.INTRODUCTION).rpartition(nolima.INSTRUCTION)[0]
        assert abs(text.index("Actually, ") / len(text) - depth / 100) < 0.03
        assert 9000 - nolima.MAX_NEW_TOKENS - 20 < tokens(case.prompt) <= 9000 - nolima.MAX_NEW_TOKENS


def test_pairs_and_names_of_the_text_are_not_used(tmp_path):
    pairs, names = nolima.usable(HAYSTACK)
    assert {"Rome", "London"}.isdisjoint(pair.region for pair in pairs) and len(pairs) >= 12 and len(names) >= 20
    path = tmp_path / "all.txt"
    path.write_text(". ".join([*(pair.region for pair in nolima.PAIRS[7:]), "The end."]))
    with pytest.raises(ValueError, match="has the words of nearly all needles: 7 of 30 pairs and 24 of 24 names"):
        nolima.usable(Haystack.load(path))


def test_the_pairs_are_distinct():
    """A landmark has one region; no name is part of another, nor of a landmark."""
    assert len(REGIONS) == len(nolima.PAIRS) and len(set(nolima.NAMES)) == len(nolima.NAMES)
    everything = " ".join([*REGIONS, *REGIONS.values()])
    for name in nolima.NAMES:
        assert name not in everything
        assert not [other for other in nolima.NAMES if other != name and name in other]
    for pair in nolima.PAIRS:
        assert words(pair.landmark).isdisjoint(words(nolima.QUESTION.format(region=pair.region)))
