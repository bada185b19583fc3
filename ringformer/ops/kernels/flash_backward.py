"""The backward block as a TPU kernel (Pallas): all five products of a pair in one body; dq is accumulated in place.

    grid     batch x key head x pair; the pairs of a chunk of keys one after the other (`pair_table.py`)

                        k chunk -->
               q chunk  [p0]               dk, dv  accumulate on the chip, in float32, while the keys stay
                  |     [p1][p3]           dq      of a visit arrives from HBM while the previous pair computes,
                  v     [p2][p4][p5]               and leaves while the next pair computes

    a pair   transposed, keys by queries, so that per-query values lie along the lanes. For a part of the keys (half of
             them, fewer for long chunks of queries), in two stages:

               products    s = c k q^T,  dp = v do^T
               gradients   p = 2^(s - m);  ds = p (dp - delta);  dq += (k^T ds)^T;  dk += ds q;  dv += p do

             As in the forward, the source has the products of the next part before the gradients of this one. dq
             is the first of the three gradients, so that it is transposed while the units compute the others.

p needs no division by l of the whole row: either log l is already added to m, or do and delta are already divided by l.
The gradients are linear in do and delta (`flash_attention.py`).
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

from ringformer.ops.blockwise_attention import Keys, Queries
from ringformer.ops.kernels.kernel_tools import (
    COLUMNS_BY_COLUMNS,
    LANES,
    ROWS_BY_COLUMNS,
    ROWS_BY_ROWS,
    Logits,
    capped,
    column,
    for_each_head,
    matmul,
    part_of_keys,
    repeated,
)
from ringformer.ops.kernels.pair_call import (
    HBM,
    GridStep,
    OnChip,
    call_over_pairs,
    key_head_row_block,
    key_row_block,
    key_sums_block,
    keys_block,
    queries_block,
    query_row_block,
    query_rows_block,
)
from ringformer.ops.kernels.pair_table import Columns, PairTable, cost, kernel_name
from ringformer.ops.varying_axes import vary_like


def flash_backward(
    dq: Float32[Array, "B K G T d"],
    dkv: Float32[Array, "2 B K S d"] | None,
    queries: Queries,
    keys: Keys,
    bias: Float32[Array, "B S"] | None,
    do: Float[Array, "B K G T d"],
    rows: Float32[Array, "2 B K G T"],
    table: PairTable,
    chunks: tuple[int, int],
    logits: Logits,
    scale: float,
) -> tuple[jax.Array, Float32[Array, "2 B K S d"], Float32[Array, "B K S"] | None]:
    """Add the pairs of a table to `dq`; return it, and [dk, dv] and dbias of each group of query heads. If there are
    more groups than key heads, neighbours read the same key head.

    Args:
      dkv: [dk, dv] to add to, in place; None: zeros. dbias covers only this table.
      do, rows: cotangents of o; m in units of log 2, and delta (`flash_attention.prepare`).
      chunks: tokens of a chunk of (queries, keys).
    """
    B, K, G, _, d = queries.q.shape
    S = keys.kv.shape[3]
    packed = queries.segment_ids is not None and keys.segment_ids is not None
    readers = K // keys.kv.shape[2]
    on_chip = backward_on_chip(
        G, d, chunks, queries.q.dtype, packed, bias is not None, adds=dkv is not None, readers=readers
    )
    arrays = {"kv": keys.kv, "q": queries.q, "do": do, "rows": rows}
    if bias is not None:
        arrays["bias_row"] = bias[:, None]
    if queries.segment_ids is not None and keys.segment_ids is not None:
        arrays |= {"k_ids": keys.segment_ids[:, None], "q_ids": queries.segment_ids[:, None]}
    # Keys that no pair visits keep their values.
    zeros = vary_like([jnp.zeros((2, B, K, S, d), jnp.float32), jnp.zeros((B, K, 1, S), jnp.float32)], dq)
    sums = {"dkv": zeros[0] if dkv is None else dkv}
    if bias is not None:
        sums["dbias_row"] = zeros[1]
    kind = "backward" if dkv is None else "backward_adding"
    out = call_over_pairs(
        partial(_kernel, logits=logits, scale=scale),
        table,
        operands=on_chip.place(arrays),
        results={"dq_out": (dq, HBM)} | on_chip.place(sums),
        on_chip=on_chip,
        q=queries.q,
        cost_estimate=_cost(table, queries, keys, chunks),
        name=kernel_name(kind, table, B * K, S // chunks[1]),
    )
    return out[0], out[1], out[2][:, :, 0] if bias is not None else None


def _cost(table: PairTable, queries: Queries, keys: Keys, chunks: tuple[int, int]) -> pl.CostEstimate:
    B, K, G, _, d = queries.q.shape
    Tq, Tk = chunks
    bytes_per_feature = queries.q.dtype.itemsize + 4
    return cost(
        table,
        times=B * K,
        flops=10 * G * Tq * Tk * d,
        pair_bytes=2 * G * Tq * d * bytes_per_feature,
        visits=keys.kv.shape[3] // Tk,
        visit_bytes=2 * Tk * d * bytes_per_feature,
    )


def backward_on_chip(
    G: int,
    d: int,
    chunks: tuple[int, int],
    dtype: Any,
    packed: bool,
    biased: bool,
    adds: bool = True,
    readers: int = 1,
) -> OnChip:
    """Describe the kernel's VMEM for groups of G query heads of d features, of which `readers` read each key head.
    `adds`: it adds to given [dk, dv]."""
    Tq, Tk = chunks
    f32 = jnp.float32
    int32 = jnp.int32
    blocks: dict[str, tuple[pl.BlockSpec, Any]] = {
        "kv": (keys_block(Tk, d, readers), dtype),
        "q": (queries_block(G, Tq, d), dtype),
        "do": (queries_block(G, Tq, d), dtype),
        "rows": (query_rows_block(G, Tq), f32),
        "dkv": (key_sums_block(Tk, d), f32),
    }
    scratch = {
        "dq": pltpu.VMEM((3, G, Tq, d), f32),
        "arrived": pltpu.SemaphoreType.DMA((3,)),
        "left": pltpu.SemaphoreType.DMA((3,)),
        "waited": pltpu.SMEM((1,), int32),
    }
    if biased:
        blocks |= {"bias_row": (key_row_block(Tk), f32), "dbias_row": (key_head_row_block(Tk), f32)}
        scratch |= {"bias": pltpu.VMEM((Tk, LANES), f32), "dbias": pltpu.VMEM((Tk, LANES), f32)}
    if adds:
        scratch |= {"dkv_before": pltpu.VMEM((2, Tk, d), f32), "before": pltpu.SemaphoreType.DMA(())}
    if packed:
        blocks |= {"k_ids": (key_row_block(Tk), int32), "q_ids": (query_row_block(Tq), int32)}
        scratch["ids"] = pltpu.VMEM((Tk, LANES), int32)
    return OnChip(blocks, scratch, 4 * part_of_keys(Tq, Tk) * Tq)


@dataclass(frozen=True, kw_only=True)
class Refs:
    """Arrays that the kernel reads and writes, on the chip unless it says HBM. None: the call has it not."""

    kv: Any
    q: Any
    do: Any
    rows: Any
    dkv: Any
    dkv_given: Any
    """HBM; so are the other `given` ones."""
    dq: Any
    """Three buffers: of the previous, the present and the next visit."""
    dq_out: Any
    """HBM."""
    dq_given: Any
    arrived: Any
    left: Any
    """Semaphores of dq's copies, one for each buffer."""
    waited: Any
    """1 if the previous visit's dq has left already, because the next visit is of the same queries."""
    dkv_before: Any = None
    """Sums that the keys of the chunk already have, to which the kernel adds."""
    before: Any = None
    """Their semaphore."""
    bias_row: Any = None
    bias: Any = None
    """Columns."""
    dbias_row: Any = None
    dbias_row_given: Any = None
    dbias: Any = None
    """Columns of 128 shares, summed at the end."""
    k_ids: Any = None
    ids: Any = None
    """Columns of `k_ids`."""
    q_ids: Any = None


def _kernel(columns: Columns, references: dict[str, Any], logits: Logits, scale: float) -> None:
    here = Refs(**references)
    step = GridStep.now(columns)
    visit = Visit(step, here)
    keys = ChunkOfKeys(step, here, scale)
    keys_are_new = (step.p == 0) | (columns.k_of[step.before] != columns.k_of[step.p])
    keys_are_done = step.is_last_of_all | (columns.k_of[step.after] != columns.k_of[step.p])

    pl.when(step.is_first)(visit.begin)
    pl.when(keys_are_new)(keys.begin)
    slot = lax.rem(step.visit, 3)
    for masked in (False, True):
        pair = Pair(step, here, slot, logits, scale, masked)
        pl.when(step.is_masked == masked)(pair.add_gradients)
    pl.when(keys_are_done)(keys.end)
    pl.when(step.is_last)(visit.end)


class Visit(NamedTuple):
    """dq of a chunk of queries, which arrives from HBM, is added to, and leaves."""

    step: GridStep
    here: Refs

    def begin(self) -> None:
        """Manage three buffers for dq: those of the previous, the current and the next visit. A copy that was started
        two visits ago is complete by now."""
        step = self.step
        here = self.here
        chunk = step.q_chunk
        following = step.columns.q_of[jnp.minimum(step.columns.next_of[step.p], step.pairs - 1)]
        pl.when(step.visit == 0)(self._send_for_first)
        pl.when((step.visit >= 2) & (here.waited[0] == 0))(lambda: self._departure(step.visit - 2, chunk).wait())
        has_next = step.columns.next_of[step.p] < step.pairs
        returns = has_next & (step.visit >= 1)
        returns &= step.columns.q_of[step.before] == following
        here.waited[0] = returns.astype(jnp.int32)
        pl.when(returns)(lambda: self._departure(step.visit - 1, chunk).wait())
        pl.when(has_next)(lambda: self._arrival(step.visit + 1, following).start())
        self._arrival(step.visit, chunk).wait()

    def end(self) -> None:
        self._departure(self.step.visit, self.step.q_chunk).start()
        pl.when(self.step.is_last_of_all)(self._wait_for_all)

    def _send_for_first(self) -> None:
        self.here.waited[0] = 0
        self._arrival(self.step.visit, self.step.q_chunk).start()

    def _wait_for_all(self) -> None:
        step = self.step
        pl.when(step.visit > 0)(lambda: self._departure(step.visit - 1, step.q_chunk).wait())
        self._departure(step.visit, step.q_chunk).wait()

    def _arrival(self, visit: jax.Array, chunk: jax.Array):
        here = self.here
        source = self._place(here.dq_given, chunk)
        slot = lax.rem(visit, 3)
        return pltpu.make_async_copy(source, here.dq.at[slot], here.arrived.at[slot])

    def _departure(self, visit: jax.Array, chunk: jax.Array):
        here = self.here
        target = self._place(here.dq_out, chunk)
        slot = lax.rem(visit, 3)
        return pltpu.make_async_copy(here.dq.at[slot], target, here.left.at[slot])

    def _place(self, dq: Any, chunk: jax.Array):
        Tq = self.here.q.shape[1]
        return dq.at[self.step.b, self.step.h, :, pl.ds(chunk * Tq, Tq), :]


class ChunkOfKeys(NamedTuple):
    """dk, dv and dbias of a chunk of keys, which stay on the chip while its pairs add to them."""

    step: GridStep
    here: Refs
    scale: float

    def begin(self) -> None:
        here = self.here
        here.dkv[...] = jnp.zeros_like(here.dkv)
        if here.dkv_before is not None:
            self._arrival_before().start()
        if here.bias is not None:
            here.bias[...] = column(here.bias_row[...])
            here.dbias[...] = jnp.zeros_like(here.dbias)
        if here.ids is not None:
            here.ids[...] = column(here.k_ids[...])

    def end(self) -> None:
        here = self.here
        here.dkv[0] = self.scale * here.dkv[0]
        if here.dkv_before is not None:
            self._arrival_before().wait()
            here.dkv[...] += here.dkv_before[...]
        if here.bias is not None:
            here.dbias_row[...] = here.dbias[...].T.sum(axis=0, keepdims=True)

    def _arrival_before(self):
        """Copy the sums that these keys already have. They arrive while the pairs compute and are added at the end."""
        Tk = self.here.kv.shape[1]
        place = pl.ds(self.step.k_chunk * Tk, Tk)
        given = self.here.dkv_given.at[:, self.step.b, self.step.h, place, :]
        return pltpu.make_async_copy(given, self.here.dkv_before, self.here.before)


class Pair(NamedTuple):
    """A chunk of queries and a chunk of keys."""

    step: GridStep
    here: Refs
    slot: jax.Array
    """Buffer of the visit's dq."""
    logits: Logits
    scale: float
    masked: bool

    def add_gradients(self) -> None:
        """Add the pair's shares to dq, dk, dv and dbias."""
        Tq = self.here.q.shape[1]
        Tk = self.here.kv.shape[1]
        length = part_of_keys(Tq, Tk)
        parts = [slice(at, at + length) for at in range(0, Tk, length)]

        def head(g):
            s, dp = self._products(g, parts[0])
            for keys, following in pairwise(parts):
                ahead = self._products(g, following)
                self._add(g, keys, s, dp)
                s, dp = ahead
            self._add(g, parts[-1], s, dp)

        for_each_head(self.here.q.shape[0], head)

    def _products(self, g, keys: slice) -> tuple[jax.Array, jax.Array]:
        """Return the logits and dp of part of the keys, [keys, Tq]."""
        here = self.here
        s = matmul(here.kv[0, keys, :], here.q[g], ROWS_BY_ROWS) * self.logits.scale
        dp = matmul(here.kv[1, keys, :], here.do[g], ROWS_BY_ROWS)
        return s, dp

    def _add(self, g, keys: slice, s: jax.Array, dp: jax.Array) -> None:
        here = self.here
        slope = None
        if self.logits.softcap is not None:
            s, slope = capped(s, self.logits.softcap)
        p = jnp.exp2(self._masked(s, keys) - here.rows[0, g][None])
        ds = p * (dp - here.rows[1, g][None])
        if here.bias is not None:
            for at in range(0, ds.shape[1], LANES):
                here.dbias[keys, :] += ds[:, at : at + LANES]
        if slope is not None:
            ds = ds * slope
        ds = ds.astype(here.kv.dtype)
        p = p.astype(here.kv.dtype)
        here.dq[self.slot, g] += self.scale * matmul(here.kv[0, keys, :], ds, COLUMNS_BY_COLUMNS).T
        here.dkv[0, keys, :] += matmul(ds, here.q[g], ROWS_BY_COLUMNS)
        here.dkv[1, keys, :] += matmul(p, here.do[g], ROWS_BY_COLUMNS)

    def _masked(self, s: jax.Array, keys: slice) -> jax.Array:
        """Add the bias to logits, and hide those of keys that a query does not see."""
        here = self.here
        Tq = s.shape[1]
        if here.bias is not None:
            s += repeated(here.bias[keys, :], Tq)
        if not self.masked:
            return s
        visible = self.step.visible(keys, Tq, self.logits.window)
        if here.ids is not None:
            visible &= repeated(here.ids[keys, :], Tq) == here.q_ids[...]
        return jnp.where(visible, s, -jnp.inf)
