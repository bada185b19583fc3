"""What the tests of the ring share: whole arrays, the dense oracle, and the op inside a `shard_map` of our own."""

from functools import partial

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from ringformer.ops import layouts
from ringformer.ops.dense_reference import dense_attention
from ringformer.ops.ring_attention import ring_attention
from tests.helpers import normal, packed_segments, ring_mesh, values_and_gradients

jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""These programs run for milliseconds and compile for seconds: do not let LLVM polish them."""

jit_as_written = partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}
)
"""With every cast through bfloat16, of which XLA would drop some: where rounding is measured."""

LAYOUTS = ("contiguous", "striped", "zigzag")
B, H, K, d = 2, 4, 2, 8
ROWS, HEADS, LSE = P(None, "sp"), P(None, "sp"), P(None, None, "sp")
SPECS = dict(o=HEADS, lse=LSE, dq=HEADS, dk=HEADS, dv=HEADS, dbias=ROWS, dsinks=P())


def arrays(T, S=None, *, B=B, H=H, K=K, d=d, bias=False, sinks=False, seed=0):
    """Random inputs and cotangents of whole arrays in natural order."""
    S = T if S is None else S
    inputs = dict(q=normal(seed, B, T, H, d), k=normal(seed + 1, B, S, K, d), v=normal(seed + 2, B, S, K, d))
    if bias:
        inputs["bias"] = normal(seed + 3, B, S)
    if sinks:
        inputs["sinks"] = normal(seed + 6, H)
    return inputs, dict(do=normal(seed + 4, B, T, H, d), dlse=normal(seed + 5, B, H, T))


def segments_with_empty_rows(T):
    """Packed documents with edges inside shards, and some queries whose segment has no key at all."""
    ids = packed_segments(7, B, T, min(4, T))
    q_ids = ids.copy()
    q_ids[0, T // 3 : T // 3 + 2] = q_ids[1, -1] = -1
    return q_ids, ids


@partial(jax.jit, static_argnames=("causal", "scale", "window"))
def dense(inputs, cotangents, segment_ids=None, causal=True, scale=None, window=None):
    """The oracle's outputs and gradients, float32."""
    options = dict(segment_ids=segment_ids, causal=causal, scale=scale, window=window, return_lse=True)
    return values_and_gradients(partial(dense_attention, **options), inputs, cotangents)


def on_ring(
    n, layout, inputs, cotangents, segment_ids=None, *, check_vma=True, compile=jit, ulysses=1, rings=1, **options
):
    """The same from `ring_attention` inside a `shard_map` of our own; the gradients are taken inside it too. On n
    devices, of which each `ulysses` are one rank, and the ranks form so many `rings`."""
    sinks = {name: x for name, x in inputs.items() if name == "sinks"}  # one number per head, on every device
    inputs = {name: x for name, x in inputs.items() if name != "sinks"}
    bring, home = {}, {}
    for length in {x.shape[1] for x in inputs.values()}:
        fits = options.get("causal", True)
        bring[length] = layouts.permutation(layout, length, n // ulysses, rings) if fits else np.arange(length)
        home[length] = np.argsort(bring[length])
    inputs = {name: x[:, bring[x.shape[1]]] for name, x in inputs.items()}
    T = inputs["q"].shape[1]
    cotangents = dict(do=cotangents["do"][:, bring[T]], dlse=cotangents["dlse"][:, :, bring[T]])
    if segment_ids is not None:
        inputs["segment_ids"] = jax.tree.map(lambda x: x[:, bring[x.shape[1]]], segment_ids)
    in_specs = dict.fromkeys(inputs, ROWS) | dict.fromkeys(sinks, P())
    inputs |= sinks
    given = dict(layout=layout, ulysses=ulysses, rings=rings, return_lse=True)
    attention = partial(ring_attention, axis_name="sp", **given, **options)
    run = jax.shard_map(
        partial(values_and_gradients, attention),
        mesh=ring_mesh(n),
        in_specs=(in_specs, dict(do=HEADS, dlse=LSE)),
        out_specs={name: SPECS[name] for name in ("o", "lse", *(f"d{x}" for x in inputs if x != "segment_ids"))},
        check_vma=check_vma,
    )
    out = {name: np.asarray(x) for name, x in compile(run)(inputs, cotangents).items()}
    tokens = {"lse": 2, "dsinks": None}
    axes = {name: tokens.get(name, 1) for name in out}
    return {name: x if axes[name] is None else x.take(home[x.shape[axes[name]]], axes[name]) for name, x in out.items()}
