"""Windows, against the definition written for every token."""

import pytest

from ringformer.evals.perplexity import sliding
from tests.evals.perplexity.stores import BOS, LENGTHS, make_documents


@pytest.mark.parametrize("begin", [[], [BOS]], ids=["", "BOS"])
@pytest.mark.parametrize("tokens", [None, 31, 99])
@pytest.mark.parametrize(("length", "stride"), [(8, 3), (8, 7), (20, 1), (41, 5), (30, 12)])
def test_every_token_counts_once_with_the_longest_window_that_has_it(length, stride, tokens, begin):
    """A token's context begins at the least multiple of the stride from which a window reaches the token."""
    documents, room = make_documents(begin=begin), length - len(begin)
    for document in (1, 3):
        total = min((tokens or 10**9) - len(begin), LENGTHS[document])
        context = {}
        for window in sliding.windows(documents, document, length, stride, tokens):
            assert len(window.tokens) <= length and window.tokens[: len(begin)].tolist() == begin
            for i, (token, counts) in enumerate(zip(window.tokens.tolist(), window.counted.tolist(), strict=True)):
                if counts and i:
                    assert token % 1000 not in context, "counts once"
                    context[token % 1000] = token % 1000 - (i - len(begin))
        expected = {}
        for token in range(0 if begin else 1, total):
            start = 0
            while token >= start + room:
                start += stride
            if token > start or begin:
                expected[token] = start
        assert context == expected


@pytest.mark.parametrize("begin", [[], [BOS]], ids=["", "BOS"])
def test_as_many_tokens_as_a_window_are_one_window(begin):
    (window,) = sliding.windows(make_documents(begin=begin), 3, 20, 4, 20)
    assert len(window.tokens) == 20 and window.counted.sum() == 20 - len(begin)


def test_windows_without_a_counted_token_are_not_read():
    documents = make_documents(mask=True)
    documents.store.mask[:] = 0
    documents.store.mask[documents.store.offsets[3] + 50] = 1
    windows = list(sliding.windows(documents, 3, 8, 4, None))
    assert [(window.start, window.counted.sum()) for window in windows] == [(44, 1)]
    assert windows[0].tokens.tolist() == list(range(3044, 3052))


@pytest.mark.parametrize(
    ("stride", "tokens", "message"),
    [
        (0, None, "--stride=0 must be 1 to 7, the tokens of a document in the shortest window"),
        (8, None, "--stride=8 must be 1 to 7"),
        (4, 15, "--tokens=15 is less than the longest of --lengths, 16: raise it"),
    ],
)
def test_what_cannot_be_is_refused(stride, tokens, message):
    with pytest.raises(ValueError, match=message):
        sliding.check([8, 16], stride, [BOS], tokens)
    sliding.check([8, 16], 7, [BOS], 16)
