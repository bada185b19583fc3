"""The model on one device: attention kinds agree, packed documents do not see each other, sizes are the known ones."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ringformer.data import Batch
from ringformer.models.decoder import Decoder
from ringformer.models.families.llama import PRESETS, LlamaConfig, preset
from ringformer.models.interface import Axes
from ringformer.models.layer_scan import REMAT
from ringformer.models.own_attention import ATTENTION
from ringformer.ops import layouts
from ringformer.ops.tokenwise.rope import RopeScaling
from tests.helpers import relative_error

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    init_std=0.2,
    compute_dtype="float32",
    attention="vanilla",
    ffn_chunk=24,
    loss_chunk=20,
    q_chunk=16,
    k_chunk=16,
)


def batch(B=2, T=56, edge=23):
    """Two packed documents a row, with their own positions, and a ragged mask."""
    rng = np.random.default_rng(0)
    columns = np.arange(T)
    positions = np.where(columns < edge, columns, columns - edge)
    draw = rng.integers(0, CONFIG.vocab_size, (2, B, T))
    return Batch(
        *(jnp.asarray(x, jnp.int32) for x in draw),
        positions=jnp.tile(jnp.asarray(positions, jnp.int32), (B, 1)),
        segment_ids=jnp.tile(jnp.asarray(1 + (columns >= edge), jnp.int32), (B, 1)),
        mask=jnp.asarray(rng.random((B, T)) < 0.7),
        ends=jnp.zeros((B, T), bool),
    )


def loss_and_gradients(config):
    definition, state = nnx.split(Decoder(config, rngs=nnx.Rngs(3)))
    return jax.jit(jax.value_and_grad(lambda s: nnx.merge(definition, s).loss(batch())))(state)


@pytest.fixture(scope="module")
def oracle():
    """Loss and gradients of dense attention that keeps everything, by number of layers."""
    return {L: loss_and_gradients(dataclasses.replace(CONFIG, remat="none", num_layers=L)) for L in (2, 4)}


SOME_KEPT = {"remat": "attention", "offload": True, "full_remat_layers": 1}


@pytest.mark.usual(
    "{'attention': 'memory_efficient'}",
    "{'attention': 'ring'}",
    "{'attention': 'ring', 'remat': 'attention', 'offload': True}",
    "{'attention': 'ring', 'num_layers': 4, 'remat': 'attention', 'offload': True, 'full_remat_layers': 3}",
)
@pytest.mark.parametrize(
    "change",
    [
        *({"attention": kind} for kind in ATTENTION[1:]),
        *({"attention": "ring", "remat": name} for name in REMAT if name != "dots"),
        pytest.param({"attention": "ring", "remat": "dots"}, marks=pytest.mark.slow),
        pytest.param({"num_layers": 4, "remat_group": 2, "remat": "full"}, marks=pytest.mark.slow),
        {"num_layers": 4, "remat_group": 2, "remat": "attention"},
        *({"attention": kind, "head_groups": 2} for kind in ("vanilla", "ring")),
        {"attention": "ring", "num_layers": 4, "remat_group": 2, "head_groups": 2, "offload": True},
        {"attention": "ring", "num_layers": 4, "remat_group": 3, "remat": "attention", "offload": True},
        {"attention": "ring", "remat": "attention", "offload": True},
        {"attention": "ring", "remat": "attention", "offload": True, "head_groups": 2},
        {"attention": "ring", "num_layers": 4, "remat": "attention", "offload": True, "full_remat_layers": 3},
        SOME_KEPT | {"attention": "ring", "fetch_ahead": False},
    ],
    ids=str,
)
def test_kinds_and_remat_policies_agree(oracle, change):
    config = dataclasses.replace(CONFIG, **change)
    loss, gradients = loss_and_gradients(config)
    expected_loss, expected_gradients = oracle[config.num_layers]
    assert relative_error(loss, expected_loss) < 1e-6
    assert max(jax.tree.leaves(jax.tree.map(relative_error, gradients, expected_gradients))) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("attention", ATTENTION[1:])
def test_kinds_agree_on_a_window(attention):
    """Each with documents, and unlike a model without a window."""
    config = dataclasses.replace(CONFIG, window=9)
    loss, gradients = loss_and_gradients(config)
    expected, of_full = loss_and_gradients(dataclasses.replace(config, attention=attention)), loss_and_gradients(CONFIG)
    assert abs(expected[0] - loss) <= 1e-6 * abs(loss) < abs(of_full[0] - loss)
    for a, b in zip(jax.tree.leaves(expected[1]), jax.tree.leaves(gradients), strict=True):
        assert relative_error(a, b) <= 1e-5


def test_bfloat16_compute_keeps_float32_weights(oracle):
    loss, gradients = loss_and_gradients(dataclasses.replace(CONFIG, attention="ring", compute_dtype="bfloat16"))
    assert relative_error(loss, oracle[2][0]) < 2e-2
    assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}


def test_logits_of_a_bfloat16_model_are_float32():
    """What a sampler or an evaluation sees is the product of hidden states and head, not rounded to bfloat16."""
    model, b = Decoder(dataclasses.replace(CONFIG, compute_dtype="bfloat16"), rngs=nnx.Rngs(0)), batch()
    logits, x = (f(b.tokens, b.positions, b.segment_ids) for f in (model, model.hidden))
    x, head = (np.asarray(a.astype(jnp.bfloat16)).astype(np.float64) for a in (x, model.head[...]))
    assert logits.dtype == jnp.float32 and relative_error(logits, x @ head) < 1e-6


@pytest.mark.parametrize("attention", ATTENTION)
def test_a_document_does_not_see_its_packed_neighbour(attention):
    """Changing document 1 leaves the logits of document 2 bitwise the same, and its own change."""
    model = Decoder(dataclasses.replace(CONFIG, attention=attention), rngs=nnx.Rngs(0))
    b = batch(edge=23)
    changed = b.tokens.at[:, :23].set((b.tokens[:, :23] + 1) % CONFIG.vocab_size)
    before, after = (np.asarray(model(t, b.positions, b.segment_ids)) for t in (b.tokens, changed))
    np.testing.assert_array_equal(before[:, 23:], after[:, 23:])
    assert (before[:, :23] != after[:, :23]).any()


def test_a_packed_document_is_computed_as_if_alone():
    model = Decoder(dataclasses.replace(CONFIG, attention="ring"), rngs=nnx.Rngs(0))
    b = batch(edge=23)
    packed = model(b.tokens, b.positions, b.segment_ids)
    assert relative_error(model(b.tokens[:, 23:]), packed[:, 23:]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("layout, tp", [("zigzag", 2), ("striped", 1), ("contiguous", 1)])
def test_positions_default_to_the_places_in_the_sequence(layout, tp):
    """On a ring of two, the stream sharded over tp as well, logits without positions are those of one device."""
    n, T = 2, 16
    config = dataclasses.replace(CONFIG, attention="ring", layout=layout, num_layers=1)
    model = Decoder(config, rngs=nnx.Rngs(0))
    definition, state = nnx.split(model)
    over_tp = jax.tree.map(
        lambda p: P(*(["tp" if x in "HKF" else None for x in ("L" * (p.ndim - len(p.letters))) + p.letters])),
        state,
        is_leaf=lambda p: isinstance(p, nnx.Variable),
    )
    run = jax.shard_map(
        lambda state, tokens: nnx.merge(definition, state)(tokens, axes=Axes("sp", "tp")),
        mesh=jax.make_mesh((n, tp), ("sp", "tp"), axis_types=(AxisType.Auto,) * 2),
        in_specs=(over_tp, P(None, ("sp", "tp"))),
        out_specs=P(None, ("sp", "tp")),
    )
    tokens, order = batch(T=T).tokens, layouts.permutation(layout, T, n)
    assert relative_error(jax.jit(run)(state, tokens[:, order]), model(tokens)[:, order]) < 1e-5


def test_loss_is_the_log_likelihood_of_the_logits():
    model, b = Decoder(CONFIG, rngs=nnx.Rngs(0)), batch()
    log_p = jax.nn.log_softmax(model(b.tokens, b.positions, b.segment_ids))
    picked = np.take_along_axis(np.asarray(log_p), np.asarray(b.targets)[..., None], axis=-1)[..., 0]
    assert relative_error(model.loss(b), -(picked * np.asarray(b.mask)).sum()) < 1e-6


def test_tied_embeddings_have_one_table():
    config = dataclasses.replace(CONFIG, tie_embeddings=True)
    model = Decoder(config, rngs=nnx.Rngs(0))
    assert not hasattr(model, "head")
    gradient = jax.grad(lambda m: m.loss(batch()))(model).embed[...]
    assert np.isfinite(gradient).all() and gradient.any()
    assert config.num_params == sum(x.size for x in jax.tree.leaves(nnx.state(model)))


PARAMETERS = {
    "llama_3b": 3.426e9,
    "llama_7b": 6.738e9,
    "llama_13b": 13.016e9,
    "llama_30b": 32.529e9,
    "llama_65b": 65.286e9,
    "llama3_8b": 8.030e9,
    "llama3_70b": 70.554e9,
    "llama3.1_8b": 8.030e9,
    "llama3.1_70b": 70.554e9,
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    config = LlamaConfig(**preset(name))
    if name in PARAMETERS:
        assert config.num_params == pytest.approx(PARAMETERS[name], rel=2e-4)
    shapes = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    assert config.num_params == sum(x.size for x in jax.tree.leaves(nnx.state(shapes)))


@pytest.mark.parametrize(("name", "factor"), [("llama3_8b", None), ("llama3.1_70b", 8), ("llama3.2_1b", 32)])
def test_presets_are_scaled_as_their_releases(name, factor):
    config = LlamaConfig(**preset(name))
    kind = dict(kind="llama3", factor=factor, original_max_position=8192, low_freq_factor=1, high_freq_factor=4)
    assert config.rope_scaling == (RopeScaling(**kind) if factor else RopeScaling())
    assert config.rope_theta == 5e5


def test_a_config_is_the_same_from_its_own_dictionary():
    config = LlamaConfig(**preset("llama3.2_1b"))
    again = LlamaConfig(**json.loads(json.dumps(dataclasses.asdict(config))))
    assert again == config and hash(again) == hash(config)


def test_logits_follow_the_scaling():
    """Linear by 2: position 2p is seen where p was; YaRN's amplitude changes even the first token's neighbours."""
    b = batch(edge=100)
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    halved = Decoder(dataclasses.replace(CONFIG, rope_scaling=RopeScaling("linear", 2.0)), rngs=nnx.Rngs(0))
    assert relative_error(halved(b.tokens, 2 * b.positions), model(b.tokens, b.positions)) < 1e-5
    louder = RopeScaling("yarn", 1.0, original_max_position=64, attention_factor=2.0)
    louder = Decoder(dataclasses.replace(CONFIG, rope_scaling=louder), rngs=nnx.Rngs(0))
    assert relative_error(louder(b.tokens), model(b.tokens)) > 1e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention": "flash"}, "unknown attention 'flash'; known: vanilla"),
        ({"layout": "zig"}, "unknown layout 'zig'"),
        ({"remat": "some"}, "unknown remat 'some'"),
        ({"compute_dtype": "float16"}, "unknown compute_dtype 'float16'"),
        ({"num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"rope_theta": 1.0}, "rope_theta=1.0 must be above 1"),
        ({"rope_scaling": {"kind": "linear"}}, "kind linear needs factor"),
        ({"ulysses": 0}, "ulysses=0 must be positive"),
        ({"window": -1}, "window=-1 must not be negative"),
        ({"window": 8, "attention": "ring", "layout": "striped"}, "window=8 with layout='striped': .*'zigzag'"),
        ({"ring": "two_ways"}, "unknown ring 'two_ways'; known: one_way, both_ways, gathered"),
        ({"ffn_chunk": 0}, "ffn_chunk=0 must be positive"),
        ({"remat_group": 3}, "remat_group=3 exceeds num_layers=2"),
        ({"head_groups": 4}, "head_groups=4 does not divide num_kv_heads=2"),
        ({"offload": True, "remat": "dots"}, "remat must be full or attention, not dots"),
        (SOME_KEPT | {"full_remat_layers": -1}, "full_remat_layers=-1 must not be negative"),
        ({"full_remat_layers": 1, "offload": True}, "full_remat_layers=1 with remat=full"),
        (SOME_KEPT | {"offload": False}, "full_remat_layers=1 with remat=attention and offload=False"),
        (SOME_KEPT | {"full_remat_layers": 2}, "leaves none of num_layers=2: set remat=full"),
        (
            SOME_KEPT | {"remat_group": 2},
            "full_remat_layers=1 with remat_group=2: set one of them",
        ),
    ],
)
def test_configs_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_unknown_preset_lists_the_known():
    with pytest.raises(ValueError, match=r"unknown model 'llama_8b'; known models: tiny"):
        preset("llama_8b")
