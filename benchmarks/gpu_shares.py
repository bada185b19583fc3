"""Rates of one GPU: products and attention by size, and the seconds of a train step by kernel.

`benchmarks/gpu.py` runs these as its parts `products`, `head_sizes` and `step_kernels`.
"""

import tempfile
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from benchmarks.device_timing import median_seconds

PRODUCTS = {
    "full": [
        (16384, 576, 1536),
        (16384, 2048, 2048),
        (16384, 2048, 8192),
        (16384, 4096, 4096),
        (16384, 4096, 14336),
        (8192, 2048, 128256),
    ],
    "small": [(128, 64, 128)],
}
"""Rows, columns in, columns out: feed-forward and projections of SmolLM2-135M, Llama 3.2 1B, Llama 3 8B, and a head."""

HEAD_SIZES = {
    "full": [
        (16384, 9, 3, 64),
        (32768, 32, 8, 64),
        (65536, 9, 3, 64),
        (16384, 32, 8, 128),
        (32768, 32, 8, 128),
        (16384, 16, 8, 256),
        (32768, 16, 8, 256),
    ],
    "small": [(256, 4, 2, 64)],
}
"""Tokens, query heads, key heads, head size."""

KINDS = {
    "attention": ("sdpa", "fmha", "flash", "cudnn::fusion"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "xmma"),
    "copies": ("memcpy", "copy", "transpose"),
}
"""Kinds of kernels, and parts of their names; the first kind that fits counts, every other kernel is `other`."""


def products(size: str) -> list[dict]:
    """TFLOP/s of bfloat16 products by shape: the forward one, and the two of its backward, whose weight gradient is
    rounded to bfloat16."""
    import jax
    import jax.numpy as jnp

    def backward(x, w, dy):
        dx = dy @ w.T
        dw = x.T @ dy
        return dx, dw

    rows = []
    for rows_in, columns_in, columns_out in PRODUCTS[size]:
        keys = jax.random.split(jax.random.key(columns_out), 3)
        x = jax.random.normal(keys[0], (rows_in, columns_in), jnp.bfloat16)
        w = jax.random.normal(keys[1], (columns_in, columns_out), jnp.bfloat16)
        dy = jax.random.normal(keys[2], (rows_in, columns_out), jnp.bfloat16)
        flops = 2 * rows_in * columns_in * columns_out
        forward_seconds = median_seconds(partial(jax.jit(jnp.matmul), x, w))
        backward_seconds = median_seconds(partial(jax.jit(backward), x, w, dy))
        rows.append(
            {
                "rows": rows_in,
                "columns_in": columns_in,
                "columns_out": columns_out,
                "forward_tflops": flops / forward_seconds / 1e12,
                "backward_tflops": 2 * flops / backward_seconds / 1e12,
            }
        )
    return rows


def head_sizes(size: str) -> list[dict]:
    """TFLOP/s of causal attention by head size, forward and backward alone, bfloat16; masked pairs are not counted, and
    the backward counts the logits that it computes again. On a GPU cuDNN's calls, elsewhere XLA's blocks."""
    import jax
    import jax.numpy as jnp

    from ringformer.models.flops import PAIR_BACKWARD, PAIR_FORWARD, PAIR_LOGITS_AGAIN
    from ringformer.ops.ring_attention import ring_attention

    kernel = "cudnn" if jax.default_backend() == "gpu" else "xla"
    op = partial(ring_attention, axis_name=None, kernel=kernel)
    rows = []
    for T, heads, key_heads, head_dim in HEAD_SIZES[size]:
        keys = jax.random.split(jax.random.key(head_dim), 4)
        head_counts = heads, key_heads, key_heads, heads
        q, k, v, do = (
            jax.random.normal(key, (1, T, count, head_dim), jnp.bfloat16)
            for key, count in zip(keys, head_counts, strict=True)
        )
        row = {"T": T, "heads": heads, "key_heads": key_heads, "head_dim": head_dim, "kernel": kernel}
        rows.append(row)
        try:
            _, pullback = jax.jit(partial(jax.vjp, op))(q, k, v)
            forward_seconds = median_seconds(partial(jax.jit(op), q, k, v))
            backward_seconds = median_seconds(partial(jax.jit(_pulled_back), pullback, do))
        except Exception as error:  # a size that the kernel does not take
            row["error"] = str(error)[:300]
            continue
        pairs = heads * T * T / 2
        row["forward_tflops"] = PAIR_FORWARD * head_dim * pairs / forward_seconds / 1e12
        row["backward_tflops"] = (PAIR_BACKWARD + PAIR_LOGITS_AGAIN) * head_dim * pairs / backward_seconds / 1e12
    return rows


def _pulled_back(pullback, do):
    return pullback(do)


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel, by its name."""
    name = kernel.lower()
    for kind, parts in KINDS.items():
        if any(part in name for part in parts):
            return kind
    return "other"


def kernel_seconds(trace: Path) -> Counter[str]:
    """Return the seconds of each kernel of a profile that `jax.profiler.trace` wrote: on a GPU of what ran in its
    streams, elsewhere of the thunks of XLA's executors.

    Raises FileNotFoundError without a profile."""
    import jax

    files = sorted(trace.glob("**/*.xplane.pb"))
    if not files:
        raise FileNotFoundError(f"{trace} has no profile")
    plane_start, line_start = ("/device:GPU", "Stream") if jax.default_backend() == "gpu" else ("/host:CPU", "tf_XLA")
    seconds: Counter[str] = Counter()
    for plane in jax.profiler.ProfileData.from_file(str(files[-1])).planes:
        if not plane.name.startswith(plane_start):
            continue
        for line in plane.lines:
            if line.name.startswith(line_start):
                for event in line.events:
                    seconds[event.name] += event.duration_ns / 1e9
    return seconds


def summary(seconds: Counter[str], most: int = 40) -> dict:
    """Return the seconds by kind, and those of the `most` kernels that took longest."""
    by_kind: Counter[str] = Counter()
    for kernel, of_kernel in seconds.items():
        by_kind[kind_of(kernel)] += of_kernel
    return {"seconds_by_kind": dict(by_kind), "seconds_by_kernel": dict(seconds.most_common(most))}


def profiled(runs: Iterable) -> dict:
    """Return the summary of the kernels while `runs` is exhausted."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in runs:
                pass
        return summary(kernel_seconds(Path(folder)))
