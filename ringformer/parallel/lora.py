"""Low-rank adapters (LoRA, Hu et al. 2021): a frozen weight W is used as W + alpha/rank A B, and only A and B train.

A and B are sharded over the mesh as weights are, and added to a layer's gathered weights just before they are used. So
a weight needs no gradient, no moments and no scatter; and a merged model computes what the adapters did.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ringformer.models.interface import ModelConfig
from ringformer.ops.tokenwise.layer_weight import LayerWeight
from ringformer.parallel.parameters import abstract_model, named, shard_weights, weight_shardings
from ringformer.parallel.weight_sharding import WeightSharding

PROJECTIONS = {
    "q_proj": ("attention", "wq", 1),
    "k_proj": ("attention", "wk", 1),
    "v_proj": ("attention", "wv", 1),
    "o_proj": ("attention", "wo", 2),
    "gate_proj": ("feedforward", "w_gate", 1),
    "up_proj": ("feedforward", "w_up", 1),
    "down_proj": ("feedforward", "w_down", 1),
}
"""For each target, by its name in Hugging Face's models: its place in a layer, and its number of input dimensions."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of a frozen model, `init_from`."""

    rank: int = 0
    """Rank of the adapters; 0: there are none, and all weights train."""
    alpha: float | None = None
    """The product of an adapter's factors is multiplied by alpha/rank; unset: twice the rank."""
    targets: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    """Projections that have an adapter, in every layer."""
    base_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which the devices hold the frozen weights."""

    def check(self) -> None:
        """Raise ValueError for a value that no run can have."""
        if self.rank < 0:
            raise ValueError(f"lora.rank={self.rank} must be at least 0")
        if self.rank == 0:
            raise ValueError("lora.rank=0 trains all weights, but other keys of lora are set: set lora.rank, or none")
        if self.alpha is not None and not 0 < self.alpha < float("inf"):
            raise ValueError(f"lora.alpha={self.alpha} must be positive")
        if self.base_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"unknown lora.base_dtype {self.base_dtype!r}; choose float32 or bfloat16")
        unknown = [name for name in self.names if name not in PROJECTIONS]
        if unknown:
            raise ValueError(f"lora.targets has {', '.join(unknown)}; the projections are {', '.join(PROJECTIONS)}")
        if not self.names:
            raise ValueError(f"lora.targets is empty; the projections are {', '.join(PROJECTIONS)}")

    @property
    def names(self) -> tuple[str, ...]:
        """The targets, in the order of `PROJECTIONS`."""
        given = [name.strip() for name in self.targets.split(",") if name.strip()]
        return tuple(sorted(dict.fromkeys(given), key=lambda name: [*PROJECTIONS, name].index(name)))

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's factors."""
        return 2.0 if self.alpha is None else self.alpha / self.rank

    def shapes(self, model: ModelConfig) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the shapes of a model's adapters, stacked over its layers, and their shape letters."""
        _, shapes, letters = abstract_model(model)
        of_adapters: dict[str, Any] = {}
        their_letters: dict[str, Any] = {}
        for name in self.names:
            part, weight, inputs = PROJECTIONS[name]
            if weight not in shapes.get("layers", {}).get(part, {}):
                raise ValueError(f"lora.targets has {name}, which a {type(model).__name__} has not")
            L, *sizes = shapes["layers"][part][weight].shape
            of = letters["layers"][part][weight]
            most = min(math.prod(sizes[:inputs]), math.prod(sizes[inputs:]))
            if self.rank > most:
                raise ValueError(f"lora.rank={self.rank} is more than the rank of {name}, which is at most {most}")
            a = jax.ShapeDtypeStruct((L, *sizes[:inputs], self.rank), jnp.float32)
            b = jax.ShapeDtypeStruct((L, self.rank, *sizes[inputs:]), jnp.float32)
            of_adapters.setdefault(part, {})[weight] = {"a": a, "b": b}
            their_letters.setdefault(part, {})[weight] = {"a": f"{of[:inputs]}r", "b": f"r{of[inputs:]}"}
        return {"layers": of_adapters}, {"layers": their_letters}

    def num_params(self, model: ModelConfig) -> int:
        """Number of parameters of a model's adapters."""
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self.shapes(model)[0]))


NO_ADAPTERS = LoraConfig()


class Adapted(NamedTuple):
    """A frozen weight with its adapter, of which a device has shards."""

    w: Any
    a: Any
    """float32 [inputs..., rank]."""
    b: Any
    """float32 [rank, outputs...]."""


@dataclass(frozen=True)
class AdaptedSharding:
    """Sharding of an `Adapted` weight, or of a frozen weight without an adapter."""

    w: WeightSharding
    a: WeightSharding | None
    b: WeightSharding | None
    scale: float

    @property
    def spec(self) -> Any:
        """Axes of each dimension of each array."""
        if self.a is None or self.b is None:
            return self.w.spec
        return Adapted(self.w.spec, self.a.spec, self.b.spec)

    def for_layer(self, x: Any, dtype: DTypeLike) -> jax.Array | LayerWeight:
        """Gather the weight and its adapter: their sum in `dtype`, and, if the layer has products with it, the factors
        of what was added (inside `shard_map`)."""
        if self.a is None or self.b is None:
            return LayerWeight(lax.stop_gradient(self.w.gather(x, dtype).astype(dtype)))
        w = self.w.gather(x.w, dtype)
        a = self.a.gather(x.a, jnp.float32)
        b = self.b.gather(x.b, jnp.float32)
        both = merged(w.astype(dtype), a, b, self.scale)
        if not self.w.of_product:
            return both
        return LayerWeight(lax.stop_gradient(both), None, self.scale * a, b)


def merged(w: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """Return w + scale a b in w's dtype, added in float32."""
    product = jnp.tensordot(a, b, axes=1, precision=lax.Precision.HIGHEST)
    return (w.astype(jnp.float32) + scale * product).astype(w.dtype)


def combine(weights: dict[str, Any], adapters: dict[str, Any], make: Callable[[Any, Any, Any], Any]) -> dict[str, Any]:
    """Return the tree of weights with `make(w, a, b)` for each weight that has an adapter."""
    if adapters.keys() == {"a", "b"}:
        return make(weights, adapters["a"], adapters["b"])
    combined = dict(weights)
    for name, adapter in adapters.items():
        combined[name] = combine(weights[name], adapter, make)
    return combined


@dataclass(frozen=True)
class Lora:
    """The adapters of a model on a mesh."""

    config: LoraConfig
    model: ModelConfig
    mesh: Mesh

    @cached_property
    def _described(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.config.shapes(self.model)

    @property
    def letters(self) -> dict[str, Any]:
        """Shape letters of the adapters."""
        return self._described[1]

    @cached_property
    def adapters(self) -> dict[str, Any]:
        """A `WeightSharding` for each array of the adapters."""
        return shard_weights(*self._described, self.mesh)

    @cached_property
    def frozen(self) -> dict[str, Any]:
        """A `WeightSharding` for each weight of the model."""
        return weight_shardings(self.model, self.mesh)

    @cached_property
    def weights(self) -> dict[str, Any]:
        """Shardings of the weights with their adapters. A projection without an adapter is known to be frozen, too."""
        adapters: dict[str, Any] = {}
        for part, weight, _ in PROJECTIONS.values():
            adapter = self.adapters["layers"].get(part, {}).get(weight)
            sharding = self.frozen["layers"].get(part, {}).get(weight)
            if adapter is None and sharding is not None and sharding.of_product:
                adapter = {"a": None, "b": None}
            if adapter is not None:
                adapters.setdefault(part, {})[weight] = adapter
        make = partial(AdaptedSharding, scale=self.config.scale)
        return combine(self.frozen, {"layers": adapters}, make)

    def merge(self, weights: dict[str, Any], adapters: dict[str, Any]) -> dict[str, Any]:
        """Return the weights with the adapters added, on the mesh; the weights are donated."""
        shapes = self._described[0]

        def add(w, a, b):
            return jax.vmap(partial(merged, scale=self.config.scale))(w, a, b)

        @partial(jax.jit, donate_argnums=0, out_shardings=named(self.frozen, self.mesh))
        def merge(weights, adapters):
            logical = jax.tree.map(lambda s, x: x[tuple(map(slice, s.shape))], self.frozen, weights)
            factors = jax.tree.map(lambda s, x: x[tuple(map(slice, s.shape))], shapes, adapters)
            return jax.tree.map(WeightSharding.pad, self.frozen, combine(logical, factors, add))

        return merge(weights, adapters)

    def make_init(self, seed: int) -> jax.stages.Wrapped:
        """Return the jitted `init() -> adapters`, which change nothing yet: A is uniform within 1/sqrt(inputs), B is
        zero, as PEFT's."""
        shapes, _ = self._described

        @partial(jax.jit, out_shardings=named(self.adapters, self.mesh))
        def draw():
            leaves, structure = jax.tree.flatten_with_path(shapes)
            arrays = []
            for i, (path, x) in enumerate(leaves):
                if path[-1].key == "b":
                    array = jnp.zeros(x.shape, jnp.float32)
                else:
                    bound = math.prod(x.shape[1:-1]) ** -0.5
                    key = jax.random.fold_in(jax.random.key(seed), i)
                    array = jax.random.uniform(key, x.shape, jnp.float32, minval=-bound, maxval=bound)
                arrays.append(array)
            adapters = jax.tree.unflatten(structure, arrays)
            return jax.tree.map(WeightSharding.pad, self.adapters, adapters)

        return draw
