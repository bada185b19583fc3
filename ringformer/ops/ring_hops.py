"""The ring from the view of one rank: its hops, and the chunk pairs of visiting blocks."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from ringformer.ops import layouts
from ringformer.ops.blockwise_attention import Cotangents, KeyGradients, Keys, Queries
from ringformer.ops.head_exchange import ALONE, HeadExchange
from ringformer.ops.kernels.block_kernels import BLOCK_KERNELS, BlockKernel, Kernel, check_both_ways, padded_parts
from ringformer.ops.layouts import Layout
from ringformer.ops.online_softmax import Softmax
from ringformer.ops.streams import Stream, Streams, halves_of_heads, runs_of_tokens
from ringformer.ops.work_list import (
    AxisChunks,
    WorkList,
    cut_axis,
    default_chunk,
    make_gathered_work_list,
    make_work_list,
)

RingForm = Literal["one_way", "both_ways", "gathered"]
"""Paths of the keys to the other ranks: from one neighbour, from both, or all at once (`ring_attention.py`)."""

GATHERED = "ring_gathered"
"""Name of the scope of a gathered ring's collectives."""


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
class Ring:
    """The ring from the view of one rank, and the options of attention on it; static and hashable."""

    axis_name: str | None
    layout: Layout
    causal: bool
    scale: float
    q_chunk: int | None
    k_chunk: int | None
    kernel: Kernel = "xla"
    exchange: HeadExchange = ALONE
    """Exchange of heads among the devices of a rank."""
    returns_lse: bool = True
    """True if lse may have a cotangent."""
    form: RingForm = "one_way"
    rings: int = 1
    """Equal rings that the ranks of the axis form, each with a sequence of its own."""
    window: int | None = None
    """Keys that a query sees at most, the last ones, its own included; None: no limit."""
    attend_first: int = 0
    """Tokens at the beginning of the sequence that every query sees, whatever its window."""
    softcap: float | None = None
    """Bound c of the logits: a logit s becomes c tanh(s / c)."""
    key_filler: int = 0
    """Number of keys at the end of each part of a shard that only pad the part's last chunk."""

    def check_form(self, key_heads: int) -> None:
        """Raise ValueError for an unknown form, and for a kernel that cannot cut the tokens of its keys in two."""
        if self.form not in get_args(RingForm):
            raise ValueError(f"unknown ring {self.form!r}; known forms: {', '.join(get_args(RingForm))}")
        if self.form == "both_ways" and self.size > 1:
            check_both_ways(self.kernel, key_heads * self.exchange.copies // self.exchange.ulysses)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.axis_name is None else layouts.ring_size_of(self.axis_name, self.exchange.ulysses, self.rings)

    @property
    def gathers(self) -> bool:
        """True if every rank gathers all keys, which then make no hops."""
        return self.form == "gathered" and self.size > 1

    def within(self, window: int | None, attend_first: int, softcap: float | None, local_tokens: int) -> "Ring":
        """Set the window, the first tokens and the soft cap. A window of the whole sequence is none.

        Raises ValueError if the first tokens exceed a part of a shard. `local_tokens` are those of a device.
        """
        layout: Layout = "contiguous" if self.axis_name is None else self.layout
        shard = local_tokens * self.exchange.ulysses
        part = shard // layouts.PARTS[layout]
        if window is not None and attend_first > part:
            whole = "the sequence" if self.axis_name is None else "a part of a shard"
            raise ValueError(f"attend_first={attend_first} exceeds {whole}, {part} tokens, all that it can take")
        if window is None or window >= shard * self.size:
            return replace(self, softcap=softcap)
        return replace(self, layout=layout, window=window, attend_first=attend_first, softcap=softcap, form="one_way")

    def window_hops(self, part: int) -> int:
        """Hops that keys make along the sequence, from part to part of so many tokens, to fill a window."""
        assert self.window is not None
        return min(-(-(self.window - 1) // part), self.parts * self.size - 1)

    def rank_bound_to(self, q: jax.Array, *ids: jax.Array | None) -> tuple:
        """Return the rank of this device, q and segment ids, tied together so that all depend on q.

        Masks made from a plain `axis_index` depend on no traced input. Partial evaluation would therefore compute all
        masks before the loops and keep them, S x T x 4 bytes, and would run a separate ring for the ids.
        """
        if self.axis_name is None:
            return jnp.zeros((), jnp.int32), q, *ids
        rank = lax.axis_index(self.axis_name) // self.exchange.ulysses % self.size
        return lax.optimization_barrier((rank, q, *ids))

    @property
    def parts(self) -> int:
        """Number of parts of a shard; no chunk straddles two parts."""
        return layouts.PARTS[self.layout] if self.causal else 1

    @property
    def blocks(self) -> BlockKernel:
        """Kernel that computes a block."""
        return BLOCK_KERNELS[self.kernel]

    def chunk(self, length: int, requested: int | None) -> int:
        """Return the tokens of a chunk of an axis of `length`. Kernels need a multiple of their lanes, or a whole
        part."""
        if self.blocks.whole_parts:
            return length // self.parts
        size = default_chunk(length) if requested is None else requested
        lanes = self.blocks.lanes
        return -(-min(size, length // self.parts) // lanes) * lanes

    def whole_chunks(self, shard: Shard) -> tuple["Ring", Shard]:
        """Pad the arrays of a rank to whole chunks if the kernel needs that; return the new ring and arrays.

        Work lists hide padded keys. Padded queries may see any keys: their rows are never read, and their cotangents of
        0 give no gradient. Padding belongs to the last token's segment, so that it adds no segment to a chunk.
        """
        if self.blocks.lanes == 1:
            return self, shard
        k_chunk = self.chunk(shard.keys, self.k_chunk)
        if self._cuts_tokens(shard.key_heads):  # each run has a chunk
            k_chunk = min(k_chunk, self.chunk(shard.keys, -(-shard.keys // self.parts // 2)))
        filled = Shard(
            self.whole_queries(shard.q),
            padded_parts(shard.k, self.parts, k_chunk, 1),
            padded_parts(shard.v, self.parts, k_chunk, 1),
            padded_parts(shard.bias, self.parts, k_chunk, 1),
            self.whole_queries(shard.q_ids, mode="edge"),
            padded_parts(shard.k_ids, self.parts, k_chunk, 1, mode="edge"),
        )
        return replace(self, k_chunk=k_chunk, key_filler=-(shard.keys // self.parts) % k_chunk), filled

    def whole_queries(self, x, axis: int = 1, mode: Literal["constant", "edge"] = "constant"):
        """Pad an axis of queries as `whole_chunks` pads them; None stays None."""
        if x is None or self.blocks.lanes == 1:
            return x
        return padded_parts(x, self.parts, self.chunk(x.shape[axis], self.q_chunk), axis, mode)

    def streams(self, length: int, key_heads: int, backward: bool = False) -> Streams:
        """Divide the keys of a shard of `length` tokens into one stream or two.

        Gathered keys of half of the heads travel while the other half is computed. So do the gradients in the backward
        of a kernel that adds to them, one way. Parts too short for two chunks are one stream.
        """
        if self.size == 1 or self.window is not None:
            return (Stream(),)
        if self._cuts_tokens(key_heads):
            part = length // self.parts
            lanes = self.blocks.lanes
            chunk = self.chunk(length, self.k_chunk) if lanes > 1 else 1
            first = -(-part // chunk // 2) * chunk
            return runs_of_tokens(first, part) if first < part else (Stream(),)
        if self.form == "both_ways":
            return halves_of_heads(key_heads, (1, -1))
        take_turns = self.form == "gathered" or (backward and self.blocks.adds_gradients)
        if take_turns and self.blocks.has_even_halves(key_heads):
            return halves_of_heads(key_heads, (1, 1))
        return (Stream(),)

    def _cuts_tokens(self, key_heads: int) -> bool:
        return self.form == "both_ways" and self.size > 1 and not self.blocks.has_even_halves(key_heads)

    def is_earlier(self, rank: jax.Array, t: int | jax.Array | None, stream: Stream) -> jax.Array | None:
        """Return True if the keys of step t come from an earlier rank; None for the rank's own block (t None)."""
        if t is None:
            return None
        return rank >= t if stream.direction == 1 else rank + t >= self.size

    def shift(self, tree, stream: Stream):
        """Send every leaf to the next rank in the stream's direction, and receive the leaves of the previous one."""
        moves = [(rank, (rank + stream.direction) % self.size) for rank in range(self.size)]
        return None if tree is None else lax.ppermute(tree, self.axis_name, self.devices(moves))

    def devices(self, moves: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the (source, target) devices, in all rings, of moves between ranks; each device of a rank sends to its
        like."""
        u = self.exchange.ulysses
        ranks = [first * self.size for first in range(self.rings)]
        return [((f + a) * u + i, (f + b) * u + i) for f in ranks for a, b in moves for i in range(u)]

    def forward(self, state: Softmax, queries: Queries, keys: Keys, work_list: WorkList) -> Softmax:
        """Add the visible keys of a block to the running softmax of every query."""
        return self.blocks.forward(state, queries, keys, work_list, self.scale, **self._cap)

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
        return self.blocks.backward(dq, queries, keys, rows, work_list, self.scale, *dkeys, **self._cap)

    @property
    def _cap(self) -> dict[str, float]:
        return {} if self.softcap is None else {"softcap": self.softcap}

    @jax.named_scope(GATHERED)
    def gathered(self, keys: Keys) -> Keys:
        """Gather the keys of all ranks, in the order of the ranks."""
        gather = partial(lax.all_gather, axis_name=self.axis_name, axis_index_groups=self._peers, tiled=True)
        ids, bias = (None if x is None else gather(x, axis=1) for x in (keys.segment_ids, keys.bias))
        return Keys(gather(keys.kv, axis=3), ids, bias)

    @jax.named_scope(GATHERED)
    def scattered(self, gradients: KeyGradients) -> KeyGradients:
        """Transpose `gathered`: sum the gradients over the ranks, each rank for its own keys."""
        sum_ = partial(lax.psum_scatter, axis_name=self.axis_name, axis_index_groups=self._peers, tiled=True)
        bias = None if gradients.bias is None else sum_(gradients.bias, scatter_dimension=1)
        return KeyGradients(jax.tree.map(lambda x: sum_(x, scatter_dimension=x.ndim - 2), gradients.kv), bias)

    @property
    def _peers(self) -> list[list[int]] | None:
        """Devices that hold the same place in every rank of a ring; None: all."""
        u = self.exchange.ulysses
        ring = self.size * self.exchange.ulysses
        if u == self.rings == 1:
            return None
        return [
            list(range(first + i, first + ring, u)) for first in range(0, self.rings * ring, ring) for i in range(u)
        ]

    def work_list(self, T: int, S: int, earlier: jax.Array | None, stream: Stream) -> WorkList:
        """Make the chunk pairs of the queries of a rank and the keys of a stream; S tokens are a whole shard.

        `earlier`: True if the keys come from an earlier rank; None: the rank's own block.
        """
        if earlier is None and self.blocks.whole_parts and self.parts > 1:
            # Every layout keeps tokens in order.
            return replace(self, layout="contiguous").work_list(T, S, None, stream)
        first, last, _ = stream.tokens.indices(S // self.parts)
        return make_work_list(self.layout, self.causal, self.cut_queries(T), self.cut_keys(S, first, last), earlier)

    def others(self, T: int, S: int, rank: jax.Array) -> WorkList:
        """Make the chunk pairs of a rank's queries and the gathered keys of all other ranks."""
        q = self.cut_queries(T)
        k = self.cut_keys(S, 0, S // self.parts)
        return make_gathered_work_list(self.layout, self.causal, q, k, rank, self.size)

    def cut_queries(self, T: int) -> AxisChunks:
        """Cut the queries of a shard into chunks."""
        return cut_axis(T, self.parts, self.chunk(T, self.q_chunk))

    def cut_keys(self, S: int, first: int, last: int) -> AxisChunks:
        """Cut the tokens from `first` to `last` of each part of a shard of S tokens."""
        filler = self.key_filler if last == S // self.parts else 0
        return cut_axis((last - first) * self.parts, self.parts, self.chunk(S, self.k_chunk), filler, first)
