"""Error of attention's output if the logits are products of int8 or fp8 numbers, beside that of bfloat16.

    python benchmarks/low_precision.py

Computed in float64 from bfloat16 inputs: 2,048 tokens, one head of 128 features, a causal mask. q and k are rounded
with one scale a token, after the keys' mean is taken away, as SageAttention does (arXiv 2410.02367); p is bfloat16 in
every row. Errors are relative to exact attention.
"""

import ml_dtypes
import numpy as np

TOKENS, FEATURES = 2048, 128


def bfloat16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def int8(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max(axis=-1, keepdims=True) / 127
    return np.round(x / scale) * scale


def fp8(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max(axis=-1, keepdims=True) / 240
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def attention(logits: np.ndarray, v: np.ndarray, *, exact: bool = False) -> np.ndarray:
    """Compute softmax(logits / sqrt(d)) v under a causal mask; p is rounded to bfloat16 unless `exact`."""
    s = np.where(np.tril(np.ones(logits.shape, bool)), logits * FEATURES**-0.5, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return (p if exact else bfloat16(p)) @ v / p.sum(axis=-1, keepdims=True)


def errors(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> dict[str, float]:
    """Relative errors by the dtype of the factors of the logits."""
    exact, centred = attention(q @ k.T, v, exact=True), k - k.mean(axis=0)
    outputs = {
        "bfloat16": attention(q @ k.T, v),
        "int8": attention(int8(q) @ int8(centred).T, v),
        "fp8 (e4m3)": attention(fp8(q) @ fp8(centred).T, v),
    }
    return {name: float(np.linalg.norm(o - exact) / np.linalg.norm(exact)) for name, o in outputs.items()}


def main() -> None:
    rng = np.random.default_rng(0)
    normal = [rng.standard_normal((TOKENS, FEATURES)) for _ in range(3)]
    q, k, v = map(bfloat16, normal)
    outliers = k.copy()
    outliers[:, :4] += 10 * np.sign(rng.standard_normal(4))
    outliers[:, 4:6] *= 8
    inputs = {"normal": (q, k, v), "queries times three": (3 * q, k, v), "outlier channels": (q, bfloat16(outliers), v)}
    for name, arrays in inputs.items():
        found = errors(*arrays)
        print(f"{name:20}", ", ".join(f"{of} {e:.1e} ({e / found['bfloat16']:.1f}x)" for of, e in found.items()))


if __name__ == "__main__":
    main()
