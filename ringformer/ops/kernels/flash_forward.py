"""The forward block as a TPU kernel (Pallas): FlashAttention's recurrence with its state as input and output.

    grid     batch x key head x pair; the pairs of a chunk of queries one after the other (`pair_table.py`)

                        k chunk -->                  a visit: all keys of a chunk of queries
               q chunk  [p0][p1][p2]                  first pair   o, m, l arrive; those of the next visit are requested
                  |     [p3][p4][p5][p6]              every pair   o, m, l accumulate on the chip, in float32
                  v                                   last pair    o, m, l leave

    a pair   transposed, keys by queries, so that per-query values lie along the lanes. For each half of the keys, in
             two stages:

               logits    s = c k q^T, and their maximum over the keys
               weights   m' = max(m, s);  p = 2^(s - m');  l = 2^(m - m') l + p;  o = 2^(m - m') o + v^T p

             The source has the logits of the second half before the weights of the first. The compiler keeps this
             order, so the matrix units work on one while the vector units work on the other.

Logits are in units of log 2 (c = scale / log 2), which saves one multiplication per logit. During a visit, o is also
transposed, and l is kept as 8 partial sums, one per sublane. Explicit DMA moves everything except k and v between
visits, so that a grid step does little besides its pair.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringformer.ops.blockwise_attention import Keys, Queries
from ringformer.ops.kernels.kernel_tools import (
    COLUMNS_BY_COLUMNS,
    LANES,
    ROWS_BY_ROWS,
    SUBLANES,
    Logits,
    capped,
    column,
    for_each_head,
    matmul,
    repeated,
    start,
    wait,
)
from ringformer.ops.kernels.pair_call import HBM, GridStep, OnChip, call_over_pairs, key_row_block, keys_block
from ringformer.ops.kernels.pair_table import Columns, PairTable, cost, kernel_name
from ringformer.ops.online_softmax import Softmax


def flash_forward(
    state: Softmax,
    queries: Queries,
    keys: Keys,
    bias: jax.Array | None,
    table: PairTable,
    chunks: tuple[int, int],
    logits: Logits,
) -> Softmax:
    """Add the pairs of a table to the running softmax, whose m is in units of log 2. `chunks` are the tokens of a chunk
    of (queries, keys). If there are more groups of query heads than key heads, neighbours read the same key head."""
    B, K, G, T, d = queries.q.shape
    packed = queries.segment_ids is not None and keys.segment_ids is not None
    readers = K // keys.kv.shape[2]
    on_chip = forward_on_chip(G, d, chunks, queries.q.dtype, packed, bias is not None, readers)
    blocks = {"kv": keys.kv}
    copied = {"q_in": (queries.q, HBM)}
    if bias is not None:
        blocks["bias"] = bias[:, None]
    if queries.segment_ids is not None and keys.segment_ids is not None:
        blocks["k_ids"] = keys.segment_ids[:, None]
        copied["q_ids"] = (queries.segment_ids[:, None], HBM)
    o, m, l = call_over_pairs(  # noqa: E741
        partial(_kernel, logits=logits),
        table,
        operands=on_chip.place(blocks) | copied,
        results={"o_out": (state.o, HBM), "m_out": (state.m, HBM), "l_out": (state.l, HBM)},
        on_chip=on_chip,
        q=queries.q,
        cost_estimate=_cost(table, queries, chunks),
        name=kernel_name("forward", table, B * K, T // chunks[0]),
    )
    return Softmax(o, m, l)


def _cost(table: PairTable, queries: Queries, chunks: tuple[int, int]) -> pl.CostEstimate:
    B, K, G, T, d = queries.q.shape
    Tq, Tk = chunks
    size = queries.q.dtype.itemsize
    return cost(
        table,
        times=B * K,
        flops=4 * G * Tq * Tk * d,
        pair_bytes=2 * Tk * d * size,
        visits=T // Tq,
        visit_bytes=G * Tq * d * (size + 8),
    )


def forward_on_chip(
    G: int, d: int, chunks: tuple[int, int], dtype: Any, packed: bool, biased: bool, readers: int = 1
) -> OnChip:
    """Describe the kernel's VMEM for groups of G query heads of d features, of which `readers` read each key head."""
    Tq, Tk = chunks
    f32 = jnp.float32
    int32 = jnp.int32
    blocks: dict[str, tuple[pl.BlockSpec, Any]] = {"kv": (keys_block(Tk, d, readers), dtype)}
    scratch = {
        "q": pltpu.VMEM((2, G, Tq, d), dtype),
        "o": pltpu.VMEM((2, G, Tq, d), f32),
        "m": pltpu.VMEM((2, G, Tq), f32),
        "l": pltpu.VMEM((2, G, Tq), f32),
        "o_columns": pltpu.VMEM((G, d, Tq), f32),
        "m_row": pltpu.VMEM((G, 1, Tq), f32),
        "l_rows": pltpu.VMEM((G, SUBLANES, Tq), f32),
        "s": pltpu.VMEM((2, Tk // 2, Tq), f32),
        "arrived": pltpu.SemaphoreType.DMA((2,)),
        "left": pltpu.SemaphoreType.DMA((2,)),
    }
    if biased:
        blocks["bias"] = key_row_block(Tk), f32
        scratch["bias_column"] = pltpu.VMEM((Tk, LANES), f32)
    if packed:
        blocks["k_ids"] = key_row_block(Tk), int32
        scratch |= {"ids": pltpu.VMEM((2, 1, Tq), int32), "ids_column": pltpu.VMEM((Tk, LANES), int32)}
    return OnChip(blocks, scratch, Tk * Tq)


@dataclass(frozen=True, kw_only=True)
class Refs:
    """Arrays that the kernel reads and writes, on the chip unless it says HBM. None: the call has it not."""

    kv: Any
    q_in: Any
    o_given: Any
    m_given: Any
    l_given: Any
    o_out: Any
    m_out: Any
    l_out: Any
    """HBM."""
    q: Any
    o: Any
    m: Any
    l: Any  # noqa: E741
    """Two buffers each: of this visit and of its neighbour."""
    arrived: Any
    left: Any
    """Semaphores of their copies, one for each buffer."""
    o_columns: Any
    m_row: Any
    l_rows: Any
    """The state during a visit: o transposed, and l as 8 partial sums."""
    s: Any
    """Logits of the two halves of the keys."""
    bias: Any = None
    bias_column: Any = None
    k_ids: Any = None
    ids_column: Any = None
    """Columns of `k_ids`."""
    q_ids: Any = None
    """HBM."""
    ids: Any = None
    """Two buffers of `q_ids`."""


def _kernel(columns: Columns, references: dict[str, Any], logits: Logits) -> None:
    here = Refs(**references)
    step = GridStep.now(columns)
    slot = lax.rem(step.visit, 2)
    visit = Visit(step, here, slot)
    pl.when(step.is_first)(visit.begin)
    for masked in (False, True):
        pair = Pair(step, here, slot, logits, masked)
        pl.when(step.is_masked == masked)(pair.add_keys)
    pl.when(step.is_last)(visit.end)


class Visit(NamedTuple):
    """The state of a chunk of queries, which arrives from HBM, is added to, and leaves."""

    step: GridStep
    here: Refs
    slot: jax.Array

    def begin(self) -> None:
        step, here, slot = self
        pl.when(step.visit == 0)(lambda: start(self._arrivals(step.q_chunk, slot)))
        pl.when(step.columns.next_of[step.p] < step.pairs)(self._send_for_next)
        wait(self._arrivals(step.q_chunk, slot))
        _, G, Tq, _ = here.q.shape
        sublane = lax.broadcasted_iota(jnp.int32, (SUBLANES, Tq), 0)
        for g in range(G):
            here.m_row[g] = here.m[slot, g][None]
            here.l_rows[g] = jnp.where(sublane == 0, here.l[slot, g][None], 0.0)
            here.o_columns[g] = here.o[slot, g].T

    def end(self) -> None:
        step, here, slot = self
        for g in range(here.q.shape[1]):
            here.m[slot, g] = here.m_row[g, 0]
            here.l[slot, g] = here.l_rows[g].sum(axis=0)
            here.o[slot, g] = here.o_columns[g].T
        start(self._departures(step.q_chunk, slot))
        pl.when(step.is_last_of_all)(self._wait_for_all)

    def _send_for_next(self) -> None:
        step = self.step
        pl.when(step.visit > 0)(lambda: wait(self._departures(step.q_chunk, 1 - self.slot)))
        following = step.columns.q_of[jnp.minimum(step.columns.next_of[step.p], step.pairs - 1)]
        start(self._arrivals(following, 1 - self.slot))

    def _wait_for_all(self) -> None:
        step = self.step
        pl.when(step.visit > 0)(lambda: wait(self._departures(step.q_chunk, 1 - self.slot)))
        wait(self._departures(step.q_chunk, self.slot))

    def _arrivals(self, chunk: jax.Array, slot: jax.Array) -> list[Any]:
        here = self.here
        rows = self._rows(chunk)
        b = self.step.b
        h = self.step.h
        moves = [
            (here.q_in.at[b, h, :, rows], here.q),
            (here.o_given.at[b, h, :, rows], here.o),
            (here.m_given.at[b, h, :, rows], here.m),
            (here.l_given.at[b, h, :, rows], here.l),
        ]
        if here.q_ids is not None:
            moves.append((here.q_ids.at[b, :, rows], here.ids))
        done = here.arrived.at[slot]
        return [pltpu.make_async_copy(source, target.at[slot], done) for source, target in moves]

    def _departures(self, chunk: jax.Array, slot: jax.Array) -> list[Any]:
        here = self.here
        rows = self._rows(chunk)
        done = here.left.at[slot]
        copies = []
        for source, target in ((here.o, here.o_out), (here.m, here.m_out), (here.l, here.l_out)):
            place = target.at[self.step.b, self.step.h, :, rows]
            copies.append(pltpu.make_async_copy(source.at[slot], place, done))
        return copies

    def _rows(self, chunk: jax.Array):
        Tq = self.here.q.shape[2]
        return pl.ds(chunk * Tq, Tq)


class Pair(NamedTuple):
    """A chunk of queries and a chunk of keys."""

    step: GridStep
    here: Refs
    slot: jax.Array
    """Buffer of the visit's queries."""
    logits: Logits
    masked: bool

    def add_keys(self) -> None:
        """Add the keys to the running softmax of the queries."""
        here = self.here
        if here.bias is not None:
            here.bias_column[...] = column(here.bias[...])
        if self.masked and here.k_ids is not None:
            here.ids_column[...] = column(here.k_ids[...])

        def head(g):
            first = self._write_logits(g, 0)
            second = self._write_logits(g, 1)
            self._add(g, 0, first)
            self._add(g, 1, second)

        for_each_head(here.q.shape[1], head)

    def _keys(self, half: int) -> slice:
        Tk = self.here.kv.shape[1]
        return slice(half * Tk // 2, (half + 1) * Tk // 2)

    def _write_logits(self, g, half: int) -> jax.Array:
        """Write the logits of half of the keys, [Tk / 2, Tq], to the scratch; return their maxima [1, Tq]."""
        here = self.here
        keys = self._keys(half)
        s = matmul(here.kv[0, keys, :], here.q[self.slot, g], ROWS_BY_ROWS) * self.logits.scale
        Tq = s.shape[1]
        if self.logits.softcap is not None:
            s, _ = capped(s, self.logits.softcap)
        if here.bias is not None:
            s += repeated(here.bias_column[keys, :], Tq)
        if self.masked:
            visible = self.step.visible(keys, Tq, self.logits.window)
            if here.k_ids is not None:
                visible &= repeated(here.ids_column[keys, :], Tq) == here.ids[self.slot]
            s = jnp.where(visible, s, -jnp.inf)
        here.s[half] = s
        return jnp.max(s, axis=0, keepdims=True)

    def _add(self, g, half: int, most: jax.Array) -> None:
        """Add half of the keys, whose logits have these maxima, to o, m and l."""
        here = self.here
        keys = self._keys(half)
        m = here.m_row.at[g]
        l = here.l_rows.at[g]  # noqa: E741
        o = here.o_columns.at[g]
        new = jnp.maximum(m[...], most)
        has_hidden_rows = self.masked or here.bias is not None
        shift = jnp.where(jnp.isneginf(new), 0.0, new) if has_hidden_rows else new
        correction = jnp.exp2(m[...] - shift)
        weight = jnp.exp2(here.s[half] - shift)
        m[...] = new
        l[...] = correction * l[...] + weight.reshape(-1, SUBLANES, weight.shape[1]).sum(axis=0)
        o[...] = correction * o[...] + matmul(here.kv[1, keys, :], weight.astype(here.kv.dtype), COLUMNS_BY_COLUMNS)
