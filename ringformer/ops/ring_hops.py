"""The ring as one of its ranks sees it: who is here, what is sent on, which pairs of chunks a visiting block has."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from ringformer.ops import layouts
from ringformer.ops.kernels.block_kernels import BLOCK_KERNELS, BlockKernel, Kernel, padded_parts
from ringformer.ops.layouts import Layout
from ringformer.ops.work_list import WorkList, cut_axis, default_chunk, make_work_list


@dataclass(frozen=True)
class Ring:
    """The ring as a rank sees it, and the options of attention on it: static, hashable."""

    axis_name: str | None
    layout: Layout
    causal: bool
    scale: float
    q_chunk: int | None
    k_chunk: int | None
    kernel: Kernel = "xla"
    returns_lse: bool = True
    """Whether lse may have a cotangent."""
    key_filler: int = 0
    """Keys at the end of each part of a shard that only make its last chunk whole."""

    @property
    def size(self) -> int:
        return 1 if self.axis_name is None else lax.axis_size(self.axis_name)

    def rank_bound_to(self, q: jax.Array, *ids: jax.Array | None) -> tuple:
        """This device's rank, q and segment ids, tied together so that none can be known before q is.

        Masks made from a bare `axis_index` depend on no traced input; partial evaluation would compute all of
        them ahead of the loops and keep them, S x T x 4 bytes. It would run a ring of its own for the ids, too.
        """
        if self.axis_name is None:
            return jnp.zeros((), jnp.int32), q, *ids
        return lax.optimization_barrier((lax.axis_index(self.axis_name), q, *ids))

    @property
    def parts(self) -> int:
        """Parts of a shard that a chunk never straddles."""
        return layouts.PARTS[self.layout] if self.causal else 1

    @property
    def blocks(self) -> BlockKernel:
        """What computes a block."""
        return BLOCK_KERNELS[self.kernel]

    def chunk(self, length: int, asked: int | None) -> int:
        """Tokens of a chunk of an axis of so many; for a kernel, in whole lanes, or a whole part."""
        if self.blocks.whole_parts:
            return length // self.parts
        size, lanes = default_chunk(length) if asked is None else asked, self.blocks.lanes
        return -(-min(size, length // self.parts) // lanes) * lanes

    def whole_chunks(self, q, k, v, bias, q_ids, k_ids) -> tuple["Ring", tuple]:
        """The arrays of ring_attention, filled up to whole chunks if the kernel needs that, and the ring that knows it.

        Work lists hide the filler of keys. That of queries sees what it likes: nobody reads its rows, and cotangents of
        0 give no gradient. Filler is of the last token's segment, so that no chunk seems to hold another one.
        """
        if self.blocks.lanes == 1:
            return self, (q, k, v, bias, q_ids, k_ids)
        q_chunk, k_chunk = self.chunk(q.shape[1], self.q_chunk), self.chunk(k.shape[1], self.k_chunk)
        filled = (
            padded_parts(q, self.parts, q_chunk, 1),
            *(padded_parts(x, self.parts, k_chunk, 1) for x in (k, v, bias)),
            padded_parts(q_ids, self.parts, q_chunk, 1, mode="edge"),
            padded_parts(k_ids, self.parts, k_chunk, 1, mode="edge"),
        )
        return replace(self, key_filler=-(k.shape[1] // self.parts) % k_chunk), filled

    def shift(self, tree):
        """Send every leaf to the next rank; what arrives comes from the one before."""
        n = self.size
        return lax.ppermute(tree, self.axis_name, [(i, (i + 1) % n) for i in range(n)])

    def work_list(self, T: int, S: int, earlier: jax.Array | None) -> WorkList:
        """The chunk pairs of a visiting block, given whether it comes from an earlier rank; None: the own block."""
        if earlier is None and self.blocks.whole_parts and self.parts > 1:
            return replace(self, layout="contiguous").work_list(T, S, None)  # a shard's tokens ascend in every layout
        q = cut_axis(T, self.parts, self.chunk(T, self.q_chunk))
        k = cut_axis(S, self.parts, self.chunk(S, self.k_chunk), self.key_filler)
        return make_work_list(self.layout, self.causal, q, k, earlier)
