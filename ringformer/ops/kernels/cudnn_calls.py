"""cuDNN's fused attention as two calls, forward and backward, of arrays [B, T, H, d] in bfloat16 or float16.

They are the custom calls of XLA that `jax.nn.dot_product_attention` also makes. This module makes them with `jax.ffi`
for three reasons: JAX's own function drops the cotangent of lse, keeps its backward private, and asks the devices of
this process what cuDNN supports, although the program may be compiled for other devices. cuDNN compiles the calls, and
refuses unsupported ones, when XLA compiles the program for a device that is present.

Query head h reads key head h // (H // K). Logits are in natural units. Sums are computed in float32, and results are
rounded to the dtype of the inputs.

A call sees all pairs, the pairs under a causal mask, of these those within a window, or, with `lengths`, a rectangle:
the first `lengths[0][b]` queries and the first `lengths[1][b]` keys of row b (cuDNN's padding mask). Results outside
the rectangle are undefined. Lengths are at least 1.
"""

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

FORWARD = "__cudnn$fmhaSoftmax"
BACKWARD = "__cudnn$fmhaSoftmaxBackward"
"""XLA's names of the calls."""

Lengths = tuple[Int32[Array, " B"], Int32[Array, " B"]]
"""Queries and keys of the rectangle that each row of the batch sees."""

_ELEMENT_TYPES = {"bfloat16": "BF16", "float16": "F16"}


def forward(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K d"],
    scale: float,
    causal: bool = False,
    lengths: Lengths | None = None,
    window: int | None = None,
) -> tuple[Float[Array, "B T H d"], Float32[Array, "B H T"]]:
    """Return `(o, lse)`: attention of the queries to only these keys, and the log of each row's sum of exp(logit).

    Args:
      causal: row t sees columns 0 .. t (T = S).
      lengths: rows and columns of the visible rectangle, instead of a causal mask.
      window: with a causal mask, row t sees the last `window` of its columns; None: all.
    """
    B, T, H, d = q.shape
    config = _config(q, k, scale, _mask(causal, lengths), window, _FORWARD)
    o, lse = _call(FORWARD, (q, k, v, *(lengths or ())), [(B, H, T, d)], [(B, H, T)], 0, config)
    return o.swapaxes(1, 2), lse


def backward(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B S K d"],
    v: Float[Array, "B S K d"],
    o: Float[Array, "B T H d"],
    lse: Float32[Array, "B H T"],
    do: Float[Array, "B T H d"],
    scale: float,
    causal: bool = False,
    lengths: Lengths | None = None,
    window: int | None = None,
) -> tuple[Float[Array, "B T H d"], Float[Array, "B S K d"], Float[Array, "B S K d"]]:
    """Return `(dq, dk, dv)` with p = exp(scale q k^T - lse) and ds = p (do v^T - rowsum(o do)). The rows that `o` and
    `lse` describe may also see keys that are not in this call."""
    B, T, H, d = q.shape
    _, S, K, _ = k.shape
    config = _config(q, k, scale, _mask(causal, lengths), window, _BACKWARD)
    shapes = [(B, H, T, d), (B, K, S, d), (B, K, S, d)]
    operands = (q, k, v, lse, do, o, *(lengths or ()))
    dq, dk, dv = _call(BACKWARD, operands, shapes, [], _workspace(q, k), config)
    return dq.swapaxes(1, 2), dk.swapaxes(1, 2), dv.swapaxes(1, 2)


def _workspace(q, k) -> int:
    """Bytes that the backward takes besides its results: dq and rowsum(o do) in float32 and, with GQA, dk and dv for
    each query head. Only estimates use this value; on a device, XLA replaces it with cuDNN's own."""
    B, T, H, d = q.shape
    _, S, K, _ = k.shape
    return 4 * B * H * T * (d + 1) + (2 * q.dtype.itemsize * B * H * S * d if H > K else 0)


def _call(target, operands, head_major, float32, workspace, config):
    """Call cuDNN. Results of shape [B, H, T, d] are in memory as [B, T, H, d].

    The workspace is no result of the compiled program, also where operations are compiled one by one: on a device, XLA
    changes its size, and would then find a program whose results have other shapes than it promised.
    """
    q = jax.typeof(operands[0])

    def result(shape, dtype):
        sharding = NamedSharding(q.sharding.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=q.manual_axis_type)

    results = [result(shape, q.dtype) for shape in head_major] + [result(shape, jnp.float32) for shape in float32]
    results.append(result((workspace,), jnp.uint8))
    layouts = [(0, 2, 1, 3)] * len(head_major) + [tuple(range(len(shape))) for shape in float32] + [(0,)]
    call = jax.ffi.ffi_call(
        target,
        results,
        output_layouts=layouts,
        vmap_method="sequential",
        custom_call_api_version=2,
        legacy_backend_config=json.dumps(config, separators=(",", ":")),
    )

    @partial(jax.jit, inline=True)
    def without_workspace(first, *others):
        return call(_only_on_gpu.bind(first), *others)[:-1]

    return without_workspace(*operands)


# --- the configuration of a call (CudnnfMHABackendConfig) ----------------------------------------------------------

_FORWARD = {"bmm1": ((3, 3), (2, 2)), "bmm2": ((3, 1), (1, 2))}
_BACKWARD = {
    "bmm1_grad_gemm1": ((2, 1), (1, 2)),
    "bmm1_grad_gemm2": ((3, 1), (1, 2)),
    "bmm2_grad_gemm1": ((2, 1), (1, 2)),
    "bmm2_grad_gemm2": ((3, 3), (2, 2)),
}
"""Dimension numbers of each product: the dimensions of both factors that are summed over, and those of the heads."""


def _mask(causal: bool, lengths: Lengths | None) -> str:
    """Return XLA's name of the mask."""
    if lengths is not None:
        return "PADDING"
    return "CAUSAL" if causal else "NO_MASK"


def _config(q, k, scale, mask, window, products) -> dict[str, Any]:
    B, T, H, _ = q.shape
    S = k.shape[1]
    layout = {
        "dim_level_types": [],
        "dim_unique": [],
        "dim_ordered": [],
        "minor_to_major": ["3", "2", "1", "0"],
        "tiles": [],
        "element_size_in_bits": "0",
        "memory_space": "0",
        "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
        "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
        "dynamic_shape_metadata_prefix_bytes": "0",
    }
    logits = {
        "element_type": _ELEMENT_TYPES[q.dtype.name],
        "dimensions": [str(n) for n in (B, H, T, S)],
        "tuple_shapes": [],
        "layout": layout,
        "is_dynamic_dimension": [False] * 4,
    }
    algorithm = {
        "algo_id": "0",
        "math_type": "TENSOR_OP_MATH",
        "tuning_knobs": {"17": "1", "24": "0"},
        "is_cudnn_frontend": True,
        "workspace_size": "0",
    }
    config = {
        "algorithm": algorithm,
        "fmha_scale": scale,
        "intermediate_tensor_shape": logits,
        "is_flash_attention": True,
        "mask_type": mask,
        "dropout_rate": 0.0,
        "seed": 0,
        "sliding_window_length": window or 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    for name, (summed, heads) in products.items():
        config[f"{name}_dot_dimension_numbers"] = {
            "lhs_contracting_dimensions": [str(summed[0])],
            "rhs_contracting_dimensions": [str(summed[1])],
            "lhs_batch_dimensions": ["0", str(heads[0])],
            "rhs_batch_dimensions": ["0", str(heads[1])],
        }
    return {"operation_queue_id": "0", "cudnn_fmha_backend_config": config}


# --- other platforms ----------------------------------------------------------------------------------------------


def _refuse(context, *_):
    platforms = " and ".join(context.module_context.platforms)
    raise NotImplementedError(f"kernel='cudnn' runs on GPUs; kernel='xla' runs on {platforms} too")


_only_on_gpu = Primitive("only_on_gpu")
_only_on_gpu.def_impl(lambda x: jax.jit(_only_on_gpu.bind)(x))
_only_on_gpu.def_abstract_eval(lambda x: x)
batching.defvectorized(_only_on_gpu)
mlir.register_lowering(_only_on_gpu, _refuse)
mlir.register_lowering(_only_on_gpu, lambda context, x: [x], platform="cuda")
