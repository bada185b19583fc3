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

from functools import partial
from typing import Any

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
    OnChip,
    capped,
    column,
    for_each_head,
    grid_over_heads,
    like,
    matmul,
    repeated,
    sees,
    start,
    wait,
)
from ringformer.ops.kernels.pair_table import PairTable, cost, kernel_name
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
    (B, K, G, T, d), (Tq, Tk), size = queries.q.shape, chunks, queries.q.dtype.itemsize
    columns, count = table.columns, table.length
    packed = queries.segment_ids is not None and keys.segment_ids is not None
    readers = K // keys.kv.shape[2]
    blocks, scratch, _ = on_chip = forward_on_chip(G, d, chunks, queries.q.dtype, packed, bias is not None, readers)
    specs = {name: spec for name, (spec, _) in blocks.items()}
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    operands: dict[str, tuple[jax.Array, pl.BlockSpec]] = {"kv": (keys.kv, specs["kv"])}
    if bias is not None:
        operands["bias"] = bias[:, None], specs["bias"]
    if queries.segment_ids is not None and keys.segment_ids is not None:
        operands |= {"k_ids": (keys.segment_ids[:, None], specs["k_ids"]), "q_ids": (queries.segment_ids[:, None], hbm)}
    operands |= {"q_in": (queries.q, hbm), "o_in": (state.o, hbm), "m_in": (state.m, hbm), "l_in": (state.l, hbm)}
    first_state = len(columns) + len(operands) - 3
    names = (*operands, "o_out", "m_out", "l_out", *scratch)
    o, m, l = pl.pallas_call(  # noqa: E741
        partial(_kernel, names=names, logits=logits),
        out_shape=[like(x, queries.q) for x in state],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(columns),
            grid=(B, K, count),
            in_specs=[spec for _, spec in operands.values()],
            out_specs=[hbm] * 3,
            scratch_shapes=list(scratch.values()),
        ),
        input_output_aliases={first_state + i: i for i in range(3)},
        compiler_params=grid_over_heads(on_chip),
        cost_estimate=cost(table, B * K, 4 * G * Tq * Tk * d, 2 * Tk * d * size, T // Tq, G * Tq * d * (size + 8)),
        name=kernel_name("forward", table, B * K, T // Tq),
    )(*columns, *(x for x, _ in operands.values()))
    return Softmax(o, m, l)


def forward_on_chip(
    G: int, d: int, chunks: tuple[int, int], dtype: Any, packed: bool, biased: bool, readers: int = 1
) -> OnChip:
    """Describe the kernel's VMEM for groups of G query heads of d features, of which `readers` read each key head."""
    (Tq, Tk), N, f32, int32 = chunks, None, jnp.float32, jnp.int32

    def keys_at(b, h, p, q_of, k_of, *_):
        return 0, b, lax.div(h, readers), k_of[p], 0

    row = pl.BlockSpec((None, 1, Tk), lambda b, h, p, q_of, k_of, *_: (b, 0, k_of[p]))
    blocks: dict[str, tuple[pl.BlockSpec, Any]] = {"kv": (pl.BlockSpec((2, N, N, Tk, d), keys_at), dtype)}
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
        blocks["bias"], scratch["bias_column"] = (row, f32), pltpu.VMEM((Tk, LANES), f32)
    if packed:
        blocks["k_ids"] = row, int32
        scratch |= {"ids": pltpu.VMEM((2, 1, Tq), int32), "ids_column": pltpu.VMEM((Tk, LANES), int32)}
    return OnChip(blocks, scratch, Tk * Tq)


def _kernel(q_of, k_of, offset_of, used_of, visit_of, next_of, *refs, names, logits):
    here: dict[str, Any] = dict(zip(names, refs, strict=True))
    kv, biased, packed = here["kv"], "bias" in here, "q_ids" in here
    b, h, p, count = pl.program_id(0), pl.program_id(1), pl.program_id(2), pl.num_programs(2)
    _, G, Tq, _ = here["q"].shape
    Tk = kv.shape[1]
    visit = visit_of[p]
    slot = lax.rem(visit, 2)
    is_first = (p == 0) | (visit_of[jnp.maximum(p - 1, 0)] != visit)
    is_last = (p == count - 1) | (visit_of[jnp.minimum(p + 1, count - 1)] != visit)

    def arrivals(chunk, slot):
        rows, done = pl.ds(chunk * Tq, Tq), here["arrived"].at[slot]
        moves = [(here[f"{name}_in"].at[b, h, :, rows], name) for name in "qoml"]
        moves += [(here["q_ids"].at[b, :, rows], "ids")] if packed else []
        return [pltpu.make_async_copy(source, here[name].at[slot], done) for source, name in moves]

    def departures(chunk, slot):
        rows, done = pl.ds(chunk * Tq, Tq), here["left"].at[slot]
        moves = [(name, here[f"{name}_out"].at[b, h, :, rows]) for name in "oml"]
        return [pltpu.make_async_copy(here[name].at[slot], target, done) for name, target in moves]

    def send_for_next():
        pl.when(visit > 0)(lambda: wait(departures(q_of[p], 1 - slot)))
        start(arrivals(q_of[jnp.minimum(next_of[p], count - 1)], 1 - slot))

    @pl.when(is_first)
    def begin():
        pl.when(visit == 0)(lambda: start(arrivals(q_of[p], slot)))
        pl.when(next_of[p] < count)(send_for_next)
        wait(arrivals(q_of[p], slot))
        sublane = lax.broadcasted_iota(jnp.int32, (SUBLANES, Tq), 0)
        for g in range(G):
            here["m_row"][g] = here["m"][slot, g][None]
            here["l_rows"][g] = jnp.where(sublane == 0, here["l"][slot, g][None], 0.0)
            here["o_columns"][g] = here["o"][slot, g].T

    def write_logits(g, half, masked):
        """Write the logits of half of the keys, [Tk / 2, Tq], to the scratch; return their maxima [1, Tq]."""
        keys = slice(half * Tk // 2, (half + 1) * Tk // 2)
        s = matmul(kv[0, keys, :], here["q"][slot, g], ROWS_BY_ROWS) * logits.scale
        if logits.softcap is not None:
            s, _ = capped(s, logits.softcap)
        if biased:
            s += repeated(here["bias_column"][keys, :], Tq)
        if masked:
            visible = sees(offset_of[p], used_of[p], keys, Tq, logits.window)
            if packed:
                visible &= repeated(here["ids_column"][keys, :], Tq) == here["ids"][slot]
            s = jnp.where(visible, s, -jnp.inf)
        here["s"][half] = s
        return jnp.max(s, axis=0, keepdims=True)

    def weights(g, half, most, masked):
        keys = slice(half * Tk // 2, (half + 1) * Tk // 2)
        m, l, o = here["m_row"].at[g], here["l_rows"].at[g], here["o_columns"].at[g]  # noqa: E741
        new = jnp.maximum(m[...], most)
        shift = jnp.where(jnp.isneginf(new), 0.0, new) if masked or biased else new
        correction = jnp.exp2(m[...] - shift)
        weight = jnp.exp2(here["s"][half] - shift)
        m[...] = new
        l[...] = correction * l[...] + weight.reshape(-1, SUBLANES, Tq).sum(axis=0)
        o[...] = correction * o[...] + matmul(kv[1, keys, :], weight.astype(kv.dtype), COLUMNS_BY_COLUMNS)

    def pair(masked):
        if biased:
            here["bias_column"][...] = column(here["bias"][...])
        if masked and packed:
            here["ids_column"][...] = column(here["k_ids"][...])

        def head(g):
            first, second = write_logits(g, 0, masked), write_logits(g, 1, masked)
            weights(g, 0, first, masked)
            weights(g, 1, second, masked)

        for_each_head(G, head)

    for masked in (False, True):
        pl.when((used_of[p] > 0) == masked)(partial(pair, masked))

    def wait_for_all():
        pl.when(visit > 0)(lambda: wait(departures(q_of[p], 1 - slot)))
        wait(departures(q_of[p], slot))

    @pl.when(is_last)
    def end():
        for g in range(G):
            here["m"][slot, g] = here["m_row"][g, 0]
            here["l"][slot, g] = here["l_rows"][g].sum(axis=0)
            here["o"][slot, g] = here["o_columns"][g].T
        start(departures(q_of[p], slot))
        pl.when(p == count - 1)(wait_for_all)
