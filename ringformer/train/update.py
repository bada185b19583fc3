"""The optimizer's update of the parameters on one device, inside `shard_map`.

Moments that `optimizer.offload` keeps in the host's memory are updated there in place, a few rows at a time: layers of
stacked weights, or rows of an embedding. Both directions of the link between device and host are busy at once:

    rows i of the first half of the arrays leave     | rows i+1 of the second half arrive
    rows i of the second half leave                  | rows i+1 of the first half arrive

Half of the arrays is one moment of AdamW. The program states this order, because a compiler that may read an array
after a write to it copies the array.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from ringformer.parallel.parameters import by_name

ROW_BYTES = 64 * 2**20
"""Bytes of a moment that travel at once. A layer of a large model takes more, and then travels alone."""

SUBLANES = 8
"""Rows of a tile of a TPU's memory: a matrix is cut between tiles."""


class Portion(NamedTuple):
    """Parameters that are updated together, with what their update needs; all by name."""

    params: dict[str, jax.Array]
    opt_state: Any
    """The optimizer's state, whose moments are dicts of the names in `params`."""
    grads: dict[str, jax.Array]


Updated = tuple[dict[str, jax.Array], Any]
"""Parameters and the optimizer's state, as in a `Portion`."""


def apply_update(
    optimizer: optax.GradientTransformation,
    params: dict[str, Any],
    opt_state: Any,
    grads: dict[str, Any],
    scale: Float32[Array, ""],
    sound: Bool[Array, ""],
) -> tuple[dict[str, Any], Any]:
    """Return the parameters and the optimizer's state after its update with the gradients, times `scale`; if the step
    is not `sound`, return them unchanged.

    Args:
      optimizer: elementwise, and the same function of parameters in a flat dict of names (`by_name`).
      opt_state: arrays in host memory are updated there.
    """
    update = partial(_update, optimizer, scale, sound)
    whole = Portion(by_name(params), _with_named_moments(opt_state), by_name(grads))
    updated = []
    on_device, groups = _groups(whole)
    if on_device:
        updated.append(update(_only(whole, on_device)))
    for names in groups:
        first_row = _zero_after(updated)
        updated.append(_update_in_host(update, _only(whole, names), first_row))
    return _joined(params, opt_state, updated)


def _update(optimizer: optax.GradientTransformation, scale: jax.Array, sound: jax.Array, portion: Portion) -> Updated:
    clipped = jax.tree.map(lambda g: g * scale, portion.grads)
    updates, opt_state = optimizer.update(clipped, portion.opt_state, portion.params)
    params = optax.apply_updates(portion.params, updates)
    # The choice is elementwise and fused into the update; a branch or a second copy of the state would cost memory.
    return jax.tree.map(partial(jnp.where, sound), (params, opt_state), (portion.params, portion.opt_state))


def _zero_after(updated: list[Updated]) -> jax.Array:
    """Return a zero that is known when these updates have ended: what travels for one portion then leaves the device
    before that of the next arrives."""
    zero, _ = lax.optimization_barrier((jnp.int32(0), updated))
    return zero


def _update_in_host(update: Callable[[Portion], Updated], portion: Portion, first_row: Int32[Array, ""]) -> Updated:
    """Update a portion whose moments are in host memory, and whose arrays have equally many rows."""
    leaves, structure = jax.tree.flatten(portion.opt_state)
    in_host = [_is_in_host(x) for x in leaves]
    stored = [x for x, host in zip(leaves, in_host, strict=True) if host]
    counts = [x for x, host in zip(leaves, in_host, strict=True) if not host]
    rows = rows_at_once(stored)
    turns = len(stored[0]) // rows

    def read(arrays, i):
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, i * rows, rows), arrays)

    def write(arrays, new, i):
        return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, i * rows, 0), arrays, new)

    def fetch(arrays, i):
        return jax.device_put(read(arrays, i), jax.memory.Space.Device)

    def store(arrays, new, i):
        return write(arrays, jax.device_put(new, jax.memory.Space.Host), i)

    def update_rows(i, params, moments):
        """Return the parameters with rows i updated, the new rows of the moments, and the new counts."""
        merged = _merged(in_host, moments, counts)
        part = Portion(read(params, i), jax.tree.unflatten(structure, merged), read(portion.grads, i))
        new_params, opt_state = update(part)
        new = jax.tree.leaves(opt_state)
        new_moments = [x for x, host in zip(new, in_host, strict=True) if host]
        new_counts = [x for x, host in zip(new, in_host, strict=True) if not host]
        return write(params, new_params, i), new_moments, new_counts

    half = (len(stored) + 1) // 2

    def turn(i, carry):
        params, first, second, moments = carry
        params, new, _ = update_rows(i, params, moments)
        arriving = fetch(second, i + 1)
        first = store(first, new[:half], i)
        arriving, first, leaving = lax.optimization_barrier((arriving, first, new[half:]))
        second = store(second, leaving, i)
        return params, first, second, [*fetch(first, i + 1), *arriving]

    begin = portion.params, stored[:half], stored[half:], fetch(stored, first_row)
    params, first, second, moments = lax.fori_loop(0, turns - 1, turn, begin)
    params, new, new_counts = update_rows(turns - 1, params, moments)
    stored = store([*first, *second], new, turns - 1)
    return params, jax.tree.unflatten(structure, _merged(in_host, stored, new_counts))


def rows_at_once(moments: list[jax.Array]) -> int:
    """Return how many rows of all these arrays, which have equally many, travel at once: as many as `ROW_BYTES` allow
    of half of the arrays, and at least one."""
    size = len(moments[0])
    of_row = sum(x.nbytes for x in moments) / 2 / size
    matrices = any(x.ndim == 2 for x in moments)
    unit = SUBLANES if matrices and size % SUBLANES == 0 else 1
    fitting = unit
    for rows in range(unit, size + 1, unit):
        if size % rows == 0 and rows * of_row <= ROW_BYTES:
            fitting = rows
    return fitting


def _merged(in_host: list[bool], moments: list[jax.Array], counts: list[jax.Array]) -> list[jax.Array]:
    """Return the leaves of the optimizer's state: each from `moments` if it is in host memory, else from `counts`."""
    sources = {True: iter(moments), False: iter(counts)}
    return [next(sources[host]) for host in in_host]


def _is_in_host(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space is jax.memory.Space.Host


def _groups(portion: Portion) -> tuple[list[str], list[list[str]]]:
    """Return the names of the parameters whose moments are on the device, and of the others, those with equally many
    rows together."""
    in_host: set[str] = set()
    for node in jax.tree.leaves(portion.opt_state, is_leaf=_is_of_params):
        if _is_of_params(node):
            in_host |= {name for name, x in node.items() if _is_in_host(x)}
    on_device = []
    groups: dict[int, list[str]] = {}
    for name, x in portion.params.items():
        if name in in_host:
            groups.setdefault(len(x), []).append(name)
        else:
            on_device.append(name)
    return on_device, list(groups.values())


def _is_of_params(node: Any) -> bool:
    """Return True for a part of an optimizer's state that has an array for each parameter: they are dicts, as
    parameters are; everything else is a tuple or a number."""
    return isinstance(node, dict)


def _with_named_moments(opt_state: Any) -> Any:
    return jax.tree.map(lambda x: by_name(x) if _is_of_params(x) else x, opt_state, is_leaf=_is_of_params)


def _only(portion: Portion, names: list[str]) -> Portion:
    """Return the portion of these parameters alone."""

    def select(node):
        return {name: node[name] for name in names} if _is_of_params(node) else node

    return jax.tree.map(select, portion, is_leaf=_is_of_params)


def _joined(params: dict[str, Any], opt_state: Any, updated: list[Updated]) -> tuple[dict[str, Any], Any]:
    """Return the parameters and the state of all portions in the structures of `params` and `opt_state`; the counts
    are those of every portion."""

    def join(node, *parts):
        if not _is_of_params(node):
            return parts[0]
        together: dict[str, jax.Array] = {}
        for part in parts:
            together |= part
        return jax.tree.unflatten(jax.tree.structure(node), [together[name] for name in by_name(node)])

    return jax.tree.map(join, (params, opt_state), *updated, is_leaf=_is_of_params)
