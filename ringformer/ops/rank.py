"""One rank of a ring: it sends keys on, attends to those that visit it, and passes their gradients on.

The keys of a shard travel in one stream or in two (`streams.py`): lists have a value for each stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ringformer.ops.attention import Attention, Blocks
from ringformer.ops.blockwise_attention import Cotangents, KeyGradients, Keys, Queries
from ringformer.ops.online_softmax import Softmax
from ringformer.ops.ring import Ring
from ringformer.ops.streams import Stream, Streams, with_shared_ids
from ringformer.ops.work_list import WorkList

OWN = 0
"""Step at which a rank computes the block of its own keys, the last one in the backward: at step t, the keys have made
t hops."""

Step = int | jax.Array


@dataclass(frozen=True)
class Rank:
    """One rank during a pass, with the queries that stay on it."""

    attention: Attention
    index: jax.Array
    """Its place on the ring, traced."""
    queries: list[Queries]
    """Queries of each stream."""
    streams: Streams
    length: int
    """Keys of a shard, in whole chunks if the kernel needs them."""
    backward: bool = False

    @property
    def ring(self) -> Ring:
        return self.attention.ring

    @property
    def blocks(self) -> Blocks:
        return self.attention.blocks

    def shift(self, keys: list[Keys]) -> list[Keys]:
        """Send the keys to the next rank of their stream, and receive those of the previous one."""
        shared = with_shared_ids(self.streams, keys)
        return [self.ring.shift(x, stream.direction) for x, stream in zip(shared, self.streams, strict=True)]

    def attend(self, states: list[Softmax], keys: list[Keys], step: Step) -> list[Softmax]:
        """Add the visible keys of a step to the running softmax of every query."""
        attended = []
        for state, queries, visiting, stream in zip(states, self.queries, keys, self.streams, strict=True):
            attended.append(self.blocks.forward(state, queries, visiting, self._pairs(step, stream)))
        return attended

    def differentiate(
        self,
        dqs: list[jax.Array],
        dkeys: Sequence[KeyGradients | None],
        keys: list[Keys],
        rows: list[Cotangents],
        step: Step,
    ) -> tuple[list[jax.Array], list[Any]]:
        """Add the share of a step to dq, and to the gradients of its keys, which arrive from the previous rank.

        Args:
          dkeys: gradients of the keys of the step before, for the next rank; None if no rank has computed any.
        """
        keys = with_shared_ids(self.streams, keys)
        new_dqs = []
        new_dkeys = []
        for i, stream in enumerate(self.streams):
            travels_after = self._adds_in_kernel and i == 0
            arrived = dkeys[i] if travels_after else self._passed_on(dkeys[i], stream)
            block = self.queries[i], keys[i], rows[i], self._pairs(step, stream)
            if self._adds_in_kernel:
                dq, sums = self.blocks.backward(dqs[i], *block, arrived)
            else:
                dq, share = self.blocks.backward(dqs[i], *block)
                sums = share if arrived is None else jax.tree.map(jnp.add, arrived, share)
            new_dqs.append(dq)
            travels = travels_after and not _is_own(step)
            new_dkeys.append(self._passed_on(sums, stream) if travels else sums)
        return new_dqs, new_dkeys

    @property
    def _adds_in_kernel(self) -> bool:
        """True if there are two streams, and a kernel that needs the gradients that arrived before it starts, since it
        adds to them.

        So those of one stream travel while the kernel computes the other stream: the first stream's after its block,
        the last stream's before its block.
        """
        return self.blocks.code.adds_gradients and len(self.streams) == 2

    def _passed_on(self, dkeys: KeyGradients | None, stream: Stream) -> KeyGradients | None:
        """Send gradients of keys to the next rank, and receive those of the previous one; gathered keys do not hop."""
        if self.ring.gathers:
            return dkeys
        return self.ring.shift(dkeys, stream.direction)

    @property
    def no_gradients(self) -> list[None]:
        """Gradients of keys that no rank has computed."""
        return [None] * len(self.streams)

    def in_order(self, computed: Any, arriving: Any) -> tuple[Any, Any]:
        """Let no later block begin before both are there, where kernels run from hop to hop.

        When the next hop begins, the keys of this block are no longer read: two buffers suffice, and none is copied.
        And nobody waits for the next segment ids before this block has hidden their hop.
        """
        from_hop_to_hop = self._adds_in_kernel if self.backward else self.blocks.code.unroll
        if from_hop_to_hop:
            return lax.optimization_barrier((computed, arriving))
        return computed, arriving

    @property
    def tokens(self) -> int:
        """Queries of a shard."""
        return self.queries[0].q.shape[3]

    def _pairs(self, step: Step, stream: Stream) -> WorkList:
        """Make the chunk pairs of a step."""
        earlier = None if _is_own(step) else self.ring.is_earlier(self.index, step, stream.direction)
        return self.attention.work_list(self.tokens, self.length, earlier, stream)


def _is_own(step: Step) -> bool:
    """Return True for the block of the own keys; in a loop over hops, steps are traced and never that."""
    return isinstance(step, int) and step == OWN
