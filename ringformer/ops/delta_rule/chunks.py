"""The gated delta rule on the tokens of one device, by chunks; the state before and behind them is given or asked for.

A value head has a state S [dk, dv]. Each token lets it decay, corrects what it stores under the token's key, and reads
it with the token's query (Yang, Kautz, Hatamizadeh, Gated Delta Networks, 2412.06464, equation 10):

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = S_t^T q_t

A chunk of C tokens, with G_i the sum of g up to token i, D_ij = exp(G_i - G_j) for j <= i, d_i = exp(G_i) and S the
state before it (section 3.3 there):

    A = strictly lower part of beta_i D_ij k_i k_j        X = (I + A)^-1
    y = X (beta v - beta d k S)                           what tokens write
    o = d q S + (D * q k^T) y        S' = d_C S + (D_Cj k)^T y

The first line is free of the state, and computed for a block of chunks at once, like all decays. One product with X
for the difference of values and what is stored, instead of one for each as in the paper, spares C dk multiplications a
token. A chunk, a block and a whole piece of the sequence are affine in the state: S' = M S + U. Tokens of another
document have D = 0, and those that do not belong to the document before a chunk have d = 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int

from ringformer.ops.delta_rule.products import product
from ringformer.ops.delta_rule.triangular_solve import unit_lower_inverse, unit_lower_solve
from ringformer.ops.varying_axes import vary_like

CHUNK = 64
"""Tokens of a chunk."""

BLOCK = 4
"""Chunks of a block; a backward keeps the state before each block."""

State = Float32[Array, "B K r dk dv"]
"""States of the value heads, grouped by the key heads that they share."""


class Tokens(NamedTuple):
    """A piece of the sequence. K key heads have r value heads each."""

    q: Float[Array, "B T K dk"]
    k: Float[Array, "B T K dk"]
    v: Float[Array, "B T K r dv"]
    g: Float32[Array, "B T K r"]
    beta: Float32[Array, "B T K r"]
    ids: Int[Array, "B T"] | None


class Block(NamedTuple):
    """Tokens of a block of N chunks; a scan runs over a leading axis of blocks."""

    q: Float[Array, "B K N C dk"]
    k: Float[Array, "B K N C dk"]
    v: Float[Array, "B K r N C dv"]
    g: Float32[Array, "B K r N C"]
    beta: Float32[Array, "B K r N C"]
    masks: "Masks | None"


class Masks(NamedTuple):
    """Tokens of a chunk that belong to the same document; None instead if all do."""

    same: Bool[Array, "B N C C"]
    """As each other."""
    before: Bool[Array, "B N C"]
    """As the token before the chunk. The first chunk of a piece goes on with the document before it."""
    last: Bool[Array, "B N C"]
    """As the last token of the chunk."""


class Chunks(NamedTuple):
    """Arrays of a block that are free of the state."""

    a: Float32[Array, "B K r N C C"]
    inverse: Float32[Array, "B K r N C C"]
    """Inverse of I + a."""
    values: Float32[Array, "B K r N C dv"]
    keys: Float32[Array, "B K r N C dk"]
    """By which tokens read what is stored, to correct it."""
    q: Float32[Array, "B K r N C dk"]
    pairs: Float32[Array, "B K r N C C"]
    k: Float32[Array, "B K r N C dk"]
    decay: Float32[Array, "B K r N"]


class Maps(NamedTuple):
    """The affine map of a piece: S' = m S + u."""

    m: Float32[Array, "B K r dk dk"]
    u: State


def cut(tokens: Tokens, size: int = CHUNK) -> Block:
    """Cut a piece into blocks of chunks of `size` tokens, [n, ...] each. Tokens that fill up the last block change
    nothing."""
    T = tokens.q.shape[1]
    size = min(size, 1 << (T - 1).bit_length())
    chunks = min(BLOCK, -(-T // size))
    missing = -T % (size * chunks)

    def blocks(x, mode="constant"):
        width = [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, width, mode=mode).reshape(x.shape[0], -1, chunks, size, *x.shape[2:])

    q, k = (rearrange(blocks(x), "b n N C K d -> n b K N C d") for x in (tokens.q, tokens.k))
    v = rearrange(blocks(tokens.v), "b n N C K r d -> n b K r N C d")
    g, beta = (rearrange(blocks(x), "b n N C K r -> n b K r N C") for x in (tokens.g, tokens.beta))
    masks = None
    if tokens.ids is not None:
        ids = blocks(tokens.ids, mode="edge")
        ends = ids[..., -1].reshape(ids.shape[0], -1)
        starts = jnp.concatenate([ids[:, 0, 0, :1], ends[:, :-1]], axis=1).reshape(ids.shape[:3])
        masks = Masks(ids[..., :, None] == ids[..., None, :], ids == starts[..., None], ids == ids[..., -1:])
        masks = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), masks)
    return Block(q, k, v, g, beta, masks)


def cut_values(x: Float[Array, "B T K r dv"], like: Block) -> Float[Array, "n B K r N C dv"]:
    """Cut an array of the values' shape as the blocks were cut."""
    n, N, C = like.q.shape[0], *like.q.shape[3:5]
    x = jnp.pad(x, [(0, 0), (0, n * N * C - x.shape[1]), (0, 0), (0, 0), (0, 0)])
    return rearrange(x, "b (n N C) K r d -> n b K r N C d", n=n, N=N)


def joined(gradient: Block, like: Tokens) -> Tokens:
    """Transpose `cut`: join the gradients of blocks, in the dtypes of `like`."""
    q, k = (rearrange(x, "n b K N C d -> b (n N C) K d") for x in (gradient.q, gradient.k))
    v = rearrange(gradient.v, "n b K r N C d -> b (n N C) K r d")
    g, beta = (rearrange(x, "n b K r N C -> b (n N C) K r") for x in (gradient.g, gradient.beta))
    T = like.q.shape[1]
    whole = Tokens(q, k, v, g, beta, None)
    return jax.tree.map(lambda x, y: x[:, :T].astype(y.dtype), whole, like._replace(ids=None))


def prepared(block: Block, dtype: DTypeLike) -> Chunks:
    """Compute what of a block is free of the state, with products in a dtype."""
    C = block.q.shape[-2]
    visible = jnp.tri(C, dtype=bool)
    seen = last = jnp.ones((), bool)
    if block.masks is not None:
        visible &= block.masks.same[:, None, None]
        seen = block.masks.before[:, None, None]
        last = block.masks.last[:, None, None]
    # The sum of g from token j + 1 to token i, of these terms alone: a difference of sums from the chunk's beginning
    # has the rounding of all that was before, and so has its gradient.
    between = jnp.cumsum(jnp.where(jnp.tri(C, k=-1, dtype=bool), block.g[..., :, None], 0), axis=-2)
    decays = jnp.exp(jnp.where(visible, between, -jnp.inf))
    since_start = jnp.exp(jnp.cumsum(block.g, axis=-1)) * seen
    until_end = jnp.exp(between[..., -1, :]) * last

    k = block.k[:, :, None].astype(jnp.float32)
    q = block.q[:, :, None].astype(jnp.float32)
    of_keys = product("bKNid,bKNjd->bKNij", block.k, block.k, dtype)[:, :, None]
    a = jnp.tril(block.beta[..., None] * decays * of_keys, -1)
    values = block.beta[..., None] * block.v
    keys = (block.beta * since_start)[..., None] * k
    pairs = decays * product("bKNid,bKNjd->bKNij", block.q, block.k, dtype)[:, :, None]
    return Chunks(
        a=a,
        inverse=unit_lower_inverse(lax.stop_gradient(a)),
        values=values,
        keys=keys,
        q=since_start[..., None] * q,
        pairs=pairs,
        k=until_end[..., None] * k,
        decay=since_start[..., -1],
    )


class _Chunk(NamedTuple):
    """One chunk, with products in a dtype."""

    arrays: Chunks
    dtype: DTypeLike

    def written(self, values, state):
        """Return what the tokens write, given their values and the state before the chunk."""
        stored = product("bKrid,bKrde->bKrie", self.arrays.keys, state, self.dtype)
        return unit_lower_solve(self.arrays.a, self.arrays.inverse, values - stored, self.dtype)

    def behind(self, state, y):
        """Return the state behind the chunk, given the one before it and what the tokens write."""
        added = product("bKrid,bKrie->bKrde", self.arrays.k, y, self.dtype)
        return self.arrays.decay[..., None, None] * state + added

    def output(self, state, y):
        """Return what the tokens read."""
        of_state = product("bKrid,bKrde->bKrie", self.arrays.q, state, self.dtype)
        return of_state + product("bKrij,bKrje->bKrie", self.arrays.pairs, y, self.dtype)


def _chunks(block: Block, dtype: DTypeLike) -> list[_Chunk]:
    arrays = prepared(block, dtype)
    chunks = []
    for i in range(block.q.shape[2]):
        of_chunk = jax.tree.map(lambda x, i=i: x[:, :, :, i], arrays)
        chunks.append(_Chunk(of_chunk, dtype))
    return chunks


def compute(state: State, block: Block, dtype: DTypeLike) -> tuple[State, Float32[Array, "B K r N C dv"]]:
    """Return the state behind a block and the block's outputs, given the state before it."""
    outputs = []
    for chunk in _chunks(block, dtype):
        y = chunk.written(chunk.arrays.values, state)
        outputs.append(chunk.output(state, y))
        state = chunk.behind(state, y)
    return state, jnp.stack(outputs, axis=3)


def outputs(state: State, blocks: Block, dtype: DTypeLike) -> tuple[State, Float[Array, "B T K r dv"]]:
    """Return the state behind a piece and the outputs of its tokens, and of those that fill up its last block, given
    the state before it."""

    def turn(state, block):
        state, o = compute(state, block, dtype)
        return state, o.astype(blocks.v.dtype)

    state, o = lax.scan(turn, vary_like(state, blocks), blocks)
    return state, rearrange(o, "n b K r N C d -> b (n N C) K r d")


def maps(blocks: Block) -> Maps:
    """Return the affine map of a piece, in float32."""
    rows, K, r, _, _, dv = blocks.v.shape[1:]
    dk = blocks.k.shape[-1]

    def turn(maps: Maps, block):
        for chunk in _chunks(block, jnp.float32):
            m = chunk.behind(maps.m, chunk.written(0, maps.m))
            u = chunk.behind(maps.u, chunk.written(chunk.arrays.values, maps.u))
            maps = Maps(m, u)
        return maps, None

    identity = jnp.broadcast_to(jnp.eye(dk, dtype=jnp.float32), (rows, K, r, dk, dk))
    first = Maps(identity, jnp.zeros((rows, K, r, dk, dv), jnp.float32))
    return lax.scan(turn, vary_like(first, blocks), blocks)[0]


def gradient_of_state(blocks: Block, do: Float[Array, "n B K r N C dv"], dtype: DTypeLike) -> State:
    """Return the gradient of the state before a piece, by its outputs alone. A piece is affine in its state, so this
    does not need the state, and nothing of what it computes forward but what is free of the state."""
    shape = *blocks.v.shape[1:4], blocks.k.shape[-1], blocks.v.shape[-1]
    none = vary_like(jnp.zeros(shape, jnp.float32), blocks, do)

    def turn(dstate, block):
        inputs, do = block
        _, vjp = jax.vjp(lambda state: compute(state, inputs, dtype), none)
        return vjp((dstate, do.astype(jnp.float32)))[0], None

    return lax.scan(turn, none, (blocks, do), reverse=True)[0]


def gradients(
    state: State, blocks: Block, do: Float[Array, "n B K r N C dv"], dstate: State, dtype: DTypeLike
) -> Block:
    """Return the gradients of the tokens of a piece, given the state before it and the gradient of that behind it."""

    def keep(state, block):
        return compute(state, block, dtype)[0], state

    state = vary_like(state, blocks)
    _, before = lax.scan(keep, state, blocks)

    def turn(dstate, block):
        state, inputs, do = block

        def of_arrays(state, arrays: Block):
            return compute(state, arrays._replace(masks=inputs.masks), dtype)

        _, vjp = jax.vjp(of_arrays, state, inputs._replace(masks=None))
        return vjp((dstate, do.astype(jnp.float32)))

    return lax.scan(turn, vary_like(dstate, blocks, do), (before, blocks, do), reverse=True)[1]
