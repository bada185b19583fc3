"""Lengths of the documents of a run against its context: what there is to learn long-range attention from.

A context that is packed full of short documents is no long context. With packed attention "document" no token sees
further than its document reaches, and no larger RoPE position is ever met; with "sequence" tokens see, and positions
count, the whole sequence, but what lies beyond a document is other documents.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ringformer.data.packing.options import PackedAttention
from ringformer.data.packing.sequences import StoreSequences

MOST_PASSES = 4
"""Passes over the same tokens that are worth nearly as much as new tokens (Muennighoff et al., Scaling Data-Constrained
Language Models, 2023)."""


class DocumentLengths(NamedTuple):
    """The documents of one store that a run reads: those of the wanted lengths, before any is cut. In tokens."""

    store: str
    """The store's folder."""
    seq_len: int
    packed_attention: PackedAttention
    documents: int
    median: int
    percentile_90: int
    longest: int
    long_share: float
    """The share of the tokens that are in documents of at least half the context."""
    positions: int
    """RoPE positions that are met, one more than the greatest; of documents in a stream at most, which may cut them."""

    def __str__(self) -> str:
        seen = "its own document" if self.packed_attention == "document" else "its packed sequence"
        return (
            f"{self.store}: {self.documents:,} documents, of {self.median:,} tokens in the median, "
            f"{self.percentile_90:,} at the 90th percentile, {self.longest:,} at most; {self.long_share:.1%} of their "
            f"tokens in documents of at least half the context of {self.seq_len:,}; a token sees {seen}, at RoPE "
            f"positions up to {self.positions - 1:,}"
        )


def document_lengths(sequences: StoreSequences) -> DocumentLengths:
    """The lengths of the documents that `sequences` are packed from."""
    lengths = np.diff(sequences.store.offsets)[sequences.documents]
    return DocumentLengths(
        store=str(sequences.store.path),
        seq_len=sequences.seq_len,
        packed_attention=sequences.packed_attention,
        documents=len(lengths),
        median=int(np.quantile(lengths, 0.5, method="inverted_cdf")),
        percentile_90=int(np.quantile(lengths, 0.9, method="inverted_cdf")),
        longest=int(lengths.max()),
        long_share=float(lengths[2 * lengths >= sequences.seq_len].sum() / lengths.sum()),
        positions=min(int(lengths.max()), sequences.seq_len)
        if sequences.packed_attention == "document"
        else sequences.fullest,
    )


def too_short(stores: Sequence[DocumentLengths]) -> str | None:
    """A warning if no document of these stores reaches half of a run's context; else None."""
    first, longest = stores[0], max(store.longest for store in stores)
    if 2 * longest >= first.seq_len:
        return None
    positions = max(store.positions for store in stores)
    warning = f"no document reaches half of the context of {first.seq_len:,} tokens: the longest has {longest:,}. "
    if first.packed_attention == "document":
        warning += (
            "A token sees its own document alone, so attention reaches no further than that, and no RoPE position "
            f"beyond {positions - 1:,} is trained. data.packed_attention=sequence lets it see the packed sequence; else"
        )
    else:
        warning += (
            f"Attention and RoPE positions reach {positions:,} tokens, but beyond a document are other documents, from "
            "which no long dependency is learnt. For that"
        )
    return warning + " train on longer documents (data.min_length leaves the short ones out), or shorten seq_len"


def too_often(passes: Mapping[str, float]) -> str | None:
    """A warning if one of these stores, by their folders, is gone through too often; else None."""
    often = [f"{store} {times:,.1f} times" for store, times in passes.items() if times > MOST_PASSES]
    if not often:
        return None
    return (
        f"the run goes through {', '.join(often)}: beyond {MOST_PASSES} passes repeated tokens teach less and less; "
        "train on more documents, or for fewer steps"
    )
