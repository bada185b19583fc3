"""Checks and lossless casts of attention's arguments."""

import operator
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int, Integer

from ringformer.ops import layouts

AnyArray = jax.Array | np.ndarray
"""An array on a device or on the host."""

SegmentIds = Integer[AnyArray, "B T"] | tuple[Integer[AnyArray, "B T"], Integer[AnyArray, "B S"]] | None
"""Ids of all tokens, or a pair of the ids of queries and keys; None: one segment."""

Segments = Literal["any", "ascending"]
"""Promise of the caller about segment ids. "any" promises nothing. "ascending" promises that the ids never decrease
along the sequence (in natural order), so that each segment is one interval of the sequence."""


def check(q: Any, k: Any, v: Any, layout: Any, causal: Any, segment_ids: Any, segments: Any, bias: Any) -> None:
    """Raise ValueError if shapes or dtypes do not fit together, naming both sides, or the layout is unknown."""
    check_dimensions(q, k)
    B, T, H, d = q.shape
    S, K = k.shape[1:3]
    if 0 in q.shape + k.shape:
        raise ValueError(f"nothing to attend: q {q.shape} and k {k.shape} must not be empty")
    if k.shape != v.shape or k.shape[0] != B or k.shape[3] != d:
        raise ValueError(f"k and v must both be [B, S, K, d] with q's B={B} and d={d}; got {k.shape} and {v.shape}")
    if H % K:
        raise ValueError(f"{H} query heads are not a multiple of {K} key heads")
    if not (q.dtype == k.dtype == v.dtype) or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q, k and v must share one float dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if causal and T != S:
        raise ValueError(f"causal attention needs as many keys as queries; got T={T}, S={S}: pass causal=False")
    layouts.check_name(layout)
    ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    if segment_ids is not None and (ids[0].shape != (B, T) or ids[1].shape != (B, S)):
        raise ValueError(f"segment ids must be [{B}, {T}] and [{B}, {S}]; got {ids[0].shape} and {ids[1].shape}")
    check_promise(segments, segment_ids)
    if bias is not None and bias.shape != (B, S):
        raise ValueError(f"bias must be [B, S] = [{B}, {S}]; got {bias.shape}")


def check_dimensions(q: Any, k: Any) -> None:
    """Raise ValueError unless q and k have four dimensions."""
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q must be [B, T, H, d] and k [B, S, K, d]; got {q.shape} and {k.shape}")


def as_whole_number(name: str, value: Any) -> int:
    """Return a number as int. Raises ValueError for other values, True and False included."""
    try:
        if not isinstance(value, bool | np.bool_):
            return operator.index(value)
    except TypeError:
        pass
    raise ValueError(f"{name}={value!r} must be a whole number")


def as_flag(name: str, value: Any) -> bool:
    """Return True or False as bool. Raises ValueError for other values."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}={value!r} must be True or False")
    return bool(value)


def as_chunk(name: str, value: Any) -> int | None:
    """Return a number of tokens as int, or None. Raises ValueError unless it is a positive whole number."""
    if value is None:
        return None
    chunk = as_whole_number(name, value)
    if chunk < 1:
        raise ValueError(f"{name} must be positive; got {chunk}")
    return chunk


def as_options(
    causal: Any, return_lse: Any, ulysses: Any, q_chunk: Any, k_chunk: Any
) -> tuple[bool, bool, int, int | None, int | None]:
    """Return these options as Python values. Raises ValueError that names the wrong one."""
    causal = as_flag("causal", causal)
    return_lse = as_flag("return_lse", return_lse)
    ulysses = as_whole_number("ulysses", ulysses)
    q_chunk = as_chunk("q_chunk", q_chunk)
    k_chunk = as_chunk("k_chunk", k_chunk)
    return causal, return_lse, ulysses, q_chunk, k_chunk


def as_softcap(logit_softcap: Any) -> float | None:
    """Return the bound of the logits as float. Raises ValueError unless it is positive and finite."""
    if logit_softcap is None:
        return None
    try:
        bound = float(logit_softcap)
    except (TypeError, ValueError):
        bound = 0.0
    if not 0 < bound < float("inf"):
        raise ValueError(f"logit_softcap={logit_softcap!r} must be a positive, finite number")
    return bound


def as_numbers(window: Any, attend_first: Any, logit_softcap: Any) -> tuple[int | None, int, float | None]:
    """Return these options as Python numbers. Raises ValueError that names the wrong one."""
    window = None if window is None else as_whole_number("window", window)
    return window, as_whole_number("attend_first", attend_first), as_softcap(logit_softcap)


def check_window(window: int | None, attend_first: int, layout: str, causal: bool, segment_ids: SegmentIds) -> None:
    """Raise ValueError for a window or first tokens that the other arguments contradict."""
    if window is None:
        if attend_first:
            raise ValueError(f"attend_first={attend_first} adds tokens to a window: pass window too")
        return
    if window < 1:
        raise ValueError(f"window={window} must be positive: a query sees at least its own key")
    if not causal:
        raise ValueError(f"window={window} counts the last keys of a query: it needs causal=True")
    if layout == "striped":
        raise ValueError(
            f"window={window} with layout='striped': neighbouring tokens are on all ranks, so every rank would need "
            "the keys of all others; layout='zigzag' balances causal work too"
        )
    if attend_first < 0:
        raise ValueError(f"attend_first={attend_first} must not be negative")
    if attend_first and segment_ids is not None:
        raise ValueError(
            f"attend_first={attend_first} counts from the beginning of the sequence, and segment_ids has several "
            "documents: pass one of the two"
        )


def as_sinks(sinks: AnyArray | None, H: int) -> Float32[AnyArray, " H"] | None:
    """Cast sinks to float32. Raises ValueError unless they are one float per query head."""
    if sinks is None:
        return None
    if not isinstance(sinks, jax.Array | np.ndarray):
        raise ValueError(f"sinks must be an array of one float per query head, [{H}]; got {sinks!r}")
    if sinks.shape != (H,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(f"sinks must be one float per query head, [{H}]; got {sinks.dtype} {sinks.shape}")
    return sinks.astype(np.float32)


def check_promise(segments: str, segment_ids: SegmentIds) -> None:
    """Raise ValueError for an unknown promise, or for one that a pair of id arrays cannot keep."""
    if segments not in get_args(Segments):
        raise ValueError(f"segments={segments!r}: choose one of {', '.join(get_args(Segments))}")
    if segments == "ascending" and isinstance(segment_ids, tuple):
        raise ValueError("segments='ascending' is for one array of segment ids; got a pair: pass segments='any'")


def as_segment_ids(
    segment_ids: AnyArray | tuple[AnyArray, AnyArray] | None,
) -> tuple[Int[AnyArray, "B T"] | None, Int[AnyArray, "B S"] | None]:
    """Return the ids of queries and keys as int32, preserving equality and order.

    Host arrays with ids beyond 32 bits are replaced by the ranks of their ids. Device arrays beyond 32 bits exist only
    under `jax_enable_x64` and keep their dtype. (JAX cuts an argument of a `jit` to 32 bits before this function sees
    it.)
    """
    if segment_ids is None:
        return None, None
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    for ids in pair:
        if not (jnp.issubdtype(ids.dtype, jnp.integer) or ids.dtype == bool):
            raise ValueError(f"segment ids must be integers; got {ids.dtype}: they are compared for equality")
    int32 = np.iinfo(np.int32)
    too_wide = [isinstance(x, np.ndarray) and x.size > 0 and (x.min() < int32.min or x.max() > int32.max) for x in pair]
    if any(too_wide) and all(isinstance(x, np.ndarray) for x in pair):
        # Use Python integers where int64 is too narrow: numpy would convert a mix of int64 and uint64 to float64 and
        # round.
        beyond_int64 = any(x.dtype == np.uint64 and x.max() > np.iinfo(np.int64).max for x in pair)
        wide = object if beyond_int64 else np.int64
        together = np.concatenate([x.ravel().astype(wide) for x in pair])
        ranks = np.unique(together, return_inverse=True)[1].astype(np.int32)
        q_ranks, k_ranks = np.split(ranks, [pair[0].size])
        return q_ranks.reshape(pair[0].shape), k_ranks.reshape(pair[1].shape)
    narrow = []
    for ids, is_wide in zip(pair, too_wide, strict=True):
        if isinstance(ids, np.ndarray) and not is_wide:
            ids = ids.astype(np.int32)
        narrow.append(ids)
    q_ids, k_ids = narrow
    dtype = np.result_type(q_ids.dtype, k_ids.dtype, np.int32)
    if dtype.kind != "i" or jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"segment ids of {q_ids.dtype} and {k_ids.dtype} do not fit in 32 bits: renumber the documents as int32, "
            "or pass both as numpy arrays, or as int64 under jax_enable_x64"
        )
    return q_ids.astype(dtype), k_ids.astype(dtype)


def as_bias(bias: AnyArray | None) -> Float32[AnyArray, "B S"] | None:
    """Cast the bias to float32, keeping finite values finite, e.g. the smallest float64."""
    if bias is None:
        return None
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ValueError(
            f"bias is added to the logits and must be float; got {bias.dtype}: convert a mask with "
            "jnp.where(mask, 0.0, -jnp.inf)"
        )
    if bias.dtype == np.float64:
        xp = np if isinstance(bias, np.ndarray) else jnp
        limit = np.finfo(np.float32)
        bias = xp.where(xp.isinf(bias), bias, xp.clip(bias, float(limit.min), float(limit.max)))
    return bias.astype(np.float32)
