"""Lengths of a run's documents relative to its context, which limit the range of attention that it can learn.

A context packed with short documents is not a long context. With packed attention "document", no token sees beyond its
document, and larger RoPE positions never occur. With "sequence", tokens see the whole sequence and positions span it,
but the text beyond a document belongs to other documents.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ringformer.data.packing.options import PackedAttention
from ringformer.data.packing.sequences import StoreSequences

MOST_PASSES = 4
"""Largest number of passes over the same tokens that are worth nearly as much as new tokens (Muennighoff et al.,
Scaling Data-Constrained Language Models, 2023)."""


class DocumentLengths(NamedTuple):
    """Lengths, in tokens, of the documents that a run selects from one store, before any document is cut."""

    store: str
    """Folder of the store."""
    seq_len: int
    packed_attention: PackedAttention
    documents: int
    median: int
    percentile_90: int
    longest: int
    long_share: float
    """Share of the tokens that are in documents of at least half the context."""
    positions: int
    """Number of RoPE positions that occur; for a stream, which may cut documents, this is an upper bound."""

    def __str__(self) -> str:
        seen = "its packed sequence"
        if self.packed_attention == "document":
            seen = "its own document"
        return (
            f"{self.store}: {self.documents:,} documents; median length {self.median:,} tokens, 90th percentile "
            f"{self.percentile_90:,}, longest {self.longest:,}; {self.long_share:.1%} of their tokens are in documents "
            f"of at least half the context of {self.seq_len:,}; a token sees {seen}, at RoPE positions up to "
            f"{self.positions - 1:,}"
        )


def document_lengths(sequences: StoreSequences) -> DocumentLengths:
    """Summarize the lengths of the documents that `sequences` are packed from."""
    lengths = np.diff(sequences.store.offsets)[sequences.documents]
    median, percentile_90 = np.quantile(lengths, [0.5, 0.9], method="inverted_cdf").tolist()
    longest = int(lengths.max())
    unshifted = min(longest, sequences.seq_len) if sequences.packed_attention == "document" else sequences.fullest
    return DocumentLengths(
        store=str(sequences.store.path),
        seq_len=sequences.seq_len,
        packed_attention=sequences.packed_attention,
        documents=len(lengths),
        median=median,
        percentile_90=percentile_90,
        longest=longest,
        long_share=float(lengths[2 * lengths >= sequences.seq_len].sum() / lengths.sum()),
        positions=sequences.position_range or unshifted,
    )


def too_short(stores: Sequence[DocumentLengths]) -> str | None:
    """Return a warning if no document of these stores reaches half of a run's context, else None."""
    first = stores[0]
    longest = max(store.longest for store in stores)
    if 2 * longest >= first.seq_len or first.positions > first.seq_len:  # shifted positions: short documents do
        return None
    positions = max(store.positions for store in stores)
    warning = f"no document reaches half of the context of {first.seq_len:,} tokens: the longest has {longest:,}. "
    if first.packed_attention == "document":
        warning += (
            "A token sees only its own document, so attention reaches no further, and no RoPE position beyond "
            f"{positions - 1:,} is trained. Set data.packed_attention=sequence to let it see the packed sequence, or"
        )
    else:
        warning += (
            f"Attention and RoPE positions reach {positions:,} tokens, but beyond a document are other documents, from "
            "which no long dependency is learned. To learn them,"
        )
    return warning + " train on longer documents (data.min_length excludes short ones), or shorten seq_len"


def share_or_times(passes: float) -> str:
    """Format a number of passes: a part of the first one as a share ("6.1%"), more as a number."""
    if passes >= 1000:
        return f"{passes:,.0f}"
    if passes >= 1:
        return f"{passes:.3g}"
    if passes >= 1e-4:
        return f"{100 * passes:.2g}%"
    return "<0.01%"


def describe_passes(store: str, passes: float, steps: int) -> str:
    """Return the line on the passes that a run of so many steps makes through a store."""
    amount = share_or_times(passes)
    unit = "passes"
    if passes < 1:
        unit = "of a pass"
    elif amount == "1":
        unit = "pass"
    return f"{store}: {amount} {unit} in {steps:,} steps"


def too_often(passes: Mapping[str, float]) -> str | None:
    """Return a warning if a run makes too many passes through one of these stores, by folder, else None."""
    often = [f"{store} {times:,.1f} times" for store, times in passes.items() if times > MOST_PASSES]
    if not often:
        return None
    return (
        f"the run goes through {', '.join(often)}: beyond {MOST_PASSES} passes, repeated tokens teach less and less; "
        "train on more documents, or for fewer steps"
    )
