"""The compiled programs of inference: one reads a chunk of prompts into the cache, one decodes a token, and one
computes the losses of rows.

They run on the training mesh (dp, fsdp, tp, sp). Rows are sharded over dp. Tokens of a chunk are sharded over (sp, tp)
in the model's layout, weights over (tp, fsdp, sp), and the cache over (tp, sp). So fsdp shards only weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringformer.data import Batch
from ringformer.inference.cache.arrays import Cache, CacheDtype, Entries, write_tokens
from ringformer.inference.cache.chunk_attention import Reads
from ringformer.inference.cache.slots import Pieces
from ringformer.inference.cache.token_attention import for_tokens
from ringformer.inference.chunk_step import ChunkAttention
from ringformer.inference.decode_step import decode_hidden, next_logits
from ringformer.inference.next_token import row_keys, sample
from ringformer.inference.program_sizes import ProgramSizes, granule
from ringformer.inference.sampling import Kind
from ringformer.inference.session_arrays import CHUNK, TOKENS, Beginning, Chunk, Scores, State
from ringformer.inference.weight_shares import weight_shares
from ringformer.models.decoder import Decoder
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.interface import Axes
from ringformer.ops.tokenwise.words import matrices_as_words
from ringformer.parallel.compiler_options import compiler_options
from ringformer.parallel.parameters import abstract_model

CONTROLS = 5
"""Numbers of a decode's control that belong to no row."""


def _compiled(lower: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that compiles the program that `lower` lowers; for the same arguments, it compiles only once."""

    @lru_cache
    def compiled(programs, *sizes):
        return lower(programs, *sizes).compile(compiler_options=compiler_options(programs.mesh))

    return compiled


@dataclass(frozen=True)
class Programs:
    """Programs of one model on one mesh, each compiled on first use."""

    config: DecoderConfig
    mesh: Mesh
    cache_dtype: CacheDtype = "compute"

    def sizes(self, max_length: int, prefill_chunk: int | None = None) -> ProgramSizes:
        """Return the sizes of a session's programs."""
        tp = self.mesh.shape["tp"]
        sp = self.mesh.shape["sp"]
        return ProgramSizes(sp, granule(self.config.layout, tp, sp), max_length, prefill_chunk)

    @cached_property
    def _shares(self) -> dict[str, Any]:
        return weight_shares(self.config, self.mesh)

    @cached_property
    def weights(self) -> dict[str, Any]:
        """Shapes, dtypes and shardings of the weights."""
        return jax.tree.map(lambda s: s.abstract(self.mesh), self._shares)

    def state(self, rows: int, slots: int) -> State:
        """Return shapes, dtypes and shardings of a state; `slots` is per rank."""
        c = self.config
        heads = max(self.config.num_kv_heads, self.mesh.shape["tp"])
        S = slots * self.mesh.shape["sp"]
        kv_shape = c.num_layers, rows, heads, S, c.head_dim
        spec = P(None, "dp", "tp", "sp")
        dtype = jnp.dtype(c.compute_dtype)
        scales = None
        if self.cache_dtype == "int8":
            dtype = jnp.dtype(jnp.int8)
            scales = self._array(kv_shape[:-1], spec, jnp.float32)
        entries = Entries(self._array(kv_shape, P(*spec, None), dtype), scales)
        cache = Cache(entries, entries, self._array((rows, S), P("dp", "sp")))
        return State(cache, self._array((rows, c.vocab_size), P("dp"), jnp.float32), self._array((rows,), P("dp")))

    def _array(self, shape, spec, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    def lower_prefill(
        self,
        rows: int,
        slots: int,
        tokens: int,
        reads: Reads | None,
        prefix: int = 0,
        prefix_reads: Reads | None = None,
        scored: bool = False,
    ) -> jax.stages.Lowered:
        """Lower `prefill(weights, state, chunk, *beginning) -> (state, *scores)`; the state is donated.

        Args:
          rows, slots: rows of the state, and slots per rank. tokens: P of a chunk.
          reads: how the chunk reads the cache; None: nothing of the state precedes the chunk.
          prefix, prefix_reads: slots per rank of a cache of one row with which all rows begin, and how the chunk reads
            it; 0: there is none.
          scored: also compute the `Scores` [B, P] of the chunk's targets, replicated on every device.
        """
        state = self.state(rows, slots)
        of_tokens = self._array((rows, tokens), TOKENS)
        chunk = Chunk(
            tokens=of_tokens,
            positions=of_tokens,
            rank_positions=self._array((rows, tokens), CHUNK.rank_positions),
            last=self._array((rows,), CHUNK.last),
            slots=self._array((self.mesh.shape["sp"],), CHUNK.slots),
            targets=of_tokens,
            pieces=self._pieces(reads, slots),
        )
        beginning = [Beginning(x, self._pieces(prefix_reads, prefix)) for x in self._prefix(prefix)]
        prefill = partial(self._prefill, reads=reads, prefix_reads=prefix_reads, scored=scored)
        results: tuple[Any, ...] = (_specs(state),)
        shardings: tuple[Any, ...] = (jax.tree.map(lambda x: x.sharding, state),)
        if scored:
            results = (*results, Scores(TOKENS, TOKENS))
            shardings = (*shardings, NamedSharding(self.mesh, P()))
        return self._lower(
            prefill,
            results,
            self.weights,
            state,
            chunk,
            *beginning,
            donate_argnums=1,
            out_shardings=shardings,
        )

    def _pieces(self, reads: Reads | None, slots: int) -> Pieces:
        number = -(-slots // reads.piece) if reads else 0
        return Pieces(self._array((number,), P()), self._array((2,), P()))

    def _prefix(self, slots: int) -> list[Cache]:
        return [self.state(1, slots).cache] if slots else []

    def lower_truncate(self, rows: int, slots: int) -> jax.stages.Lowered:
        """Lower `truncate(state, lengths) -> state`, which forgets the tokens of each row beyond a length. The state is
        donated."""
        state = self.state(rows, slots)
        lengths = self._array((rows,), P("dp"))

        def truncate(state: State, lengths):
            positions = jnp.where(state.cache.positions < lengths[:, None], state.cache.positions, -1)
            return State(state.cache._replace(positions=positions), state.logits, lengths)

        shardings = jax.tree.map(lambda x: x.sharding, state)
        return jax.jit(truncate, donate_argnums=0, out_shardings=shardings).lower(state, lengths)

    def lower_decode(self, rows: int, slots: int, read: int, kind: Kind, prefix: int = 0) -> jax.stages.Lowered:
        """Lower `decode(weights, state, control, numbers, *prefix) -> (tokens, state)`, which draws a token of each row
        from the state's logits and appends it. The state is donated; tokens, int32 [rows], are replicated on every
        device.

        Args:
          rows, slots: rows of the state, and slots per rank.
          read: number of slots of a rank to read, from the first; all others are empty.
          prefix: slots per rank of a cache of one row with which all rows begin; 0: there is none.
          control: int32 [5 + rows]: seed, top_k, rank and slot that take the token, the number of the first row for
            its draws, and for each row whether it continues. For a row that has ended, tokens and logits do not change,
            and the token drawn is meaningless.
          numbers: float32 [2]: temperature, top_p.
        """
        control = self._array((CONTROLS + rows,), P())
        numbers = self._array((2,), P(), jnp.float32)
        state = self.state(rows, slots)
        decode = partial(self._decode, read=read, kind=kind)
        results = P(), _specs(state)
        return self._lower(
            decode, results, self.weights, state, control, numbers, *self._prefix(prefix), donate_argnums=1
        )

    def lower_losses(self, rows: int, tokens: int) -> jax.stages.Lowered:
        """Lower `losses(weights, tokens, positions, targets) -> float32 [rows, P]`: -log p(target) of each token,
        replicated on every device. All arrays are [rows, P] in layout order."""

        def losses(weights, tokens, positions, targets):
            batch = Batch(tokens, targets, positions, None, None, None)
            return self._model(weights).token_losses(batch, **self._sharding)

        arrays = [self._array((rows, tokens), TOKENS)] * 3
        return self._lower(losses, TOKENS, self.weights, *arrays, out_shardings=NamedSharding(self.mesh, P()))

    prefill: ClassVar[Callable[..., Any]] = _compiled(lower_prefill)
    decode: ClassVar[Callable[..., Any]] = _compiled(lower_decode)
    losses: ClassVar[Callable[..., Any]] = _compiled(lower_losses)
    truncate: ClassVar[Callable[..., Any]] = _compiled(lower_truncate)

    def _lower(self, function, results, *arguments, **options) -> jax.stages.Lowered:
        """Lower a function of one device's arrays. `arguments` are abstract global arrays; `results` are specs."""
        run = jax.shard_map(function, mesh=self.mesh, in_specs=_specs(arguments), out_specs=results)
        return jax.jit(run, **options).lower(*arguments)

    def _model(self, weights) -> Decoder:
        return nnx.merge(abstract_model(self.config)[0], weights)

    @property
    def _sharding(self) -> dict[str, Any]:
        """Arguments that tell methods of `Decoder` how arrays are sharded."""

        def gather(name, weights):
            return jax.tree.map(lambda share, x: share.gather(x), self._shares[name], weights)

        tp = "tp" if self.mesh.shape["tp"] > 1 else None
        return {"axes": Axes(sp="sp", tp=tp), "gather": gather}

    def _prefill(
        self,
        weights,
        state: State,
        chunk: Chunk,
        *beginning: Beginning,
        reads: Reads | None,
        prefix_reads: Reads | None,
        scored: bool,
    ):
        """Run `prefill` on one device."""
        c = self.config
        attention = ChunkAttention.of(c, self.mesh.shape["sp"], state.cache, chunk, beginning, reads, prefix_reads)
        model = self._model(weights)
        x, (k, v) = model.attended(
            chunk.tokens,
            jnp.maximum(chunk.positions, 0),
            attend=attention.attend,
            given=jnp.arange(c.num_layers, dtype=jnp.int32),
            **self._sharding,
        )
        gather = self._sharding["gather"]
        scores = []
        if scored:
            scores = [Scores(*model.scores(x, chunk.targets, gather))]
        ends = chunk.last >= 0
        here = (chunk.positions == chunk.last[:, None]) & ends[:, None]
        x = lax.psum(jnp.where(here[..., None], x, 0).sum(axis=1), ("sp", "tp"))
        state = State(
            write_tokens(state.cache, k, v, chunk.rank_positions, chunk.slots[0]),
            jnp.where(ends[:, None], next_logits(c, weights, x), state.logits),
            jnp.where(ends, chunk.last + 1, state.lengths),
        )
        return state, *scores

    def _decode(self, weights, state: State, control, numbers, *prefix: Cache, read: int, kind: Kind):
        """Run `decode` on one device."""
        cache, logits, lengths = state
        B = state.lengths.shape[0]
        seed, top_k, rank, slot, first_row = control[:CONTROLS]
        first = lax.axis_index("dp") * B
        alive = lax.dynamic_slice_in_dim(control, CONTROLS + first, B) > 0
        keys = row_keys(seed, first_row + first + jnp.arange(B), lengths)
        tokens = sample(logits, keys, numbers[0], top_k, numbers[1], kind)
        c = self.config
        platform = self.mesh.devices.flat[0].platform
        if platform == "gpu" and B == 1:
            weights = matrices_as_words(weights)
        readable = for_tokens(cache, c.num_heads // c.num_kv_heads, platform)
        # On GPUs, a matrix product reads a layer of the cache where it lies only if the layer's number is a constant.
        # (Words are summed. An int8 cache is converted before a product: if unrolled, all layers at once.)
        multiplied = [x for x in (readable, *prefix) if jnp.issubdtype(x.k.values.dtype, jnp.floating)]
        unroll = platform == "gpu" and bool(multiplied)
        x, k, v = decode_hidden(c, weights, readable, tokens, lengths, read, *prefix, unroll=unroll)
        positions = jnp.where(alive, lengths, -1)
        mine = lax.axis_index("sp") == rank
        cache = write_tokens(cache, k, v, positions[:, None], slot, mine)
        logits = jnp.where(alive[:, None], next_logits(c, weights, x), logits)
        everyone = lax.all_gather(tokens, "dp", tiled=True, to="invarying")
        return everyone, State(cache, logits, lengths + alive)


def _specs(arrays) -> Any:
    return jax.tree.map(lambda x: x.sharding.spec, arrays)
