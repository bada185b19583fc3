"""Share of one cuDNN call in a block: the logits that the call sees, its softmax state and its gradients."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Float32, Int32

from ringformer.ops.blockwise_attention import Cotangents
from ringformer.ops.kernels import cudnn_calls
from ringformer.ops.kernels.cudnn_calls import Lengths
from ringformer.ops.online_softmax import Softmax
from ringformer.ops.work_list import ChunkPairs


class View(NamedTuple):
    """The logits that a call sees: all, those under a causal mask, perhaps within a window, or a rectangle."""

    causal: bool = False
    moved: int | Int32[Array, ""] | None = None
    """Number of rows at the start that see nothing: row t sees columns up to t - moved. None: 0, known at trace
    time."""
    lengths: Lengths | None = None
    """Rectangle of the first queries and the LAST keys of each row of the batch; may be empty. cuDNN's padding mask
    keeps the first keys, so a call gets the keys in reverse order; their order does not matter without a causal
    mask."""
    window: int | None = None
    """Columns that a row sees at most under the causal mask, the last ones."""
    reversed: bool = False
    """True: the causal mask is of rows and columns in reverse order, so row t sees columns from t + moved on."""
    exists: bool | Bool[Array, ""] = True
    """False: these keys are not there, and no row sees anything."""

    def hidden_rows(self, T: int) -> Bool[Array, "*B T"] | None:
        """Mask the rows that see nothing, [T] or [B, T]; None: there are none."""
        if self.lengths is not None:
            return jnp.arange(T) >= self.lengths[0][:, None]
        if self.moved is None and self.exists is True:
            return None
        moved = 0 if self.moved is None else self.moved
        hidden = jnp.arange(T) < moved
        if self.reversed:
            hidden = hidden[::-1]
        return hidden | ~jnp.asarray(self.exists)

    @property
    def has_keys_reversed(self) -> bool:
        """True if a call gets the keys in reverse order."""
        return self.reversed or self.lengths is not None


class Rows(NamedTuple):
    """Inputs of the backward for the queries' rows."""

    o: Float[Array, "B K G T d"]
    do: Float[Array, "B K G T d"]
    lse: Float32[Array, "B K G T"]
    """Log-sum-exp of the whole row, not only of this call's keys; +inf for a row that sees nothing."""
    dlse: Float32[Array, "B K G T"] | None

    @staticmethod
    def of(cotangents: Cotangents) -> "Rows":
        m, weight, _ = cotangents.rows
        assert cotangents.o is not None
        return Rows(cotangents.o, cotangents.do, m - jnp.log(weight), cotangents.dlse)


def under_offset(pair: ChunkPairs, masked: bool) -> View:
    """Return the view of a pair of whole parts: query row t sees key column s where t + offset >= s."""
    offset: Any = pair.offset
    if not masked:
        return View()
    is_zero = isinstance(offset, np.integer) and offset == 0
    return View(causal=True, moved=None if is_zero else -jnp.asarray(offset))


def within_window(offset: int, count: int, window: int, exists: bool | Bool[Array, ""]) -> View:
    """Return the view of `count` queries on as many keys within a window: query row t sees key column s where
    t + offset >= s and s > t + offset - window.

    Either the keys are the queries' own (offset 0), or they end where the queries begin (offset `count`, at least
    window - 1), and only the window limits a row. It sees the columns from t + offset - window + 1 on, which is a
    causal mask of rows and columns in reverse order.
    """
    if offset == 0:
        return View(causal=True, window=window if window < count else None, exists=exists)
    return View(causal=True, moved=offset - (window - 1) or None, reversed=True, exists=exists)


def attend(q: Float[Array, "B K G T d"], kv: Float[Array, "2 B K S d"], view: View, scale: float) -> Softmax:
    """Return the softmax state of rows that see only these keys."""
    K = q.shape[1]
    T = q.shape[3]
    k, v = _keys_for(view, kv)
    o, lse = cudnn_calls.forward(_rows_for(view, q), k, v, scale, view.causal, _at_least_one(view.lengths), view.window)
    o = _in_order(rearrange(o, "b t (k g) d -> b k g t d", k=K).astype(jnp.float32), view)
    lse = _in_order(rearrange(lse, "b (k g) t -> b k g t", k=K), view)
    hidden = view.hidden_rows(T)
    if hidden is None:
        return Softmax(o, lse, jnp.ones_like(lse))
    hidden = _of_heads(hidden)
    return Softmax(
        jnp.where(hidden[..., None], 0.0, o),
        jnp.where(hidden, -jnp.inf, lse),
        jnp.where(hidden, 0.0, jnp.ones_like(lse)),
    )


def gradients(
    q: Float[Array, "B K G T d"], kv: Float[Array, "2 B K S d"], rows: Rows, view: View, scale: float
) -> tuple[Float32[Array, "B K G T d"], Float32[Array, "2 B K S d"]]:
    """Return this call's shares of dq and of [dk, dv]."""
    share, key_share = _share(q, kv, rows.o, rows.do, rows.lse, view, scale)
    if rows.dlse is None:
        return share, key_share
    k, v = kv
    unit = jnp.ldexp(jnp.float32(1), jnp.frexp(jnp.abs(rows.dlse).max())[1])  # a power of two: float16 is narrow
    do = _pieces(rows.dlse / unit, q)
    more, more_keys = _share(q, jnp.stack([k, _ones(v)]), jnp.zeros_like(do), do, rows.lse, view, scale)
    return share + unit * more, key_share.at[0].add(unit * more_keys[0])


def _share(q, kv, o, do, lse, view: View, scale: float):
    """Return the shares of dq and of [dk, dv] for the cotangent `do` of `o`."""
    K, T = q.shape[1], q.shape[3]
    S = kv.shape[3]
    hidden = view.hidden_rows(T)
    if hidden is not None:
        lse = jnp.where(_of_heads(hidden), _NOTHING, lse)
    lse = rearrange(_as_called(lse, view), "b k g t -> b (k g) t")
    k, v = _keys_for(view, kv)
    q, o, do = (_rows_for(view, x) for x in (q, o, do))
    lengths = _at_least_one(view.lengths)
    gq, *gkv = cudnn_calls.backward(q, k, v, o, lse, do, scale, view.causal, lengths, view.window)
    gq = _in_order(rearrange(gq, "b t (k g) d -> b k g t d", k=K).astype(jnp.float32), view)
    dkv = rearrange(jnp.stack(gkv), "two b s k d -> two b k s d").astype(jnp.float32)
    if view.has_keys_reversed:
        dkv = dkv[..., ::-1, :]
    if view.lengths is None or hidden is None:
        return gq, dkv
    seen = jnp.arange(S - 1, -1, -1) < view.lengths[1][:, None]
    gq = jnp.where(_of_heads(hidden)[..., None], 0.0, gq)
    return gq, jnp.where(seen[:, None, :, None], dkv, 0.0)


_NOTHING = 1e30
"""An lse that makes a row's probabilities 0."""


def _as_called(x: Array, view: View) -> Array:
    """Order rows [B, K, G, T, ...] as a call gets them: they fit a plain causal mask, and rows that see nothing come
    last."""
    if view.reversed:
        x = x[:, :, :, ::-1]
    return x if view.moved is None else jnp.roll(x, -view.moved, 3)


def _in_order(x: Array, view: View) -> Array:
    """Undo `_as_called`."""
    if view.moved is not None:
        x = jnp.roll(x, view.moved, 3)
    return x[:, :, :, ::-1] if view.reversed else x


def _rows_for(view: View, x: Float[Array, "B K G T d"]) -> Float[Array, "B T H d"]:
    return rearrange(_as_called(x, view), "b k g t d -> b t (k g) d")


def _keys_for(view: View, kv: Float[Array, "2 B K S d"]) -> Float[Array, "2 B S K d"]:
    kv = kv.swapaxes(2, 3)
    return kv[:, :, ::-1] if view.has_keys_reversed else kv


def _at_least_one(lengths: Lengths | None) -> Lengths | None:
    """Return lengths of at least 1 for a call: an empty rectangle becomes one pair, whose results are hidden later."""
    return None if lengths is None else (jnp.maximum(lengths[0], 1), jnp.maximum(lengths[1], 1))


def _of_heads(hidden: Bool[Array, "*B T"]) -> Bool[Array, "#B 1 1 T"]:
    return hidden.reshape(-1, 1, 1, hidden.shape[-1])


# --- the cotangent of lse -----------------------------------------------------------------------------------------

_PIECES = 3
"""Number of bfloat16 values that together hold the digits of a float32."""


def _pieces(dlse, q):
    """Split dlse into pieces that add up to it: the first features of a cotangent of o, [B, K, G, T, d] in q's dtype.
    Other features are 0."""
    pieces = []
    rest = dlse
    for _ in range(_PIECES):
        pieces.append(rest.astype(q.dtype))
        rest = rest - pieces[-1].astype(jnp.float32)
    return jnp.pad(jnp.stack(pieces, axis=-1), [(0, 0)] * dlse.ndim + [(0, q.shape[-1] - _PIECES)])


def _ones(v):
    """Make values that are 1 in the features that `_pieces` uses, and 0 in all others."""
    return jnp.zeros_like(v).at[..., :_PIECES].set(1)
