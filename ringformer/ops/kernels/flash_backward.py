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

from functools import partial
from typing import Any

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
    OnChip,
    capped,
    column,
    for_each_head,
    grid_over_heads,
    like,
    matmul,
    part_of_keys,
    repeated,
    sees,
)
from ringformer.ops.kernels.pair_table import PairTable, cost, kernel_name
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
    (B, K, G, _, d), S, (Tq, Tk) = queries.q.shape, keys.kv.shape[3], chunks
    size = queries.q.dtype.itemsize
    f32 = jnp.float32
    columns, count = table.columns, table.length
    packed = queries.segment_ids is not None and keys.segment_ids is not None
    readers = K // keys.kv.shape[2]
    blocks, scratch, _ = on_chip = backward_on_chip(
        G, d, chunks, queries.q.dtype, packed, bias is not None, adds=dkv is not None, readers=readers
    )
    specs = {name: spec for name, (spec, _) in blocks.items()}
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    arrays = {"kv": keys.kv, "q": queries.q, "do": do, "rows": rows}
    if bias is not None:
        arrays["bias_row"] = bias[:, None]
    if queries.segment_ids is not None and keys.segment_ids is not None:
        arrays |= {"k_ids": keys.segment_ids[:, None], "q_ids": queries.segment_ids[:, None]}
    operands: dict[str, tuple[jax.Array, pl.BlockSpec]] = {name: (x, specs[name]) for name, x in arrays.items()}
    zeros = vary_like([jnp.zeros((2, B, K, S, d), f32), jnp.zeros((B, K, 1, S), f32)], dq)
    # Keys that no pair visits keep their values.
    grown = {"dq_out": (dq, hbm), "dkv": (zeros[0] if dkv is None else dkv, specs["dkv"])}
    grown |= {"dbias_row": (zeros[1], specs["dbias_row"])} if bias is not None else {}
    given = {f"{name}_given": (x, hbm) for name, (x, _) in grown.items()}
    first = len(columns) + len(operands)
    operands |= given
    names = (*operands, *grown, *scratch)
    out = pl.pallas_call(
        partial(_kernel, names=names, logits=logits, scale=scale),
        out_shape=[like(x, queries.q) for x, _ in grown.values()],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(columns),
            grid=(B, K, count),
            in_specs=[spec for _, spec in operands.values()],
            out_specs=[spec for _, spec in grown.values()],
            scratch_shapes=list(scratch.values()),
        ),
        input_output_aliases={first + i: i for i in range(len(grown))},
        compiler_params=grid_over_heads(on_chip),
        cost_estimate=cost(
            table, B * K, 10 * G * Tq * Tk * d, 2 * G * Tq * d * (size + 4), S // Tk, 2 * Tk * d * (size + 4)
        ),
        name=kernel_name("backward" if dkv is None else "backward_adding", table, B * K, S // Tk),
    )(*columns, *(x for x, _ in operands.values()))
    return out[0], out[1], out[2][:, :, 0] if bias is not None else None


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
    (Tq, Tk), N, f32, int32 = chunks, None, jnp.float32, jnp.int32

    def queries_at(b, h, p, q_of, *_):
        return b, h, 0, q_of[p], 0

    def keys_at(b, h, p, q_of, k_of, *_):
        return 0, b, lax.div(h, readers), k_of[p], 0

    def sums_at(b, h, p, q_of, k_of, *_):
        return 0, b, h, k_of[p], 0

    def rows_at(b, h, p, q_of, *_):
        return 0, b, h, 0, q_of[p]

    of_queries = pl.BlockSpec((None, None, G, Tq, d), queries_at)
    of_keys = pl.BlockSpec((2, None, None, Tk, d), keys_at)
    query_row = pl.BlockSpec((None, 1, Tq), lambda b, h, p, q_of, *_: (b, 0, q_of[p]))
    key_row = pl.BlockSpec((None, 1, Tk), lambda b, h, p, q_of, k_of, *_: (b, 0, k_of[p]))
    key_head_row = pl.BlockSpec((None, None, 1, Tk), lambda b, h, p, q_of, k_of, *_: (b, h, 0, k_of[p]))
    blocks: dict[str, tuple[pl.BlockSpec, Any]] = {
        "kv": (of_keys, dtype),
        "q": (of_queries, dtype),
        "do": (of_queries, dtype),
        "rows": (pl.BlockSpec((2, N, N, G, Tq), rows_at), f32),
        "dkv": (pl.BlockSpec((2, N, N, Tk, d), sums_at), f32),
    }
    scratch = {
        "dq": pltpu.VMEM((3, G, Tq, d), f32),
        "arrived": pltpu.SemaphoreType.DMA((3,)),
        "left": pltpu.SemaphoreType.DMA((3,)),
        "waited": pltpu.SMEM((1,), int32),
    }
    if biased:
        blocks |= {"bias_row": (key_row, f32), "dbias_row": (key_head_row, f32)}
        scratch |= {"bias": pltpu.VMEM((Tk, LANES), f32), "dbias": pltpu.VMEM((Tk, LANES), f32)}
    if adds:
        scratch |= {"dkv_before": pltpu.VMEM((2, Tk, d), f32), "before": pltpu.SemaphoreType.DMA(())}
    if packed:
        blocks |= {"k_ids": (key_row, int32), "q_ids": (query_row, int32)}
        scratch["ids"] = pltpu.VMEM((Tk, LANES), int32)
    return OnChip(blocks, scratch, 4 * part_of_keys(Tq, Tk) * Tq)


def _kernel(q_of, k_of, offset_of, used_of, visit_of, next_of, *refs, names, logits, scale):
    here: dict[str, Any] = dict(zip(names, refs, strict=True))
    kv, q, do, rows, dkv = (here[name] for name in ("kv", "q", "do", "rows", "dkv"))
    biased, packed, adds = "bias" in here, "ids" in here, "dkv_before" in here
    b, h, p, count = pl.program_id(0), pl.program_id(1), pl.program_id(2), pl.num_programs(2)
    G, Tq, _ = q.shape
    Tk = kv.shape[1]
    visit = visit_of[p]
    before, after = jnp.maximum(p - 1, 0), jnp.minimum(p + 1, count - 1)
    is_first, is_last = (p == 0) | (visit_of[before] != visit), (p == count - 1) | (visit_of[after] != visit)
    keys_are_new = (p == 0) | (k_of[before] != k_of[p])
    keys_are_done = (p == count - 1) | (k_of[after] != k_of[p])

    def arrival(visit, chunk):
        place, slot = pl.ds(chunk * Tq, Tq), lax.rem(visit, 3)
        return pltpu.make_async_copy(
            here["dq_out_given"].at[b, h, :, place, :], here["dq"].at[slot], here["arrived"].at[slot]
        )

    def departure(visit, chunk):
        place, slot = pl.ds(chunk * Tq, Tq), lax.rem(visit, 3)
        return pltpu.make_async_copy(here["dq"].at[slot], here["dq_out"].at[b, h, :, place, :], here["left"].at[slot])

    def send_for_first():
        here["waited"][0] = 0
        arrival(visit, q_of[p]).start()

    @pl.when(is_first)
    def begin():
        """Manage three buffers for dq: those of the previous, the current and the next visit. A copy that was started
        two visits ago is complete by now."""
        chunk, following = q_of[p], q_of[jnp.minimum(next_of[p], count - 1)]
        pl.when(visit == 0)(send_for_first)
        pl.when((visit >= 2) & (here["waited"][0] == 0))(lambda: departure(visit - 2, chunk).wait())
        has_next = next_of[p] < count
        returns = has_next & (visit >= 1) & (q_of[before] == following)  # to the queries of the previous visit
        here["waited"][0] = returns.astype(jnp.int32)
        pl.when(returns)(lambda: departure(visit - 1, chunk).wait())
        pl.when(has_next)(lambda: arrival(visit + 1, following).start())
        arrival(visit, chunk).wait()

    def arrival_before():
        """Copy the sums that these keys already have. They arrive while the pairs compute and are added at the end."""
        place = pl.ds(k_of[p] * Tk, Tk)
        return pltpu.make_async_copy(here["dkv_given"].at[:, b, h, place, :], here["dkv_before"], here["before"])

    @pl.when(keys_are_new)
    def begin_keys():
        dkv[...] = jnp.zeros_like(dkv)
        if adds:
            arrival_before().start()
        if biased:
            here["bias"][...] = column(here["bias_row"][...])
            here["dbias"][...] = jnp.zeros_like(here["dbias"])
        if packed:
            here["ids"][...] = column(here["k_ids"][...])

    slot = lax.rem(visit, 3)

    def products(g, keys):
        return (
            matmul(kv[0, keys, :], q[g], ROWS_BY_ROWS) * logits.scale,
            matmul(kv[1, keys, :], do[g], ROWS_BY_ROWS),
        )

    def gradients(g, keys, logits_and_dp, masked):
        s, dp = logits_and_dp
        if logits.softcap is not None:
            s, slope = capped(s, logits.softcap)
        if biased:
            s += repeated(here["bias"][keys, :], Tq)
        if masked:
            visible = sees(offset_of[p], used_of[p], keys, Tq, logits.window)
            if packed:
                visible &= repeated(here["ids"][keys, :], Tq) == here["q_ids"][...]
            s = jnp.where(visible, s, -jnp.inf)
        p_ = jnp.exp2(s - rows[0, g][None])
        ds = p_ * (dp - rows[1, g][None])
        if biased:
            for at in range(0, Tq, LANES):
                here["dbias"][keys, :] += ds[:, at : at + LANES]
        if logits.softcap is not None:
            ds = ds * slope
        ds, p_ = ds.astype(kv.dtype), p_.astype(kv.dtype)
        here["dq"][slot, g] += scale * matmul(kv[0, keys, :], ds, COLUMNS_BY_COLUMNS).T
        dkv[0, keys, :] += matmul(ds, q[g], ROWS_BY_COLUMNS)
        dkv[1, keys, :] += matmul(p_, do[g], ROWS_BY_COLUMNS)

    def pair(masked):
        length = part_of_keys(Tq, Tk)
        parts = [slice(at, at + length) for at in range(0, Tk, length)]

        def head(g):
            current = products(g, parts[0])
            for keys, following in zip(parts, [*parts[1:], None], strict=True):
                ahead = None if following is None else products(g, following)
                gradients(g, keys, current, masked)
                current = ahead

        for_each_head(G, head)

    for masked in (False, True):
        pl.when((used_of[p] > 0) == masked)(partial(pair, masked))

    @pl.when(keys_are_done)
    def end_keys():
        dkv[0] = scale * dkv[0]
        if adds:
            arrival_before().wait()
            dkv[...] += here["dkv_before"][...]
        if biased:
            here["dbias_row"][...] = here["dbias"][...].T.sum(axis=0, keepdims=True)

    def wait_for_all():
        pl.when(visit > 0)(lambda: departure(visit - 1, q_of[p]).wait())
        departure(visit, q_of[p]).wait()

    @pl.when(is_last)
    def end():
        departure(visit, q_of[p]).start()
        pl.when(p == count - 1)(wait_for_all)
