"""Attention of a chunk of prompts on one device: to its own tokens on the ring, to those in the cache, and to a text
with which all rows begin."""

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import numpy as np

from ringformer.inference.cache.arrays import Cache
from ringformer.inference.cache.chunk_attention import Reads, attend_cached, softmax_of
from ringformer.inference.cache.window_attention import LastSlots, attend_window, first_of_chunk, last_slots
from ringformer.inference.session_arrays import Beginning, Chunk
from ringformer.models.attention_options import attention_options
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.layer_kinds import LayerKind
from ringformer.ops import online_softmax
from ringformer.ops.layouts import permutation


class ChunkAttention(NamedTuple):
    """Attention of a chunk, which keeps the chunk's keys and values (`Decoder.attended`)."""

    config: DecoderConfig
    ranks: int
    """Devices of the ring."""
    cache: Cache
    chunk: Chunk
    beginning: Sequence[Beginning]
    """At most one: the text with which all rows begin."""
    reads: Reads | None
    prefix_reads: Reads | None
    last: dict[int, LastSlots]
    """Slots of the cached tokens that precede the chunk, by the window of a layer."""
    order: np.ndarray
    """Index in the chunk of each token of each device, [ranks, tokens]."""

    @classmethod
    def of(
        cls,
        config: DecoderConfig,
        ranks: int,
        cache: Cache,
        chunk: Chunk,
        beginning: Sequence[Beginning],
        reads: Reads | None,
        prefix_reads: Reads | None,
    ) -> "ChunkAttention":
        """Find the slots that the windows of the layers reach."""
        positions = chunk.rank_positions
        cached = reads.slots if reads else 0
        last = {}
        windows = [window for window in config.windows if window and cached]
        if windows:
            first = first_of_chunk(positions, "sp")
            for window in windows:
                last[window] = last_slots(cache.positions[:, :cached], first, min(window, cached * ranks))
        order = permutation(config.layout, positions.shape[1] * ranks, ranks // config.ulysses).reshape(ranks, -1)
        return cls(config, ranks, cache, chunk, beginning, reads, prefix_reads, last, order)

    def attend(self, kind: LayerKind, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Any, Any]:
        """Attend in a layer of a kind; `layer` is its number in the cache."""
        c = self.config
        tokens = c.ulysses * q.shape[1]
        parts = c.sequence_parts(self.ranks // c.ulysses)
        options = attention_options(c, kind, tokens, documents=False, parts=parts)
        ring = partial(c.attend, q, k, v, axis_name="sp", layout=c.layout, ulysses=c.ulysses, ring=c.ring, **options)
        if not self.reads and not self.beginning:
            return ring(), (k, v)
        if kind.window:
            last = self.last[kind.window]
            # Absent tokens have segment ids of their own.
            options = attention_options(c, kind, tokens, documents=True, parts=parts)
            return attend_window(q, k, v, self.cache, layer, last, self.order, "sp", **options), (k, v)
        seen = [softmax_of(*ring(return_lse=True))]
        if self.reads:
            seen.append(attend_cached(q, self.cache, layer, self.reads, self.chunk.pieces, "sp", **options))
        for shared in self.beginning:
            assert self.prefix_reads is not None
            tokens = q.shape[0] * q.shape[1] * self.ranks
            options = attention_options(c, kind, tokens, documents=False, parts=parts)
            seen.append(attend_cached(q, shared.cache, layer, self.prefix_reads, shared.pieces, "sp", **options))
        return online_softmax.output(reduce(online_softmax.join, seen)).astype(q.dtype), (k, v)
