"""The ring on meshes with other axes too: whole arrays, sharded heads and batches, replicated keys."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ringformer.ops.dense_reference import dense_attention
from ringformer.ops.ring_attention import ring_attention
from ringformer.ops.sharded_ring_attention import sharded_ring_attention
from tests.dense import attention as exact
from tests.helpers import assert_close, packed_segments, relative_error, ring_mesh, values_and_gradients
from tests.ops.rings import HEADS, LSE, SPECS, B, arrays, dense, jit

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
ON_MESHES = [("zigzag", True, AUTO), ("striped", True, EXPLICIT), ("contiguous", False, EXPLICIT)]
MORE_MESHES = [
    ("zigzag", True, EXPLICIT),
    ("striped", True, AUTO),
    ("contiguous", True, AUTO),
    ("contiguous", True, EXPLICIT),
    ("contiguous", False, AUTO),
]


@pytest.mark.parametrize(
    "layout, causal, kind", [*ON_MESHES, *(pytest.param(*x, marks=pytest.mark.slow) for x in MORE_MESHES)]
)
def test_whole_arrays_on_a_mesh_with_batch_and_heads_sharded(layout, causal, kind):
    """`sharded_ring_attention` in natural order on (dp, tp, sp) = (2, 2, 2), automatic and explicit axes."""
    mesh = jax.make_mesh((2, 2, 2), ("dp", "tp", "sp"), axis_types=(kind,) * 3)
    T, S = 16, 16 if causal else 24
    inputs, cotangents = arrays(T, S, bias=True)
    ids = (packed_segments(1, B, T, 3), packed_segments(1 if causal else 2, B, S, 3))
    attention = partial(
        sharded_ring_attention,
        mesh=mesh,
        batch_axes="dp",
        head_axis="tp",
        layout=layout,
        causal=causal,
        segment_ids=ids,
        return_lse=True,
        q_chunk=4,
        k_chunk=4,
    )
    expected = dense(inputs, cotangents, causal=causal, segment_ids=ids)
    if kind == AxisType.Explicit:
        with jax.set_mesh(mesh):
            inputs, cotangents = jax.tree.map(jnp.asarray, (inputs, cotangents))
            placed = {"o": P("dp", "sp", "tp"), "lse": P("dp", "tp", "sp")}
            cotangents = {
                "do": jax.sharding.reshard(cotangents["do"], placed["o"]),
                "dlse": jax.sharding.reshard(cotangents["dlse"], placed["lse"]),
            }
            out = jit(partial(values_and_gradients, attention))(inputs, cotangents)
    else:
        out = jit(partial(values_and_gradients, attention))(inputs, cotangents)
    assert_close(out, expected)
    assert out["o"].sharding.is_equivalent_to(jax.NamedSharding(mesh, P("dp", "sp", "tp")), 4)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_whole_arrays_with_heads_exchanged(layout):
    """In natural order: rings of 4, of two devices a rank, beside heads over tp; 3 devices a rank."""
    inputs, cotangents = arrays(32, H=12, K=2, bias=True)
    mesh = jax.make_mesh((2, 4), ("tp", "sp"), axis_types=(AUTO,) * 2)
    options = dict(mesh=mesh, head_axis="tp", layout=layout, ulysses=2, return_lse=True)
    out = jit(partial(values_and_gradients, partial(sharded_ring_attention, **options)))(inputs, cotangents)
    assert_close(out, dense(inputs, cotangents))
    inputs, cotangents = arrays(24, H=6, K=3)
    options = dict(mesh=ring_mesh(6), layout=layout, ulysses=3, return_lse=True)
    out = jit(partial(values_and_gradients, partial(sharded_ring_attention, **options)))(inputs, cotangents)
    assert_close(out, dense(inputs, cotangents))
    with pytest.raises(ValueError, match="ulysses=4 does not divide the 6 devices"):
        sharded_ring_attention(**inputs, mesh=ring_mesh(6), ulysses=4)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_whole_arrays_in_windows_with_sinks(kind):
    """In natural order; the sinks are sharded with the heads."""
    mesh = jax.make_mesh((2, 4), ("tp", "sp"), axis_types=(kind,) * 2)
    inputs, cotangents = arrays(64, sinks=True)
    options = dict(window=19, logit_softcap=2.0, attend_first=3)
    attention = partial(sharded_ring_attention, mesh=mesh, head_axis="tp", return_lse=True, **options)
    expected = exact(inputs, cotangents, **options)
    if kind == AxisType.Explicit:
        with jax.set_mesh(mesh):
            inputs, cotangents = jax.tree.map(jnp.asarray, (inputs, cotangents))
            placed = {"do": P(None, "sp", "tp"), "dlse": P(None, "tp", "sp")}
            cotangents = {name: jax.sharding.reshard(x, placed[name]) for name, x in cotangents.items()}
            out = jit(partial(values_and_gradients, attention))(inputs, cotangents)
    else:
        out = jit(partial(values_and_gradients, attention))(inputs, cotangents)
    assert_close(out, expected)


def test_whole_arrays_without_lse_or_options():
    """The plainest call: a ring of 8 and three arrays."""
    inputs, _ = arrays(8 * 4)
    out = jax.jit(partial(sharded_ring_attention, mesh=ring_mesh(8)))(**inputs)
    assert relative_error(out, dense_attention(**inputs)) <= 1e-5


def test_keys_replicated_over_tp_collect_the_gradients_of_all_queries():
    """Query heads differ along tp, the one key head does not: its gradients are summed over tp, once."""
    mesh = jax.make_mesh((2, 4), ("tp", "sp"), axis_types=(AxisType.Auto,) * 2)
    inputs, cotangents = arrays(4 * 8, K=1, bias=True)
    heads, keys, lse = P(None, "sp", "tp"), P(None, "sp"), P(None, "tp", "sp")
    specs = dict(q=heads, k=keys, v=keys, bias=keys)
    attention = partial(ring_attention, axis_name="sp", return_lse=True, q_chunk=4, k_chunk=4)
    run = jax.shard_map(
        partial(values_and_gradients, attention),
        mesh=mesh,
        in_specs=(specs, dict(do=heads, dlse=lse)),
        out_specs=dict(o=heads, lse=lse, **{f"d{name}": spec for name, spec in specs.items()}),
    )
    assert_close(dict(jit(run)(inputs, cotangents)), dense(inputs, cotangents))


def test_a_replicated_batch_is_summed_once():
    """Nothing varies along dp: the mesh axis must change no gradient."""
    mesh = jax.make_mesh((2, 2), ("dp", "sp"), axis_types=(AxisType.Auto,) * 2)
    inputs, cotangents = arrays(2 * 8)
    run = jax.shard_map(
        partial(values_and_gradients, partial(ring_attention, axis_name="sp", return_lse=True)),
        mesh=mesh,
        in_specs=(P(None, "sp"), dict(do=HEADS, dlse=LSE)),
        out_specs={name: SPECS[name] for name in ("o", "lse", "dq", "dk", "dv")},
    )
    assert_close(dict(jit(run)(inputs, cotangents)), dense(inputs, cotangents))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(ulysses=0), "ulysses=0 does not divide the 8 devices of the mesh axis 'sp'"),
        (dict(head_axis="tp"), "the mesh has no axis head_axis='tp'; its axes: sp"),
        (dict(axis_name="ring"), "the mesh has no axis 'ring'; its axes: sp"),
    ],
)
def test_arguments_that_no_mesh_has(options, message):
    x = jnp.ones((1, 32, 2, 8))
    with pytest.raises(ValueError, match=message):
        sharded_ring_attention(x, x, x, mesh=ring_mesh(8), **options)


def test_key_heads_that_an_axis_does_not_divide():
    mesh = jax.make_mesh((2, 4), ("tp", "sp"), axis_types=(AUTO,) * 2)
    q, k = jnp.ones((1, 32, 2, 8)), jnp.ones((1, 32, 1, 8))
    with pytest.raises(ValueError, match="the 2 devices of 'tp' do not divide 1 key heads"):
        sharded_ring_attention(q, k, k, mesh=mesh, head_axis="tp")
