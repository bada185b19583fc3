"""What tests of the mathematics share: errors by norm, random arrays from a seed, a ring of simulated devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh


def relative_error(actual, expected) -> float:
    """|actual - expected| / |expected| by norm in float64; absolute where `expected` is zero, inf for any NaN."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    if not (np.isfinite(actual).all() and np.isfinite(expected).all()):
        return float("inf")
    return float(np.linalg.norm(actual - expected) / (np.linalg.norm(expected) or 1.0))


def errors(actual: dict, expected: dict) -> dict[str, float]:
    """The relative error of each named array; -inf (the lse of an empty row) must stand at the same places."""
    assert actual.keys() == expected.keys(), f"{sorted(actual)} against {sorted(expected)}"
    found = {}
    for name in expected:
        a, e = np.asarray(actual[name], np.float64), np.asarray(expected[name], np.float64)
        empty = np.isneginf(e)
        same_rows = a.shape == e.shape and (np.isneginf(a) == empty).all()
        found[name] = relative_error(np.where(empty, 0, a), np.where(empty, 0, e)) if same_rows else float("inf")
    return found


def assert_close(actual: dict, expected: dict, tolerance: float = 1e-5) -> None:
    """Every named array within `tolerance` of the expected one by relative norm, each for itself."""
    found = errors(actual, expected)
    assert max(found.values()) <= tolerance, found


def normal(seed: int, *shape: int, dtype=np.float32) -> np.ndarray:
    """Standard normal numbers, a function of the seed and the shape."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def packed_segments(seed: int, batch: int, length: int, documents: int) -> np.ndarray:
    """int32 [batch, length]: ids of packed documents, ascending, with edges at random places."""
    rng = np.random.default_rng(seed)
    edges = np.stack([rng.choice(np.arange(1, length), documents - 1, replace=False) for _ in range(batch)])
    return (np.arange(length) >= edges[..., None]).sum(axis=1).astype(np.int32)


def ring_mesh(n: int) -> Mesh:
    """A ring of the first `n` devices, axis "sp"."""
    return Mesh(np.array(jax.devices()[:n]), ("sp",))


def values_and_gradients(attention, inputs: dict, cotangents: dict) -> dict:
    """`attention(**inputs) -> (o, lse)` and the gradients of its float inputs, as o, lse, dq, dk, dv, dbias."""
    static = {name: x for name, x in inputs.items() if not _is_float(x)}
    moving = {name: x for name, x in inputs.items() if _is_float(x)}
    (o, lse), vjp = jax.vjp(lambda moving: attention(**moving, **static), moving)
    (gradients,) = vjp((cotangents["do"].astype(o.dtype), cotangents["dlse"]))
    return {"o": o, "lse": lse, **{f"d{name}": g for name, g in gradients.items()}}


def random_vjp(function, *args, seed=9):
    """`function(*args)`, and its gradients by the arguments with a random cotangent."""
    y, vjp = jax.vjp(function, *args)
    return y, *vjp(jnp.asarray(normal(seed, *y.shape)).astype(y.dtype))


def _is_float(x) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def unpadded(tree, shardings):
    """A tree of global arrays on the host, without the padding at the end of their dimensions."""
    return jax.tree.map(lambda x, w: np.asarray(x)[tuple(map(slice, w.shape))], tree, shardings)
