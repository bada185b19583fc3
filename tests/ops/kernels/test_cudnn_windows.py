"""Windows through cuDNN's calls, emulated on the CPU, against dense attention within the window."""

from dataclasses import replace
from itertools import product

import jax
import numpy as np
import pytest
from flax import nnx

from ringformer.data import Batch
from ringformer.models.attention_options import attention_options
from ringformer.models.decoder import Decoder
from ringformer.models.layer_kinds import LayerKind
from ringformer.models.registry import preset_config
from ringformer.ops import layouts, window_passes
from ringformer.ops.ring_attention import ring_attention
from tests.helpers import ring_mesh
from tests.ops.kernels.cudnn_emulation import emulated
from tests.ops.kernels.test_cudnn_attention import as_float32, assert_as_good_as_dense, rounded
from tests.ops.rings import arrays, dense, on_ring

__all__ = ["emulated"]

L = 22
"""Tokens of a part of a shard."""


@pytest.fixture
def small_tiles(monkeypatch):
    """The window takes only a few tokens of an earlier part, in multiples of four."""
    monkeypatch.setattr(window_passes, "TILE", 4)


SLOW = [
    *product(["zigzag"], (1, 2, 5), (1, 2, 3, 9, L - 1, L, L + 1)),
    *product(["contiguous"], (2, 8), (1, 4, L - 2, L + 1)),
    ("contiguous", 1, 5),
]
"""Layout, ranks and window; some windows end where a part does."""

CASES = [
    ("zigzag", 2, 5),  # the keys of the part before are as many as the window joins to it
    ("zigzag", 3, 8),  # one more
    ("contiguous", 3, L + 1),  # all of the part before
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
]


@pytest.mark.usual("zigzag-2-5", "zigzag-3-8")
@pytest.mark.parametrize(("layout", "n", "W"), CASES)
def test_windows_up_to_a_part(layout, n, W, emulated, small_tiles):
    """GQA, a cotangent of o and one of lse. The first part of the sequence has no part before it.

    With two keys, little is left of dp - delta but the rounding of o.
    """
    inputs, cotangents = arrays(n * layouts.PARTS[layout] * L, d=16)
    found = on_ring(n, layout, rounded(inputs), cotangents, kernel="cudnn", window=W)
    assert_as_good_as_dense(found, inputs, cotangents, window=W, factor=2.5 if W == 2 else 2.0)
    wider = dense(inputs, cotangents, window=W + 1)
    assert np.linalg.norm(as_float32(found)["o"] - wider["o"]) > 0.02 * np.linalg.norm(wider["o"])


def test_sinks_take_weight_from_a_window(emulated, small_tiles):
    """The four gradients of the sinks are sums of what rounding left of o, so their errors vary more."""
    inputs, cotangents = arrays(2 * 2 * L, d=16, sinks=True)
    found = on_ring(2, "zigzag", rounded(inputs), cotangents, kernel="cudnn", window=9)
    assert_as_good_as_dense(found, inputs, cotangents, window=9, factor=4.0)


def test_keys_of_a_window_travel_one_way_whatever_the_form_of_the_ring(emulated, small_tiles):
    """With one key head, which both ways could not share."""
    inputs, cotangents = arrays(2 * 2 * L, d=16, K=1)
    found = on_ring(2, "zigzag", rounded(inputs), cotangents, kernel="cudnn", window=9, ring="both_ways")
    assert_as_good_as_dense(found, inputs, cotangents, window=9)
    with pytest.raises(ValueError, match="a device has 1; kernel='xla' can cut the tokens instead"):
        on_ring(2, "zigzag", rounded(inputs), cotangents, kernel="cudnn", ring="both_ways")


@pytest.mark.parametrize("u", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_heads_exchanged_around_windows(u, emulated, small_tiles):
    """A part is that of a rank: u devices hold it together."""
    inputs, cotangents = arrays(4 * 2 * L, d=16, H=8)
    found = on_ring(4, "zigzag", rounded(inputs), cotangents, kernel="cudnn", window=L + 1, ulysses=u)
    assert_as_good_as_dense(found, inputs, cotangents, window=L + 1)


def calls(n, layout, window, T):
    """Trace the op and its gradients with `T` tokens a rank."""
    inputs, _ = arrays(n * T, d=16)

    def gradients(q, k, v):
        o, pull = jax.vjp(
            lambda *x: ring_attention(*x, axis_name="sp", layout=layout, kernel="cudnn", window=window), q, k, v
        )
        return pull(o)

    spec = jax.sharding.PartitionSpec(None, "sp")
    sharded = jax.shard_map(gradients, mesh=ring_mesh(n), in_specs=spec, out_specs=(spec,) * 3)
    return jax.make_jaxpr(sharded)(*rounded(inputs).values())


def test_the_calls_of_a_window(emulated):
    """Each part attends to itself within the window, and its first queries to as many last keys of the part before: no
    query is padded, and no call stands in a loop or a branch."""
    own, before = (256, 256, ("window", 100)), (128, 128, True)
    calls(2, "zigzag", window=257, T=512)
    assert {mask for *_, mask in emulated} == {True}  # a part's own keys are all within it
    emulated.clear()
    program = str(calls(2, "zigzag", window=100, T=512))
    made = [(kind, q[1], k[1], mask) for kind, q, k, mask in emulated]
    forward = [("forward", *own)] * 2 + [("forward", *before)] * 2
    backward = [("backward", *before)] * 2 + [("backward", *own)] * 2
    assert made == forward + backward
    assert "while" not in program and "cond[" not in program


def test_a_window_that_cudnn_cannot_compute_is_refused_by_name(emulated):
    inputs, _ = arrays(2 * 2 * L, d=16)
    half = rounded(inputs).values()

    def attend(**options):
        return ring_attention(*half, axis_name=None, kernel="cudnn", **options)

    with pytest.raises(ValueError, match=r"at most 23 tokens \(window=24\); kernel='xla' takes any"):
        calls(2, "zigzag", window=L + 2, T=2 * L)
    with pytest.raises(ValueError, match=r"window \(window=4\) only without segment ids; kernel='xla' takes both"):
        attend(window=4, segment_ids=np.zeros((2, 4 * L), np.int32), segments="ascending")
    attend(window=4 * L - 1)  # one device has no other part
    attend(window=4 * L, segment_ids=np.zeros((2, 4 * L), np.int32), segments="ascending")  # it limits nothing


@pytest.mark.parametrize(
    ("window", "documents", "parts", "kernel"),
    [
        (513, False, 16, "cudnn"),
        (514, False, 16, "xla"),
        (128, True, 16, "xla"),
        (0, True, 16, "cudnn"),
        (1023, False, 1, "cudnn"),  # there is no ring, so no other part
        (1023, True, 1, "xla"),
        (1024, True, 1, "cudnn"),  # it limits nothing
        (8192, True, 16, "cudnn"),
    ],
)
def test_layers_use_cudnn_where_it_can_compute_their_window(window, documents, parts, kernel):
    """1,024 tokens a rank are two parts of 512 in zigzag. XLA computes the other windows, in small chunks."""
    c = preset_config("gemma3_1b", kernel="cudnn", layout="zigzag")
    options = attention_options(c, LayerKind(window), 1024, documents=documents, parts=parts)
    assert options["kernel"] == kernel
    assert (options["q_chunk"] is None) == (kernel == "cudnn")


def test_a_model_computes_its_windows_by_cudnn_where_no_token_has_a_document(emulated):
    """Gemma 3's layers with a window of eight tokens call cuDNN in the loss of a batch without segment ids; with some,
    XLA computes them. The loss is that of XLA's blocks."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 1}
    sizes |= {"head_dim": 16, "num_layers": 6, "window": 8, "layer_types": "WF", "compute_dtype": "bfloat16"}
    config = preset_config("gemma3_1b", kernel="cudnn", **sizes)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 33), np.int32)
    positions = np.tile(np.arange(32, dtype=np.int32), (2, 1))
    mask = np.ones((2, 32), bool)
    alone = Batch(tokens[:, :-1], tokens[:, 1:], positions, None, mask, ~mask)
    packed = alone._replace(segment_ids=np.repeat(np.arange(2, dtype=np.int32), 16)[None].repeat(2, axis=0))
    for batch, masks in ((alone, {("window", 8), True}), (packed, set())):
        emulated.clear()
        loss = Decoder(config, rngs=nnx.Rngs(0)).loss(batch)
        expected = Decoder(replace(config, kernel="xla"), rngs=nnx.Rngs(0)).loss(batch)
        assert abs(float(loss) / float(expected) - 1) < 1e-3
        assert {mask for *_, mask in emulated} == masks  # documents of 32 tokens are all diagonal, which XLA computes
