"""An order for loops of collectives, which XLA needs on simulated devices: many devices of one CPU.

XLA:CPU begins the collectives of a program in the same order on every device. But a loop whose body is large counts as
begun when it has started, so a later collective that depends on nothing in the loop can begin at once. All permutes of
JAX have one channel, and devices take each other's messages: results are wrong, or the process hangs or aborts. XLA:CPU
also removes `lax.optimization_barrier`. `tests/ops/test_simulated_devices.py` shows it in a few lines, and
`tests/unordered_loops.py` finds such loops in a compiled program.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ringformer.ops.varying_axes import varying_axes

Tree = TypeVar("Tree")


def after(tree: Tree, done: jax.Array) -> Tree:
    """Return `tree`, whose values are unchanged; on CPUs, its arrays of numbers cannot be read before `done` is
    computed.

    Arrays that vary over fewer mesh axes than `done` are not tied to it. On other platforms, this is the identity.

    Args:
      done: a float array.
    """

    def wait(x: jax.Array) -> jax.Array:
        is_number = jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)
        if not is_number or not varying_axes(done) <= varying_axes(x):
            return x
        return lax.platform_dependent(x, done, cpu=_select_after, default=lambda x, done: x)

    return jax.tree.map(wait, tree)


def _select_after(x: jax.Array, done: jax.Array) -> jax.Array:
    """Return x by a choice that depends on `done`, and that XLA cannot predict: n (n + 1) is even for every n."""
    first = done[(0,) * done.ndim].astype(jnp.float32)
    n = lax.bitcast_convert_type(first, jnp.int32)
    is_odd = (n * (n + 1)) % 2 == 1
    return jnp.where(is_odd, jnp.zeros_like(x), x)
