"""Perplexity with a sliding window, as Position Interpolation (Chen et al. 2023, arXiv:2306.15595), YaRN (Peng et al.
2023, arXiv:2309.00071) and LongLoRA (Chen et al. 2023, arXiv:2309.12307) report it, after Press et al. 2021."""

from collections.abc import Iterator, Sequence

from ringformer.evals.perplexity.losses import Documents, Stretch


def check(lengths: Sequence[int], stride: int, begin: Sequence[int], tokens: int | None) -> None:
    """Raise ValueError for a stride that is not positive or exceeds the document's tokens in a window, or for fewer
    tokens to measure than the longest window has."""
    room = min(lengths) - len(begin)
    if not 1 <= stride <= room:
        raise ValueError(
            f"--stride={stride} must be 1 to {room}, the tokens of a document in the shortest window: otherwise some "
            "tokens would be in no window"
        )
    if tokens is not None and tokens < max(lengths):
        raise ValueError(f"--tokens={tokens} is less than the longest of --lengths, {max(lengths)}: raise it")


def windows(documents: Documents, document: int, length: int, stride: int, tokens: int | None) -> Iterator[Stretch]:
    """Yield the windows of a document of which some token counts.

    A window has up to `length` tokens. It starts `stride` tokens after the one before it, and its loss counts for the
    tokens that no window before it has: the first has all, every other the last `stride`. The last window ends with the
    document.

    Args:
      tokens: number of the first tokens to measure, those with which every text begins included; None: all.
    """
    room = length - len(documents.begin)
    end_of_document = documents.tokens(document)
    total = end_of_document if tokens is None else min(tokens - len(documents.begin), end_of_document)
    first = 0
    for start in range(0, total, stride):
        end = min(start + room, total)
        window = documents.stretch(length, document, start, end, first)
        if window.counted[1:].any():
            yield window
        first = end
        if end == total:
            return
