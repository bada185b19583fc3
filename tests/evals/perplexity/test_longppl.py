"""Key tokens, by the rule written for every token."""

import math

import numpy as np
import pytest

from ringformer.evals.perplexity.longppl import KEY, KeyTokens, part


def loss(token, before):
    """A loss that depends on the tokens before: those that a short context lacks may lower it, or raise it."""
    return 0.3 + sum(((7 * token + 3 * other + i) % 11 - 4) / 9 for i, other in enumerate(reversed(before))) % 5


def token_losses(rows):
    return [np.array([loss(row[i], row[:i]) for i in range(1, len(row))], np.float32) for row in rows]


@pytest.mark.parametrize(("short", "stride"), [(4, 3), (4, 1), (1, 5), (9, 100), (12, 4)])
def test_key_tokens_are_those_of_the_rule(short, stride):
    """Long-short difference above alpha, likelihood above beta; short contexts begin at multiples of the stride."""
    texts = [[(5 * i * i + j) % 23 for i in range(30 + j)] for j in range(3)]
    rule = KeyTokens(alpha=0.5, beta=-2.0, short=short, stride=stride)
    masks = rule.masks(token_losses, texts, token_losses(texts))
    for text, mask in zip(texts, masks, strict=True):
        expected = []
        for i in range(short, len(text)):
            begin = (i - short) // stride * stride
            long_log_p, short_log_p = -loss(text[i], text[:i]), -loss(text[i], text[begin:i])
            expected.append(long_log_p - short_log_p > 0.5 and long_log_p > -2.0)
        assert mask.tolist() == expected and (short == 9 or 0 < sum(expected) < len(expected))


def test_the_defaults_are_the_paper_s():
    assert KeyTokens() == (2.0, -2.0, 4096, 1024)


@pytest.mark.parametrize("tokens", [5, 3, 2])
def test_masks_end_at_the_same_token(tokens):
    """A mask of the evaluator's last three tokens, for a model that reads more or fewer of them."""
    mask = part(np.array([True, False, True]), tokens)[KEY]
    assert mask.tolist() == [False, False, True, False, True][-tokens:]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (KeyTokens(short=0), "--short=0 and --stride=1024 must be at least 1"),
        (KeyTokens(stride=0), "--short=4096 and --stride=0 must be at least 1"),
        (KeyTokens(alpha=math.nan), "--alpha=nan and --beta=-2 must be finite"),
        (KeyTokens(beta=math.inf), "--alpha=2 and --beta=inf must be finite"),
        (KeyTokens(short=99), "a context of 100 tokens has no token after a short context of 99: ask for longer ones"),
    ],
)
def test_what_cannot_be_is_refused(rule, message):
    with pytest.raises(ValueError, match=message):
        rule.check([100, 200])
    KeyTokens(short=98).check([100, 200])
