"""The ring from the view of one rank: its hops, and the chunk pairs of visiting blocks."""

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from ringformer.ops import layouts
from ringformer.ops.head_exchange import ALONE, HeadExchange
from ringformer.ops.kernels.block_kernels import BLOCK_KERNELS, BlockKernel, Kernel, padded_parts
from ringformer.ops.layouts import Layout
from ringformer.ops.work_list import WorkList, cut_axis, default_chunk, make_work_list


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
    key_filler: int = 0
    """Number of keys at the end of each part of a shard that only pad the part's last chunk."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self.axis_name is None else layouts.ring_size_of(self.axis_name, self.exchange.ulysses)

    def rank_bound_to(self, q: jax.Array, *ids: jax.Array | None) -> tuple:
        """Return the rank of this device, q and segment ids, tied together so that all depend on q.

        Masks made from a plain `axis_index` depend on no traced input. Partial evaluation would therefore compute all
        masks before the loops and keep them, S x T x 4 bytes, and would run a separate ring for the ids.
        """
        if self.axis_name is None:
            return jnp.zeros((), jnp.int32), q, *ids
        return lax.optimization_barrier((lax.axis_index(self.axis_name) // self.exchange.ulysses, q, *ids))

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
        size, lanes = default_chunk(length) if requested is None else requested, self.blocks.lanes
        return -(-min(size, length // self.parts) // lanes) * lanes

    def whole_chunks(self, q, k, v, bias, q_ids, k_ids) -> tuple["Ring", tuple]:
        """Pad the arrays of a rank to whole chunks if the kernel needs that; return the new ring and arrays.

        Work lists hide padded keys. Padded queries may see any keys: their rows are never read, and their cotangents of
        0 give no gradient. Padding belongs to the last token's segment, so that it adds no segment to a chunk.
        """
        if self.blocks.lanes == 1:
            return self, (q, k, v, bias, q_ids, k_ids)
        k_chunk = self.chunk(k.shape[1], self.k_chunk)
        filled = (
            self.whole_queries(q),
            *(padded_parts(x, self.parts, k_chunk, 1) for x in (k, v, bias)),
            self.whole_queries(q_ids, mode="edge"),
            padded_parts(k_ids, self.parts, k_chunk, 1, mode="edge"),
        )
        return replace(self, key_filler=-(k.shape[1] // self.parts) % k_chunk), filled

    def whole_queries(self, x, axis: int = 1, mode: Literal["constant", "edge"] = "constant"):
        """Pad an axis of queries as `whole_chunks` pads them; None stays None."""
        if x is None or self.blocks.lanes == 1:
            return x
        return padded_parts(x, self.parts, self.chunk(x.shape[axis], self.q_chunk), axis, mode)

    def head_halves(self, key_heads: int) -> tuple[slice, slice] | None:
        """Cut the key heads in two, so that the gradients of each half travel while those of the other half are
        computed. None if the kernel cannot add to gradients that arrived, or if a half has an odd number of heads,
        which the two cores of a TPU could not share."""
        if not self.blocks.adds_gradients or key_heads % 4:
            return None
        return slice(0, key_heads // 2), slice(key_heads // 2, key_heads)

    def shift(self, tree):
        """Send every leaf to the next rank, and receive the leaves of the previous rank."""
        u = self.exchange.ulysses
        n = self.size * u
        return None if tree is None else lax.ppermute(tree, self.axis_name, [(i, (i + u) % n) for i in range(n)])

    def work_list(self, T: int, S: int, earlier: jax.Array | None) -> WorkList:
        """Make the chunk pairs of a visiting block. `earlier`: True if its keys come from an earlier rank; None: the
        rank's own block."""
        if earlier is None and self.blocks.whole_parts and self.parts > 1:
            return replace(self, layout="contiguous").work_list(T, S, None)  # every layout keeps tokens in order
        q = cut_axis(T, self.parts, self.chunk(T, self.q_chunk))
        k = cut_axis(S, self.parts, self.chunk(S, self.k_chunk), self.key_filler)
        return make_work_list(self.layout, self.causal, q, k, earlier)
