"""Intervals: Wilson's by its definition, the bootstrap by enumeration, by a closed form and by its coverage."""

import itertools

import numpy as np
import pytest

from ringformer.evals.intervals import bootstrap, wilson
from ringformer.evals.tables import accuracy_interval, interval_of_questions


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        (50, 50, 0.9287, 1.0),
        (0, 50, 0.0, 0.0713),
        (45, 50, 0.7864, 0.9565),
        (25, 50, 0.3664, 0.6336),
        (1, 1, 0.2065, 1.0),
        (0, 1, 0, 0.7935),
    ],
)
def test_wilson_s_interval(right, count, low, high):
    """As its definition has it: the shares p with |right / count - p| = 1.96 * sqrt(p (1 - p) / count)."""
    ends = wilson(right / count, count)
    assert ends == pytest.approx((low, high), abs=1e-4)
    for p in ends:
        if 0 < p < 1:
            assert abs(right / count - p) == pytest.approx(1.959964 * (p * (1 - p) / count) ** 0.5, abs=1e-6)


def test_the_bootstrap_has_the_percentiles_of_all_samples():
    """All 4^4 samples of four documents, of unequal numbers of items."""
    totals, counts = [3.0, 1.0, 8.0, 2.0], [2, 1, 3, 4]
    samples = [list(sample) for sample in itertools.product(range(4), repeat=4)]
    means = [sum(totals[i] for i in s) / sum(counts[i] for i in s) for s in samples]
    assert bootstrap(totals, counts, 100_000) == pytest.approx(np.percentile(means, (2.5, 97.5)), abs=0.02)
    assert bootstrap(totals, counts) == bootstrap(totals, counts), "the draws are always the same"


def test_many_documents_have_the_interval_of_a_normal_distribution():
    """1.96 standard errors of the mean of documents, by the closed form; of documents of one right or wrong item that
    is Wilson's, up to terms of 1 / documents."""
    values = np.random.default_rng(1).normal(3, 2, 400)
    half = 1.96 * values.std() / 20
    assert bootstrap(values, [1] * 400) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.03)
    right = [1] * 280 + [0] * 120
    assert bootstrap(right, [1] * 400) == pytest.approx(wilson(0.7, 400), abs=0.006)


def test_documents_without_items_are_no_zeros():
    low, high = bootstrap([0.0, 2.0, 0.0], [0, 1, 0])
    assert low == high == 2


def test_one_document_is_refused():
    with pytest.raises(ValueError, match="at least two documents"):
        bootstrap([1.0], [4])


def simulated(rng, documents, questions, spread):
    """Scores of questions whose document has a share of its own around 0.7: the more `spread`, the more alike."""
    shares = rng.beta(0.7 / spread, 0.3 / spread, documents)
    return (rng.random((documents, questions)) < shares[:, None]).astype(float)


def test_the_interval_covers_the_truth_where_questions_are_alike():
    """In 95 of 100 experiments or nearly: thirty documents are few. Wilson's, as if all were independent, does not."""
    rng, covered, naive = np.random.default_rng(2), 0, 0
    for _ in range(300):
        scores = simulated(rng, 30, 20, spread=0.5)
        low, high = bootstrap(scores.sum(axis=1), [20] * 30, 500)
        covered += low <= 0.7 <= high
        low, high = wilson(scores.mean(), scores.size)
        naive += low <= 0.7 <= high
    assert 0.89 < covered / 300 < 0.985 and naive / 300 < 0.6


def rows_of(scores):
    return [{"index": i, "question": j, "score": x} for i, row in enumerate(scores) for j, x in enumerate(row)]


def test_accuracies_have_the_interval_that_fits_their_cases():
    rng = np.random.default_rng(3)
    alike, unlike = simulated(rng, 40, 20, spread=2.0), simulated(rng, 40, 20, spread=1e-4)
    widths = [np.diff(accuracy_interval(rows_of(scores)))[0] for scores in (alike, unlike)]
    independent = [np.diff(wilson(scores.mean(), scores.size))[0] for scores in (alike, unlike)]
    assert widths[0] > 2 * independent[0] and widths[1] == pytest.approx(independent[1], rel=0.25)
    assert accuracy_interval(rows_of([[1], [0], [1]])) == wilson(2 / 3, 3), "one question each: independent cases"
    assert accuracy_interval(rows_of([[1] * 9] * 4)) == wilson(1, 4), "all alike: as many cases as documents"
    assert accuracy_interval(rows_of([[1, 0, 0, 1]])) == wilson(0.5, 1), "one document is one case"
    assert interval_of_questions(rows_of([[1, 0.5, 0]])) == wilson(0.5, 1), "one question with several scores, too"
    assert accuracy_interval(rows_of([[1, 1], [1, 0]])) == bootstrap([2, 1], [2, 2])
