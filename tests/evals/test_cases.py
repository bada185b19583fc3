"""The search for the longest prompt that fits, against trying all."""

import random

import pytest

from ringformer.evals.cases import largest_that_fits, seeded
from ringformer.evals.texts.words import ADJECTIVES, CITIES, NOUNS


@pytest.mark.parametrize("guess", [None, 1, 2, 40, 99, 100, 101, 400])
def test_the_largest_that_fits_is_the_last_before_one_that_does_not(guess):
    for seed in range(20):
        rng = random.Random(seed)
        sizes = [0]
        for _ in range(500):
            sizes.append(sizes[-1] + rng.randint(1, 9))
        limit = rng.randint(sizes[1], sizes[-2])
        expected = max(i for i in range(1, 500) if sizes[i] <= limit)
        asked = []

        def tokens(parts, sizes=sizes, asked=asked):
            asked.append(parts)
            return sizes[parts] if parts < len(sizes) else sizes[-1] + parts

        assert largest_that_fits(tokens, limit, 1, guess) == expected
        assert len(asked) < 24


def test_a_good_guess_asks_little():
    asked = []
    assert largest_that_fits(lambda n: asked.append(n) or n, 1000, 1, 1000) == 1000
    assert len(asked) <= 3


def test_nothing_fits():
    with pytest.raises(ValueError, match="the shortest prompt has 7 tokens, but 6 fit"):
        largest_that_fits(lambda n: n, 6, 7)


def test_seeds_are_of_their_parts():
    """Neither of how they are written together, nor of the process's hash seed."""
    assert seeded("a", 1, 2).random() == seeded("a", 1, 2).random() != seeded("a", 12).random()
    assert seeded("lines", 0).random() == pytest.approx(PINNED, abs=1e-15)


PINNED = 0.014578919526921474


def test_words_are_distinct():
    words = [*ADJECTIVES, *NOUNS]
    assert len(set(words)) == len(words) and all(word.isalpha() and word.islower() for word in words)
    assert len(ADJECTIVES) * len(NOUNS) > 200_000
    assert len(set(CITIES)) == len(CITIES) > 100
    assert not [city for city in CITIES if any(city in other for other in CITIES if other != city)]
