"""The optimizer's update of the parameters on one device, inside `shard_map`.

Parts of the state that `optimizer.offload` keeps in the host's memory are updated there in place, a few rows at a time.
Both directions of the link between device and host are busy at once:

    rows i of the first half of the arrays leave     | rows i+1 of the second half arrive
    rows i of the second half leave                  | rows i+1 of the first half arrive

If only moments are there, half of the arrays is one moment of AdamW. The program states this order, because a compiler
that may read an array after a write to it copies the array.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from ringformer.ops.host_stand_in import is_in_host
from ringformer.parallel.host_memory import read_rows, rows_at_once, write_rows
from ringformer.parallel.parameters import by_name
from ringformer.train.optimizer import WEIGHTS
from ringformer.train.state import is_of_params
from ringformer.train.stochastic_rounding import round_stochastically, rounding_key


class Portion(NamedTuple):
    """Parameters that are updated together, with what their update needs; all by name."""

    params: dict[str, jax.Array]
    opt_state: Any
    """The optimizer's state, whose moments are dicts of the names in `params`."""
    grads: dict[str, jax.Array]


class Updated(NamedTuple):
    """Parameters and the optimizer's state, as in a `Portion`."""

    params: dict[str, jax.Array]
    opt_state: Any


def apply_update(
    optimizer: optax.GradientTransformation,
    params: dict[str, Any],
    opt_state: Any,
    grads: dict[str, Any],
    scale: Float32[Array, ""],
    sound: Bool[Array, ""],
    step: Int32[Array, ""],
) -> Updated:
    """Return the parameters and the optimizer's state after its update with the gradients, times `scale`; if the step
    is not `sound`, return them unchanged.

    Parameters in bfloat16 are updated in float32 and rounded stochastically, with the step's own chance.

    Args:
      optimizer: the same function of parameters in a flat dict of names (`by_name`); elementwise, if arrays are in
        host memory.
      params, opt_state: arrays in host memory are updated there.
      grads: gradients, or multiples of them that `scale` undoes, on the device or in host memory.
    """
    update = partial(_update, optimizer, scale, sound, rounding_key(step, WEIGHTS))
    whole = Portion(by_name(params), _with_named_moments(opt_state), by_name(grads))
    updated = []
    on_device, groups = _groups(whole)
    if on_device:
        updated.append(update(_only(whole, on_device)))
    for names in groups:
        first_row = _zero_after(updated)
        updated.append(_update_in_host(update, _only(whole, names), first_row))
    return _joined(Updated(params, opt_state), updated)


def _update(
    optimizer: optax.GradientTransformation, scale: jax.Array, sound: jax.Array, key: jax.Array, portion: Portion
) -> Updated:
    clipped = jax.tree.map(lambda g: g * scale, portion.grads)
    before = jax.tree.map(lambda x: x.astype(jnp.float32), portion.params)
    updates, opt_state = optimizer.update(clipped, portion.opt_state, before)
    exact = optax.apply_updates(before, updates)
    params = jax.tree.map(partial(_rounded, key), portion.params, exact, portion.grads)
    # The choice is elementwise and fused into the update; a branch or a second copy of the state would cost memory.
    new = Updated(params, opt_state)
    return jax.tree.map(partial(jnp.where, sound), new, Updated(portion.params, portion.opt_state))


def _rounded(key: jax.Array, old: jax.Array, exact: jax.Array, grad: jax.Array) -> jax.Array:
    """Return a parameter's new float32 numbers in the dtype that it has. Many weights in bfloat16 are equal, and so are
    all updates of Lion but for their sign: chance depends on the gradient, too, or they would be rounded as one."""
    if old.dtype == jnp.float32:
        return exact
    return round_stochastically(exact, key, grad)


def _zero_after(updated: list[Updated]) -> jax.Array:
    """Return a zero that is known when these updates have ended: what travels for one portion then leaves the device
    before that of the next arrives."""
    zero, _ = lax.optimization_barrier((jnp.int32(0), updated))
    return zero


class _Arrays(NamedTuple):
    """Arrays of parameters and optimizer state by where they are."""

    travelling: list[jax.Array]
    """Arrays of host memory, or some of their rows that are on the device."""
    staying: list[jax.Array]
    """Arrays of the device, which have as many rows."""
    counts: list[jax.Array]


def _place(x: jax.Array) -> str:
    """Return the field of `_Arrays` that has an array."""
    if is_in_host(x):
        return "travelling"
    return "staying" if x.ndim else "counts"


def _update_in_host(update: Callable[[Portion], Updated], portion: Portion, first_row: Int32[Array, ""]) -> Updated:
    """Update a portion that has arrays in host memory, and whose arrays have equally many rows."""
    leaves, structure = jax.tree.flatten(Updated(portion.params, portion.opt_state))
    places = [_place(x) for x in leaves]

    def sorted_out(leaves: list[jax.Array]) -> _Arrays:
        arrays = _Arrays([], [], [])
        for x, place in zip(leaves, places, strict=True):
            getattr(arrays, place).append(x)
        return arrays

    def tree(arrays: _Arrays) -> Updated:
        sources = {place: iter(getattr(arrays, place)) for place in _Arrays._fields}
        return jax.tree.unflatten(structure, [next(sources[place]) for place in places])

    stored, staying, counts = sorted_out(leaves)
    rows = rows_at_once(stored, share=0.5)
    turns = len(stored[0]) // rows

    arriving_grads = {name: x for name, x in portion.grads.items() if is_in_host(x)}
    other_grads = {name: x for name, x in portion.grads.items() if not is_in_host(x)}

    def update_rows(i, staying: list[jax.Array], here: list[jax.Array], grads_here: dict[str, jax.Array]) -> _Arrays:
        """Return the new rows i of what travels, all of what stays with these rows updated, and the new counts."""
        now = tree(_Arrays(here, read_rows(staying, i * rows, rows), counts))
        grads = grads_here | read_rows(other_grads, i * rows, rows)
        new = update(Portion(now.params, now.opt_state, grads))
        arrays = sorted_out(jax.tree.leaves(new))
        return arrays._replace(staying=write_rows(staying, arrays.staying, i * rows))

    half = (len(stored) + 1) // 2

    def turn(i, carry):
        staying, first, second, here, grads_here = carry
        new, staying, _ = update_rows(i, staying, here, grads_here)
        following = (i + 1) * rows
        arriving, grads_here = read_rows((second, arriving_grads), following, rows)
        first = write_rows(first, new[:half], i * rows)
        arriving, first, leaving = lax.optimization_barrier((arriving, first, new[half:]))
        second = write_rows(second, leaving, i * rows)
        return staying, first, second, [*read_rows(first, following, rows), *arriving], grads_here

    begin = staying, stored[:half], stored[half:], *read_rows((stored, arriving_grads), first_row, rows)
    staying, first, second, here, grads_here = lax.fori_loop(0, turns - 1, turn, begin)
    new, staying, counts_after = update_rows(turns - 1, staying, here, grads_here)
    stored = write_rows([*first, *second], new, (turns - 1) * rows)
    return tree(_Arrays(stored, staying, counts_after))


def _groups(portion: Portion) -> tuple[list[str], list[list[str]]]:
    """Return the names of the parameters that are on the device with all their moments, and of the others, those with
    equally many rows together."""
    in_host: set[str] = set()
    for node in jax.tree.leaves((portion.params, portion.opt_state), is_leaf=is_of_params):
        if is_of_params(node):
            in_host |= {name for name, x in node.items() if is_in_host(x)}
    on_device = []
    groups: dict[int, list[str]] = {}
    for name, x in portion.params.items():
        if name in in_host:
            groups.setdefault(len(x), []).append(name)
        else:
            on_device.append(name)
    return on_device, list(groups.values())


def _with_named_moments(opt_state: Any) -> Any:
    return jax.tree.map(lambda x: by_name(x) if is_of_params(x) else x, opt_state, is_leaf=is_of_params)


def _only(portion: Portion, names: list[str]) -> Portion:
    """Return the portion of these parameters alone."""

    def select(node):
        return {name: node[name] for name in names} if is_of_params(node) else node

    return jax.tree.map(select, portion, is_leaf=is_of_params)


def _joined(before: Updated, updated: list[Updated]) -> Updated:
    """Return the parameters and the state of all portions in the structures of `before`; the counts are those of every
    portion."""

    def join(node, *parts):
        if not is_of_params(node):
            return parts[0]
        together: dict[str, jax.Array] = {}
        for part in parts:
            together |= part
        return jax.tree.unflatten(jax.tree.structure(node), [together[name] for name in by_name(node)])

    return jax.tree.map(join, before, *updated, is_leaf=is_of_params)
