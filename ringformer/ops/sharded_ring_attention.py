"""Ring attention on global arrays in natural order."""

import math
from functools import partial
from typing import Any, Literal, Unpack, overload

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from ringformer.ops import argument_checks, layouts
from ringformer.ops.argument_checks import AnyArray, SegmentIds, Segments
from ringformer.ops.kernels.block_kernels import Kernel
from ringformer.ops.layouts import Layout
from ringformer.ops.ring import RingForm
from ringformer.ops.ring_attention import LogSumExp, Options, Output, ring_attention


class MeshOptions(Options, total=False):
    """Keywords of `sharded_ring_attention` that do not affect the type of the result."""

    axis_name: str
    batch_axes: str | tuple[str, ...] | None
    head_axis: str | None


@overload
def sharded_ring_attention(
    q: AnyArray, k: AnyArray, v: AnyArray, *, mesh: Mesh, return_lse: Literal[True], **options: Unpack[MeshOptions]
) -> tuple[Output, LogSumExp]: ...


@overload
def sharded_ring_attention(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    mesh: Mesh,
    return_lse: Literal[False] = False,
    **options: Unpack[MeshOptions],
) -> Output: ...


@overload
def sharded_ring_attention(
    q: AnyArray, k: AnyArray, v: AnyArray, *, mesh: Mesh, return_lse: bool, **options: Unpack[MeshOptions]
) -> Output | tuple[Output, LogSumExp]: ...


def sharded_ring_attention(
    q: Float[AnyArray, "B T H d"],
    k: Float[AnyArray, "B S K d"],
    v: Float[AnyArray, "B S K d"],
    *,
    mesh: Mesh,
    axis_name: str = "sp",
    batch_axes: str | tuple[str, ...] | None = None,
    head_axis: str | None = None,
    layout: Layout = "zigzag",
    causal: bool = True,
    segment_ids: SegmentIds = None,
    segments: Segments = "any",
    bias: Float[AnyArray, "B S"] | None = None,
    scale: float | None = None,
    q_chunk: int | None = None,
    k_chunk: int | None = None,
    kernel: Kernel = "xla",
    ulysses: int = 1,
    ring: RingForm = "one_way",
    window: int | None = None,
    sinks: Float[AnyArray, " H"] | None = None,
    logit_softcap: float | None = None,
    attend_first: int = 0,
    return_lse: bool = False,
) -> Output | tuple[Output, LogSumExp]:
    """Compute `ring_attention` of global arrays in natural order: they are moved into the layout on the ring of `mesh`,
    and the result is moved back.

    Args:
      q, k, v: as in `ring_attention`, but B, T, S, H and K are global; so are segment_ids and bias.
      mesh: any mesh that has `axis_name`, with all axes automatic or all explicit.
      batch_axes: mesh axes that shard B. head_axis: mesh axis that shards H and K.
      layout: layout of the tokens during the computation; the default balances causal work.
      causal, segment_ids, segments, bias, scale, q_chunk, k_chunk, kernel, ulysses, ring, window, sinks, logit_softcap,
        attend_first, return_lse: as in `ring_attention`.

    Returns:
      o in natural order, sharded over the named axes, or (o, lse).

    Raises:
      ValueError: as `ring_attention`; also if the mesh lacks an axis, or the layout cannot divide T or S.
    """
    if axis_name not in mesh.shape:
        raise ValueError(f"the mesh has no axis {axis_name!r}; its axes: {', '.join(mesh.axis_names)}")
    causal, return_lse, ulysses, q_chunk, k_chunk = argument_checks.as_options(
        causal, return_lse, ulysses, q_chunk, k_chunk
    )
    argument_checks.check(q, k, v, layout, causal, segment_ids, segments, bias)
    _check_rows(mesh, batch_axes, axis_name, q.shape[0])
    window, attend_first, logit_softcap = argument_checks.as_numbers(window, attend_first, logit_softcap)
    if head_axis is not None:
        if head_axis not in mesh.shape:
            raise ValueError(f"the mesh has no axis head_axis={head_axis!r}; its axes: {', '.join(mesh.axis_names)}")
        if k.shape[2] % mesh.shape[head_axis]:
            raise ValueError(
                f"the {mesh.shape[head_axis]} devices of {head_axis!r} do not divide {k.shape[2]} key heads"
            )
    n = mesh.shape[axis_name]
    if not causal:
        layout = "contiguous"
    if ulysses < 1 or n % ulysses:
        raise ValueError(f"ulysses={ulysses} does not divide the {n} devices of the mesh axis {axis_name!r}")
    shares = 1 if head_axis is None else mesh.shape[head_axis]
    if q.shape[2] % (shares * ulysses):
        of_axis = "" if head_axis is None else f" on each of the {shares} devices of {head_axis!r}"
        raise ValueError(f"ulysses={ulysses} does not divide the {q.shape[2]} query heads{of_axis}")
    for x in (q, k):
        layouts.check_layout(layout, x.shape[1], n // ulysses, ulysses)
    q_ids, k_ids = argument_checks.as_segment_ids(segment_ids)
    rows = PartitionSpec(batch_axes, axis_name)
    heads = PartitionSpec(batch_axes, axis_name, head_axis)
    sinks = argument_checks.as_sinks(sinks, q.shape[2])
    arrays: tuple[Any, ...] = (q, k, v, argument_checks.as_bias(bias), q_ids, k_ids, sinks)
    specs = (heads, heads, heads, rows, rows, rows, PartitionSpec(head_axis))
    if AxisType.Explicit in mesh.axis_types:
        given = arrays
        arrays = ()
        for x, spec in zip(given, specs, strict=True):
            resharded = None if x is None else jax.sharding.reshard(x, NamedSharding(mesh, spec))
            arrays = (*arrays, resharded)
    scale = None if scale is None else float(scale)
    options: dict[str, Any] = {"axis_name": axis_name, "layout": layout, "causal": causal, "scale": scale}
    options |= {"segments": segments, "q_chunk": q_chunk, "k_chunk": k_chunk, "kernel": kernel}
    options |= {
        "ulysses": ulysses,
        "ring": ring,
        "window": window,
        "logit_softcap": logit_softcap,
        "attend_first": attend_first,
    }
    return _on_mesh(mesh, specs, tuple(options.items()), return_lse, *arrays)


def _check_rows(mesh: Mesh, batch_axes: str | tuple[str, ...] | None, axis_name: str, B: int) -> None:
    """Raise ValueError unless `batch_axes` are axes of the mesh that divide B rows."""
    named = batch_axes or ()
    if isinstance(named, str):
        named = (named,)
    for name in named:
        if name not in mesh.shape:
            raise ValueError(f"the mesh has no axis {name!r} of batch_axes; its axes: {', '.join(mesh.axis_names)}")
        if name == axis_name:
            raise ValueError(f"batch_axes={batch_axes!r} has the axis of the ring, axis_name={axis_name!r}")
    shares = math.prod(mesh.shape[name] for name in named)
    if B % shares:
        raise ValueError(f"the {shares} devices of batch_axes={batch_axes!r} do not divide {B} rows")


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _on_mesh(mesh, specs, static_options, return_lse: bool, *arrays):
    """Run `ring_attention` between `layouts.enter` and `leave`, jitted so that an eager call does not run op by op."""
    options = dict(static_options)
    moved = options["layout"], options["axis_name"], options["ulysses"]

    def per_device(*arrays):
        *of_tokens, sinks = arrays
        q, k, v, bias, q_ids, k_ids = jax.tree.map(lambda x: layouts.enter(x, *moved), of_tokens)
        ids = (q_ids, k_ids)
        if q_ids is None or options["segments"] == "ascending":
            ids = q_ids
        out = ring_attention(q, k, v, bias=bias, segment_ids=ids, sinks=sinks, return_lse=return_lse, **options)
        if not isinstance(out, tuple):
            return layouts.leave(out, *moved)
        o, lse = out
        return layouts.leave(o, *moved), layouts.leave(lse.swapaxes(1, 2), *moved).swapaxes(1, 2)

    heads = specs[0]
    out_specs = heads
    if return_lse:
        out_specs = (heads, PartitionSpec(heads[0], heads[2], heads[1]))
    return jax.shard_map(per_device, mesh=mesh, in_specs=specs, out_specs=out_specs)(*arrays)
