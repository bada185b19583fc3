"""The calls themselves, lowered for CUDA without a device: they are those that JAX makes of its own attention."""

import json
import re
from inspect import signature

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as theirs

from ringformer.ops.kernels import cudnn_calls

B, T, S, H, K, d = 2, 24, 40, 6, 2, 16


def lowered_call(function, *arrays) -> str:
    """The only custom call of a function."""
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (line for line in text.splitlines() if "__cudnn$" in line)
    return line


def parts(line: str) -> dict:
    """What XLA is told: target, what it is configured with, layouts and types (of a workspace any size)."""
    config = re.search(r'backend_config = "((?:[^"\\]|\\.)*)"', line)[1]
    return {
        "target": re.search(r"@(\S+)\(", line)[1],
        "config": json.loads(config.replace("\\22", '"').replace('\\"', '"')),
        "layouts": re.findall(r"(?:operand|result)_layouts = \[.*?\]", line),
        "version": re.findall(r"api_version = \d+", line),
        "types": re.sub(r"\d+xui8", "0xui8", line[line.rindex(" : (") :].split(" loc(")[0]),
    }


def as_jax_binds(primitive, tensors, more, mask, lengths=(), **options):
    """JAX's own primitive on these arrays, as `jax.nn.dot_product_attention` binds it."""
    none = [jnp.zeros(0, jnp.int32)] * (6 - len(lengths))
    nothing = jnp.zeros(0, jnp.bfloat16), *lengths, *none
    options |= dict(
        scale=0.3,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=mask,
        layout=theirs.AttentionLayout.BTNH.value,
    )
    options = {"sliding_window_length": None, **options}
    if "score_mod" in signature(theirs._dot_product_attention_fwd).parameters:
        options |= dict(score_mod_name=None, score_mod_jaxpr=None)  # JAX 0.12
    return primitive.bind(*tensors, *nothing, *more, **options)


def inputs(S):
    return [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((B, T, H, d), (B, S, K, d), (B, S, K, d))]


@pytest.mark.parametrize("causal", [True, False])
def test_forward_is_the_call_that_jax_makes(causal):
    mask = theirs.MaskType.CAUSAL if causal else theirs.MaskType.NO_MASK
    arrays = inputs(T if causal else S)
    ours = lowered_call(lambda q, k, v: cudnn_calls.forward(q, k, v, 0.3, causal), *arrays)
    jax_s = lowered_call(
        lambda *x: as_jax_binds(theirs._dot_product_attention_fwd_p, x, (), mask, is_training=True), *arrays
    )
    assert parts(ours) == parts(jax_s)


def test_a_window_is_the_call_that_jax_makes():
    """A sliding window of a causal mask, forward and backward."""
    q, k, v = inputs(T)
    lse = jax.ShapeDtypeStruct((B, H, T), jnp.float32)
    mask = theirs.MaskType.CAUSAL
    ours = lowered_call(lambda q, k, v: cudnn_calls.forward(q, k, v, 0.3, True, window=7), q, k, v)

    def their_forward(*x):
        forward = theirs._dot_product_attention_fwd_p
        return as_jax_binds(forward, x, (), mask, is_training=True, sliding_window_length=7)

    assert parts(ours) == parts(lowered_call(their_forward, q, k, v))
    assert parts(ours)["config"]["cudnn_fmha_backend_config"]["sliding_window_length"] == 7

    def our_backward(q, k, v, o, lse, do):
        return cudnn_calls.backward(q, k, v, o, lse, do, 0.3, True, window=7)

    def their_backward(q, k, v, o, lse, do):
        backward = theirs._dot_product_attention_bwd_p
        return as_jax_binds(backward, (q, k, v), (lse, o, do), mask, sliding_window_length=7)

    arrays = q, k, v, q, lse, q
    assert parts(lowered_call(our_backward, *arrays)) == parts(lowered_call(their_backward, *arrays))


@pytest.mark.parametrize("causal", [True, False])
def test_backward_is_the_call_that_jax_makes(causal):
    mask = theirs.MaskType.CAUSAL if causal else theirs.MaskType.NO_MASK
    q, k, v = inputs(T if causal else S)
    lse = jax.ShapeDtypeStruct((B, H, T), jnp.float32)
    ours = lowered_call(
        lambda q, k, v, o, lse, do: cudnn_calls.backward(q, k, v, o, lse, do, 0.3, causal), q, k, v, q, lse, q
    )
    jax_s = lowered_call(
        lambda q, k, v, o, lse, do: as_jax_binds(theirs._dot_product_attention_bwd_p, (q, k, v), (lse, o, do), mask),
        q,
        k,
        v,
        q,
        lse,
        q,
    )
    assert parts(ours) == parts(jax_s)


def test_rectangles_are_the_calls_that_jax_makes_with_a_padding_mask():
    """Lengths are the last operands, int32 [B], of queries and of keys."""
    q, k, v = inputs(S)
    lse, lengths = jax.ShapeDtypeStruct((B, H, T), jnp.float32), jax.ShapeDtypeStruct((B,), jnp.int32)
    padding = theirs.MaskType.PADDING
    ours = lowered_call(
        lambda q, k, v, *lengths: cudnn_calls.forward(q, k, v, 0.3, lengths=lengths), q, k, v, lengths, lengths
    )
    jax_s = lowered_call(
        lambda q, k, v, *lengths: as_jax_binds(
            theirs._dot_product_attention_fwd_p, (q, k, v), (), padding, lengths, is_training=True
        ),
        *(q, k, v, lengths, lengths),
    )
    assert parts(ours) == parts(jax_s)
    assert parts(ours)["config"]["cudnn_fmha_backend_config"]["mask_type"] == "PADDING"
    assert re.search(r"\(%arg0, %arg1, %arg2, %arg3, %arg4\)", ours)
    arrays = (q, k, v, q, lse, q, lengths, lengths)
    ours = lowered_call(
        lambda q, k, v, o, lse, do, *lengths: cudnn_calls.backward(q, k, v, o, lse, do, 0.3, lengths=lengths), *arrays
    )
    jax_s = lowered_call(
        lambda q, k, v, o, lse, do, *lengths: as_jax_binds(
            theirs._dot_product_attention_bwd_p, (q, k, v), (lse, o, do), padding, lengths
        ),
        *arrays,
    )
    assert parts(ours) == parts(jax_s)
    assert re.search(r"\(%arg0, %arg1, %arg2, %arg4, %arg5, %arg3, %arg6, %arg7\)", ours)  # q, k, v, lse, do, o


@pytest.mark.parametrize(("K", "expected"), [(6, 4 * B * 6 * T * 17), (2, 4 * B * 6 * T * 17 + 4 * B * 6 * S * 16)])
def test_the_workspace_of_the_backward(K, expected):
    """dq and delta in float32; with GQA dk and dv of each query head."""
    q, k = jax.ShapeDtypeStruct((B, T, H, d), jnp.bfloat16), jax.ShapeDtypeStruct((B, S, K, d), jnp.bfloat16)
    lse = jax.ShapeDtypeStruct((B, H, T), jnp.float32)
    line = lowered_call(
        lambda q, k, v, o, lse, do: cudnn_calls.backward(q, k, v, o, lse, do, 1.0, False), q, k, k, q, lse, q
    )
    assert f"tensor<{expected}xui8>" in line


def test_float16_too():
    q = jax.ShapeDtypeStruct((B, T, H, d), jnp.float16)
    line = lowered_call(lambda q: cudnn_calls.forward(q, q, q, 1.0, True), q)
    config = parts(line)["config"]["cudnn_fmha_backend_config"]
    assert config["intermediate_tensor_shape"]["element_type"] == "F16" and "xf16>" in line
