"""Attention on a ring, as options: the ring, what a query may see, and how a block is computed.

From these follow the chunks of a shard, the streams in which its keys travel, and the chunk pairs of a block.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import Array, Float, Float32, Int

from ringformer.ops import layouts
from ringformer.ops.blockwise_attention import Cotangents, KeyGradients, Keys, Queries
from ringformer.ops.kernels.block_kernels import BLOCK_KERNELS, BlockKernel, Kernel, padded_parts
from ringformer.ops.online_softmax import Softmax
from ringformer.ops.ring import Ring
from ringformer.ops.streams import Stream, Streams, halves_of_heads, runs_of_tokens
from ringformer.ops.work_list import (
    AxisChunks,
    WorkList,
    cut_axis,
    default_chunk,
    make_gathered_work_list,
    make_work_list,
)


class Shard(NamedTuple):
    """The arrays of a rank: queries and keys of its tokens."""

    q: Float[Array, "B T H d"]
    k: Float[Array, "B S K d"]
    v: Float[Array, "B S K d"]
    bias: Float32[Array, "B S"] | None
    q_ids: Int[Array, "B T"] | None
    k_ids: Int[Array, "B S"] | None

    @property
    def length(self) -> int:
        """Number of queries."""
        return self.q.shape[1]

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.k.shape[1]

    @property
    def key_heads(self) -> int:
        return self.k.shape[2]


@dataclass(frozen=True)
class Mask:
    """Keys that a query may see, whatever their segments."""

    causal: bool = True
    """True if a query sees no later key. If False, all ranks' keys are alike, and the ring's layout is contiguous."""
    window: int | None = None
    """Keys that a query sees at most, the last ones, its own included; None: no limit."""
    attend_first: int = 0
    """Tokens at the beginning of the sequence that every query sees, whatever its window."""


@dataclass(frozen=True)
class Blocks:
    """Computation of a block: the attention of a rank's queries to the keys of one rank."""

    scale: float
    """Factor of the logits."""
    kernel: Kernel = "xla"
    q_chunk: int | None = None
    k_chunk: int | None = None
    """Tokens of a chunk; None: `default_chunk`."""
    softcap: float | None = None
    """Bound c of the logits: a logit s becomes c tanh(s / c)."""

    @property
    def code(self) -> BlockKernel:
        """Kernel that computes a block."""
        return BLOCK_KERNELS[self.kernel]

    def forward(self, state: Softmax, queries: Queries, keys: Keys, work_list: WorkList) -> Softmax:
        """Add the visible keys of a block to the running softmax of every query."""
        return self.code.forward(state, queries, keys, work_list, self.scale, **self._cap)

    def backward(
        self,
        dq: jax.Array,
        queries: Queries,
        keys: Keys,
        rows: Cotangents,
        work_list: WorkList,
        *dkeys: KeyGradients | None,
    ) -> tuple[jax.Array, KeyGradients]:
        """Add a block's share to dq, and return the gradients of its keys, added to `dkeys` if they are given."""
        return self.code.backward(dq, queries, keys, rows, work_list, self.scale, *dkeys, **self._cap)

    @property
    def _cap(self) -> dict[str, float]:
        return {} if self.softcap is None else {"softcap": self.softcap}


@dataclass(frozen=True)
class Attention:
    """Attention on a ring; static and hashable."""

    ring: Ring
    blocks: Blocks
    mask: Mask = Mask()
    returns_lse: bool = False
    """True if lse may have a cotangent."""
    key_filler: int = 0
    """Number of keys at the end of each part of a shard that only pad the part's last chunk."""

    def in_simplest_form(self, local_tokens: int) -> "Attention":
        """Leave out a window of the whole sequence; keys of a smaller one travel one way, whatever the ring's form.

        Raises ValueError if the first tokens exceed a part of a shard.

        Args:
          local_tokens: tokens of a device.
        """
        ring = self.ring
        window = self.mask.window
        if window is None:
            return replace(self, mask=Mask(self.mask.causal))
        layout: layouts.Layout = "contiguous" if ring.axis_name is None else ring.layout
        shard = local_tokens * ring.exchange.ulysses
        part = shard // layouts.PARTS[layout]
        if self.mask.attend_first > part:
            whole = "the sequence" if ring.axis_name is None else "a part of a shard"
            raise ValueError(
                f"attend_first={self.mask.attend_first} exceeds {whole}, {part} tokens, all that it can take"
            )
        if window >= shard * ring.size:
            return replace(self, mask=Mask(self.mask.causal))
        return replace(self, ring=replace(ring, layout=layout, form="one_way"))

    # --- the chunks of a shard --------------------------------------------------------------------------------------

    def chunk(self, length: int, requested: int | None) -> int:
        """Return the tokens of a chunk of an axis of `length`. Kernels need a multiple of their lanes, or a whole part;
        no chunk straddles two parts."""
        part = length // self.ring.parts
        if self.blocks.code.whole_parts:
            return part
        size = default_chunk(length) if requested is None else requested
        lanes = self.blocks.code.lanes
        return -(-min(size, part) // lanes) * lanes

    def cut_queries(self, T: int) -> AxisChunks:
        """Cut the queries of a shard into chunks."""
        return cut_axis(T, self.ring.parts, self.chunk(T, self.blocks.q_chunk))

    def cut_keys(self, S: int, first: int, last: int) -> AxisChunks:
        """Cut the tokens from `first` to `last` of each part of a shard of S tokens."""
        parts = self.ring.parts
        filler = self.key_filler if last == S // parts else 0
        return cut_axis((last - first) * parts, parts, self.chunk(S, self.blocks.k_chunk), filler, first)

    def in_whole_chunks(self, shard: Shard) -> tuple["Attention", Shard]:
        """Pad the arrays of a rank to whole chunks if the kernel needs that; return the new attention and arrays.

        Work lists hide padded keys. Padded queries may see any keys: their rows are never read, and their cotangents of
        0 give no gradient. Padding belongs to the last token's segment, so that it adds no segment to a chunk.
        """
        if self.blocks.code.lanes == 1:
            return self, shard
        parts = self.ring.parts
        k_chunk = self.chunk(shard.keys, self.blocks.k_chunk)
        if self._cuts_tokens(shard.key_heads):  # each run has a chunk
            k_chunk = min(k_chunk, self.chunk(shard.keys, -(-shard.keys // parts // 2)))
        filled = Shard(
            self.whole_queries(shard.q),
            padded_parts(shard.k, parts, k_chunk, 1),
            padded_parts(shard.v, parts, k_chunk, 1),
            padded_parts(shard.bias, parts, k_chunk, 1),
            self.whole_queries(shard.q_ids, mode="edge"),
            padded_parts(shard.k_ids, parts, k_chunk, 1, mode="edge"),
        )
        filler = -(shard.keys // parts) % k_chunk
        return replace(self, blocks=replace(self.blocks, k_chunk=k_chunk), key_filler=filler), filled

    def whole_queries(self, x: Any, axis: int = 1, mode: Literal["constant", "edge"] = "constant") -> Any:
        """Pad an axis of queries as `in_whole_chunks` pads them; None stays None."""
        if x is None or self.blocks.code.lanes == 1:
            return x
        return padded_parts(x, self.ring.parts, self.chunk(x.shape[axis], self.blocks.q_chunk), axis, mode)

    # --- the streams and the chunk pairs ----------------------------------------------------------------------------

    def streams(self, length: int, key_heads: int, backward: bool = False) -> Streams:
        """Divide the keys of a shard of `length` tokens into one stream or two.

        Gathered keys of half of the heads travel while the other half is computed. So do the gradients in the backward
        of a kernel that adds to them, one way. Parts too short for two chunks are one stream.
        """
        if self.ring.size == 1 or self.mask.window is not None:
            return (Stream(),)
        code = self.blocks.code
        if self._cuts_tokens(key_heads):
            part = length // self.ring.parts
            chunk = self.chunk(length, self.blocks.k_chunk) if code.lanes > 1 else 1
            first = -(-part // chunk // 2) * chunk
            return runs_of_tokens(first, part) if first < part else (Stream(),)
        if self.ring.goes_both_ways:
            return halves_of_heads(key_heads, (1, -1))
        take_turns = self.ring.gathers or (backward and code.adds_gradients)
        if take_turns and code.has_even_halves(key_heads):
            return halves_of_heads(key_heads, (1, 1))
        return (Stream(),)

    def _cuts_tokens(self, key_heads: int) -> bool:
        return self.ring.goes_both_ways and not self.blocks.code.has_even_halves(key_heads)

    def work_list(self, T: int, S: int, earlier: jax.Array | None, stream: Stream) -> WorkList:
        """Make the chunk pairs of the queries of a rank and the keys of a stream; S tokens are a whole shard.

        `earlier`: True if the keys come from an earlier rank; None: the rank's own block.
        """
        ring = self.ring
        if earlier is None and self.blocks.code.whole_parts and ring.parts > 1:
            # Every layout keeps tokens in order.
            in_order = replace(self, ring=replace(ring, layout="contiguous"))
            return in_order.work_list(T, S, None, stream)
        first, last, _ = stream.tokens.indices(S // ring.parts)
        return make_work_list(
            ring.layout, self.mask.causal, self.cut_queries(T), self.cut_keys(S, first, last), earlier
        )

    def work_list_of_others(self, T: int, S: int, rank: jax.Array) -> WorkList:
        """Make the chunk pairs of a rank's queries and the gathered keys of all other ranks."""
        q = self.cut_queries(T)
        k = self.cut_keys(S, 0, S // self.ring.parts)
        return make_gathered_work_list(self.ring.layout, self.mask.causal, q, k, rank, self.ring.size)
