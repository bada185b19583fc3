"""Products of a decode step: one token of each row times weights of which every device holds a share.

The residual stream [B, D] is replicated over (tp, fsdp, sp); `inference/weight_shares.py` says how weights are shared
out. What travels is a token's columns or partial sums, never a weight.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Shaped

from ringformer.ops.tokenwise.words import product

ALL = ("tp", "fsdp", "sp")
"""Axes that cut a weight, major first."""
REST = ("fsdp", "sp")
"""Axes that cut a tp rank's part of a weight, major first."""


def columns_product(
    x: Float[Array, "B D"], shares: Sequence[Shaped[Array, "D _"]], widths: Sequence[int]
) -> list[Float[Array, "B _"]]:
    """Multiply x by matrices that are cut by columns, and return all columns of the tp rank.

    One all-gather over (fsdp, sp) collects those of all matrices.

    Args:
      widths: columns of each matrix on a tp rank; those beyond are padding.
    """
    products = [product(x, share).astype(x.dtype) for share in shares]
    ends = np.cumsum([y.shape[-1] for y in products])
    columns = jnp.concatenate(products, axis=-1)
    gathered = lax.all_gather(columns, REST, axis=1, to="invarying")  # [B, devices, columns]
    of_each = jnp.split(gathered, ends[:-1], axis=-1)
    return [rearrange(y, "b n c -> b (n c)")[:, :width] for y, width in zip(of_each, widths, strict=True)]


def own_columns_product(x: Float[Array, "B D"], share: Shaped[Array, "D _"]) -> Float[Array, "B _"]:
    """Multiply x by a matrix that is cut by columns, and return the device's own columns."""
    return product(x, share).astype(x.dtype)


def rows_product(x: Float[Array, "B R"], share: Shaped[Array, "n _"]) -> Float[Array, "B D"]:
    """Multiply x, the rows' features of a tp rank, by a matrix that is cut by rows."""
    rows = share.shape[0]
    x = jnp.pad(x, ((0, 0), (0, rows * lax.axis_size(REST) - x.shape[1])))
    own = lax.dynamic_slice_in_dim(x, lax.axis_index(REST) * rows, rows, axis=1)
    return own_rows_product(own, share)


def own_rows_product(x: Float[Array, "B n"], share: Shaped[Array, "n _"]) -> Float[Array, "B D"]:
    """Multiply x, of which the device has the features of its rows, by a matrix that is cut by rows.

    The devices' products are summed in float32.
    """
    return lax.psum(product(x, share), ALL).astype(x.dtype)
