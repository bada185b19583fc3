"""The compiled programs of inference: read a chunk of prompts into the cache, decode a token, compute losses of rows.

They run on the training mesh (dp, fsdp, tp, sp). Rows are sharded over dp, tokens of a chunk over (sp, tp) in the
model's layout, weights over (tp, fsdp, sp), and the cache over (tp, sp). fsdp shards only weights.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringformer.data import Batch
from ringformer.hardware import chip_of
from ringformer.inference import cache as caches
from ringformer.inference.cache import Cache, abstract_cache, layer_of, write_chunk, write_token
from ringformer.inference.cached_attention import Travels, attend_cached, join
from ringformer.inference.decode_step import decode_hidden, next_logits
from ringformer.inference.program_sizes import granule
from ringformer.inference.sampling import Kind, row_keys, sample
from ringformer.inference.weight_shares import definition, make_gather, weight_shares
from ringformer.models.interface import Axes
from ringformer.models.kernel_choice import with_kernel
from ringformer.models.llama_config import LlamaConfig
from ringformer.ops.ring_attention import ring_attention
from ringformer.parallel.mesh import compiler_options
from ringformer.parallel.parameters import specs

TOKENS = P("dp", ("sp", "tp"))
"""Arrays [B, P] of a chunk, P in layout order."""


class State(NamedTuple):
    """Arrays of a session on the devices, donated from program to program."""

    cache: Cache
    logits: Any  # float32 [B, V], of the next token of each row
    lengths: Any  # int32 [B], tokens in the cache of each row


STATE = State(caches.SPECS, P("dp"), P("dp"))


class Chunk(NamedTuple):
    """New tokens of each row (global arrays), in layout order; shorter rows are padded with position -1."""

    tokens: Any  # int32 [B, P]
    positions: Any  # int32 [B, P]
    rank_positions: Any  # the same, but replicated over tp
    last: Any  # int32 [B], the position of the last token of a row if it is in this chunk, else -1
    slots: Any  # int32 [n], the first slot that each rank of the ring writes


CHUNK = Chunk(TOKENS, TOKENS, P("dp", "sp"), P("dp"), P("sp"))


def inference_config(config: LlamaConfig, mesh: Mesh, local_tokens: int) -> LlamaConfig:
    """Return the config for inference: ring attention on every mesh, no rematerialization, no offloading.

    Raises ValueError for a mesh that does not fit the model.
    """
    layout = config.layout if mesh.shape["sp"] > 1 else "contiguous"
    config = replace(config, attention="ring", layout=layout, remat="none", remat_group=1, head_groups=1, offload=False)
    config.check_mesh(mesh)
    device = mesh.devices.flat[0]
    model, _ = with_kernel(config, device.platform, chip_of(device.device_kind), local_tokens)
    assert isinstance(model, LlamaConfig)
    return model


@dataclass(frozen=True)
class Programs:
    """Programs of one model on one mesh, each compiled on first use."""

    config: LlamaConfig
    mesh: Mesh

    @property
    def granule(self) -> int:
        """Number of which the tokens of a chunk are a multiple."""
        return granule(self.config.layout, self.mesh.shape["tp"], self.mesh.shape["sp"])

    @cached_property
    def _shares(self) -> dict:
        return weight_shares(self.config, self.mesh)

    @cached_property
    def weights(self) -> dict:
        """Shapes, dtypes and shardings of the weights."""
        return jax.tree.map(lambda s: s.abstract(self.mesh), self._shares)

    def state(self, rows: int, slots: int) -> State:
        """Shapes, dtypes and shardings of a state; `slots` is per rank."""
        return State(
            abstract_cache(self.config, self.mesh, rows, slots),
            self._array((rows, self.config.vocab_size), jnp.float32, STATE.logits),
            self._array((rows,), jnp.int32, STATE.lengths),
        )

    def _array(self, shape, dtype, spec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    @lru_cache  # noqa: B019 - lives as long as the generator
    def prefill(self, rows: int, slots: int, tokens: int, cached: int, travels: Travels):
        """Compile `lower_prefill`."""
        return self._compile(self.lower_prefill(rows, slots, tokens, cached, travels))

    def lower_prefill(self, rows: int, slots: int, tokens: int, cached: int, travels: Travels) -> jax.stages.Lowered:
        """Lower `prefill(weights, state, chunk) -> state`; the state is donated.

        Args:
          rows, slots: of the state. tokens: P of a chunk.
          cached: number of slots of a rank that the chunk attends to; 0: nothing precedes it.
          travels: whether the keys in those slots travel around the ring, or the queries of the chunk.
        """
        chunk = Chunk(
            *(
                self._array(shape, jnp.int32, spec)
                for shape, spec in zip([(rows, tokens)] * 3 + [(rows,), (self.mesh.shape["sp"],)], CHUNK, strict=True)
            )
        )

        def prefill(weights, state, chunk):
            return self._prefill(weights, state, chunk, cached, travels)

        run = self._per_device(prefill, (specs(self._shares), STATE, CHUNK), STATE)
        return jax.jit(run, donate_argnums=1).lower(self.weights, self.state(rows, slots), chunk)

    @lru_cache  # noqa: B019
    def decode(self, rows: int, slots: int, read: int, kind: Kind):
        """Compile `lower_decode`."""
        return self._compile(self.lower_decode(rows, slots, read, kind))

    def lower_decode(self, rows: int, slots: int, read: int, kind: Kind) -> jax.stages.Lowered:
        """Lower `decode(weights, state, control, numbers) -> (tokens, state)`, which draws a token of each row from the
        state's logits and appends it. The state is donated; tokens, int32 [rows], are replicated on every device.

        Args:
          rows, slots: of the state. read: slots of a rank to read, from the first; all others are empty.
          control: int32 [4 + rows]: seed, top_k, rank and slot that take the token, and for each row whether it
            continues. Tokens and logits of a row that has ended do not change, and its drawn token is meaningless.
          numbers: float32 [2]: temperature, top_p.
        """
        arguments = self._array((4 + rows,), jnp.int32, P()), self._array((2,), jnp.float32, P())

        def decode(weights, state, control, numbers):
            return self._decode(weights, state, control, numbers, read, kind)

        run = self._per_device(decode, (specs(self._shares), STATE, P(), P()), (P(), STATE))
        return jax.jit(run, donate_argnums=1).lower(self.weights, self.state(rows, slots), *arguments)

    @lru_cache  # noqa: B019
    def losses(self, rows: int, tokens: int):
        """Compile `losses(weights, tokens, positions, targets) -> float32 [rows, P]`: -log p(target) of each token,
        replicated on every device. All arrays are [rows, P] in layout order."""
        arrays = [self._array((rows, tokens), jnp.int32, TOKENS)] * 3

        def losses(weights, tokens, positions, targets):
            batch = Batch(tokens, targets, positions, None, None, None)
            return self._model(weights).token_losses(batch, axes=self._axes, gather=self._gather)

        run = self._per_device(losses, (specs(self._shares), TOKENS, TOKENS, TOKENS), TOKENS)
        whole = jax.jit(run, out_shardings=NamedSharding(self.mesh, P()))
        return self._compile(whole.lower(self.weights, *arrays))

    def _per_device(self, function, in_specs, out_specs):
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    def _compile(self, lowered):
        return lowered.compile(compiler_options=compiler_options(self.mesh))

    @property
    def _axes(self) -> Axes:
        return Axes(sp="sp", tp="tp" if self.mesh.shape["tp"] > 1 else None)

    @cached_property
    def _gather(self):
        return make_gather(self.config, self.mesh)

    def _model(self, weights):
        return nnx.merge(definition(self.config), weights)

    def _prefill(self, weights, state: State, chunk: Chunk, cached: int, travels: Travels) -> State:
        """Run `prefill` on one device."""
        c, cache = self.config, state.cache
        kernel = "xla" if c.kernel == "auto" else c.kernel
        chunks: dict[str, Any] = {"q_chunk": c.q_chunk, "k_chunk": c.k_chunk}

        def attend(layer, q, k, v):
            ring: Any = partial(ring_attention, q, k, v, axis_name="sp", layout=c.layout, kernel=kernel, **chunks)
            if not cached:
                return ring(), (k, v)
            ours = [layer_of(x, layer, cached) for x in (cache.k, cache.v)]
            valid = cache.positions[:, :cached] >= 0
            before = attend_cached(
                q, ours[0], ours[1], valid, travels, "sp", kernel="xla" if kernel == "cudnn" else kernel, **chunks
            )
            return join(ring(return_lse=True), before).astype(q.dtype), (k, v)

        x, (k, v) = self._model(weights).attended(
            chunk.tokens,
            jnp.maximum(chunk.positions, 0),
            axes=self._axes,
            gather=self._gather,
            attend=attend,
            given=jnp.arange(c.num_layers),
        )
        here = (chunk.positions == chunk.last[:, None]) & (chunk.last >= 0)[:, None]
        x = lax.psum(jnp.where(here[..., None], x, 0).sum(axis=1), ("sp", "tp"))
        logits = jnp.where((chunk.last >= 0)[:, None], next_logits(c, weights, x), state.logits)
        lengths = jnp.where(chunk.last >= 0, chunk.last + 1, state.lengths)
        return State(write_chunk(cache, k, v, chunk.rank_positions, chunk.slots[0]), logits, lengths)

    def _decode(self, weights, state: State, control, numbers, read: int, kind: Kind):
        """Run `decode` on one device."""
        (cache, logits, lengths), B = state, state.lengths.shape[0]
        seed, top_k, rank, slot = control[:4]
        first = lax.axis_index("dp") * B
        alive = lax.dynamic_slice_in_dim(control, 4 + first, B) > 0
        keys = row_keys(seed, first + jnp.arange(B), lengths)
        tokens = sample(logits, keys, numbers[0], top_k, numbers[1], kind)
        x, k, v = decode_hidden(self.config, weights, cache, tokens, lengths, read)
        mine = lax.axis_index("sp") == rank
        cache = write_token(cache, k, v, jnp.where(alive, lengths, -1), slot, mine)
        logits = jnp.where(alive[:, None], next_logits(self.config, weights, x), logits)
        everyone = lax.all_gather(tokens, "dp", tiled=True, to="invarying")
        return everyone, State(cache, logits, lengths + alive)


def as_global(array: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """Shard over the mesh an array that every process has in full."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])
