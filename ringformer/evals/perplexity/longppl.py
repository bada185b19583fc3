"""LongPPL: perplexity of the tokens that a long context decides (Fang et al. 2024, arXiv:2410.23771, section 3)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ringformer.evals.perplexity.losses import TokenLosses

KEY = "key"
"""Name of the sums over key tokens."""


class KeyTokens(NamedTuple):
    """Rule for key tokens, by losses of an evaluator; its defaults are the paper's."""

    alpha: float = 2.0
    """Nats by which the long context must lower a key token's loss: the long-short difference."""
    beta: float = -2.0
    """log p, in nats, that a key token must exceed with the long context: the long-context likelihood."""
    short: int = 4096
    """Fewest tokens of a short context."""
    stride: int = 1024
    """Tokens that share the beginning of their short context."""

    def check(self, lengths: Sequence[int]) -> None:
        """Raise ValueError for a rule that no token can fulfil."""
        if self.short < 1 or self.stride < 1:
            raise ValueError(f"--short={self.short} and --stride={self.stride} must be at least 1")
        if not (math.isfinite(self.alpha) and math.isfinite(self.beta)):
            raise ValueError(f"--alpha={self.alpha:g} and --beta={self.beta:g} must be finite")
        if min(lengths) <= self.short + 1:
            raise ValueError(
                f"--lengths: a context of {min(lengths):,} tokens has no token after a short context of "
                f"{self.short:,}: ask for longer ones, or for a smaller --short"
            )

    def masks(
        self, token_losses: TokenLosses, texts: Sequence[Sequence[int]], losses: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return masks of the key tokens of texts, without the first `short` tokens of each, which have no short
        context: bool [len(text) - short].

        As in the authors' code, `short` tokens and the next `stride` tokens are read as one window. So the short
        context of a token is what precedes it in its window: `short` to `short + stride - 1` tokens.

        Args:
          token_losses: losses of the evaluator.
          losses: its losses of every token of each text but the first, with the long context, float [len(text) - 1].
        """
        masks = []
        for text, with_long in zip(texts, losses, strict=True):
            starts = range(0, len(text) - self.short, self.stride)
            windows = token_losses([text[start : start + self.short + self.stride] for start in starts])
            gain = np.concatenate([window[self.short - 1 :] for window in windows]) - with_long[self.short - 1 :]
            masks.append((gain > self.alpha) & (with_long[self.short - 1 :] < -self.beta))
        return masks


def part(key_tokens: np.ndarray, tokens: int) -> dict[str, np.ndarray]:
    """Return the mask of the key tokens among a stretch's last `tokens` tokens, given that of the last tokens of the
    evaluator's text, which ends at the same token."""
    mask = np.zeros(tokens, bool)
    mask[-len(key_tokens) :] = key_tokens[-tokens:]
    return {KEY: mask}
