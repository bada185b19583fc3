"""Products with the feed-forward's features that a step computes, counted in its program: those that are due, and those
that the closed form says are computed again."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import PartitionSpec as P

from ringformer.models.config_checks import OFFLOADABLE
from ringformer.models.flops import feedforward_products
from ringformer.models.layer_scan import REMAT
from ringformer.parallel.lora import Lora, LoraConfig
from ringformer.parallel.mesh import make_mesh
from ringformer.parallel.parameters import weight_shardings
from ringformer.train.step import make_gradients
from tests.convert.families import FAMILIES
from tests.convert.families import SIZES as TINY
from tests.models.test_families import tiny
from tests.train.test_step import T, packed_batch

F = TINY["intermediate_size"]
"""No other dimension has this size."""
RANK = 5
"""Nor this: products with a factor of an adapter are not counted."""
FROZEN = [LoraConfig(rank=RANK), LoraConfig(rank=RANK, targets="q_proj"), LoraConfig(rank=RANK, targets="down_proj")]


def program_of_gradients(config, lora: LoraConfig | None = None) -> Jaxpr:
    """The program of a step's loss and gradients on one device, without what nothing reads."""
    mesh = make_mesh("1,1,1,1", jax.devices()[:1])
    adapters = Lora(lora, config, mesh) if lora else None
    trained = adapters.adapters if adapters else weight_shardings(config, mesh)
    gradients = make_gradients(config, trained, mesh, accumulate=1, lora=adapters)

    def loss_and_gradients(*arguments):
        return gradients(*arguments)[:2]

    def shapes(tree):
        return jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.float32), tree)

    frozen = [shapes(adapters.frozen)] if adapters else []
    sharded = jax.shard_map(loss_and_gradients, mesh=mesh, in_specs=P(), out_specs=P())
    program = jax.make_jaxpr(sharded)(shapes(trained), packed_batch(), *frozen).jaxpr
    return dce_jaxpr(program, [True] * len(program.outvars), instantiate=True)[0]


def count_products(program: Jaxpr, size: int) -> int:
    """Count the executed products with a dimension of this size, but for those with an adapter's factor."""
    count = 0
    for equation in program.eqns:
        if equation.primitive.name == "dot_general":
            sizes = set()
            for array in (*equation.invars, *equation.outvars):
                sizes.update(array.aval.shape)
            count += size in sizes and RANK not in sizes
        trips = equation.params["length"] if equation.primitive.name == "scan" else 1
        count += trips * sum(count_products(inner, size) for inner in inner_programs(equation.params))
    return count


def inner_programs(parameters: dict) -> list[Jaxpr]:
    is_program = (Jaxpr, ClosedJaxpr)
    found = jax.tree.leaves(parameters, is_leaf=lambda x: isinstance(x, is_program))
    return [getattr(x, "jaxpr", x) for x in found if isinstance(x, is_program)]


def check(config, lora: LoraConfig | None, expected: float | None = None):
    actual = count_products(program_of_gradients(config, lora), F) / config.num_layers
    assert actual == feedforward_products(config, frozen=lora is not None)
    assert expected is None or actual == expected


@pytest.mark.parametrize(
    ("family", "remat", "trained", "frozen"),
    [
        ("llama", "full", 11, 8),
        ("llama", "attention", 11, 8),
        ("llama", "feedforward", 9, 6),
        pytest.param("olmo3", "full", 14, 11, marks=pytest.mark.slow),
        ("olmo3", "attention", 11, 8),
        pytest.param("gemma3", "attention", 11, None, marks=pytest.mark.slow),
        pytest.param("gemma3", "feedforward", 9, None, marks=pytest.mark.slow),
    ],
)
def test_the_products_that_are_due(family, remat, trained, frozen):
    """3 forward, 3 for the activations' gradients and, unless they are frozen, 3 for the weights'."""
    config = tiny(family, remat=remat, ffn_chunk=T)
    check(config, None, trained)
    if frozen is not None:
        check(config, FROZEN[0], frozen)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, FROZEN[0]], ids=["all", "adapters"])
@pytest.mark.parametrize("remat", REMAT)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_what_the_closed_form_says(family, remat, lora):
    check(tiny(family, remat=remat, ffn_chunk=T), lora)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, *FROZEN], ids=lambda x: x.targets.split(",")[-1] if x else "all")
@pytest.mark.parametrize(
    "change", [{"remat_group": 2}, {"offload": True}, {"offload": True, "remat_group": 2}], ids=str
)
@pytest.mark.parametrize("remat", OFFLOADABLE)
@pytest.mark.parametrize("family", ["llama", "olmo3"])
def test_so_do_groups_of_layers_and_offloaded_ones(family, remat, change, lora):
    check(tiny(family, remat=remat, ffn_chunk=T, **change), lora)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, FROZEN[0]], ids=["all", "adapters"])
@pytest.mark.parametrize(("family", "kinds"), [("llama", {}), ("olmo3", {"layer_types": "FFFF", "window": 0})])
def test_so_do_layers_that_keep_less_than_others(family, kinds, lora):
    model = tiny(family, num_layers=4, **kinds)
    check(replace(model, remat="attention", offload=True, full_remat_layers=1, ffn_chunk=T), lora)


def test_the_page_has_the_closed_form():
    page = (Path(__file__).parents[2] / "docs" / "estimating.md").read_text()
    section = page.partition("<!-- products of the feed-forward -->")[2].partition("<!-- end -->")[0]
    for remat in REMAT:
        (row,) = [line for line in section.splitlines() if line.startswith(f"| `{remat}` |")]
        plain = tiny("llama", remat=remat)
        normalised = tiny("olmo3", remat=remat)
        expected = (
            feedforward_products(plain),
            feedforward_products(normalised),
            feedforward_products(plain, frozen=True),
        )
        assert [int(cell) for cell in row.split("|")[3:6]] == list(expected)


def test_chunks_of_tokens_have_all_products():
    config = tiny("llama", ffn_chunk=T // 4)
    assert count_products(program_of_gradients(config), F) == 4 * 11 * config.num_layers


def test_a_frozen_head_has_no_gradient():
    """The loss computes logits and the gradients of activations: 2 products a chunk, or 3 with those of the head."""
    config = tiny("llama", loss_chunk=T)
    vocabulary = config.vocab_size
    assert count_products(program_of_gradients(config), vocabulary) == 3
    assert count_products(program_of_gradients(config, FROZEN[0]), vocabulary) == 2
