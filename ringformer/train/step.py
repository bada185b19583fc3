"""Train step as seen by one device, inside the program's only `shard_map`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ringformer.models.interface import Axes, ModelConfig
from ringformer.ops.host_stand_in import is_in_host
from ringformer.ops.varying_axes import vary, vary_like, vary_reducing
from ringformer.parallel.compiler_options import compiler_options
from ringformer.parallel.gather_weight import Copy, narrower
from ringformer.parallel.host_memory import copy_to_device
from ringformer.parallel.lora import Adapted, Lora, combine
from ringformer.parallel.mesh import AXIS_NAMES, BATCH
from ringformer.parallel.parameters import abstract_model, named, specs
from ringformer.train.optimizer import clip_scale, global_norm
from ringformer.train.state import TrainState, has_host_memory, marked_host_memory
from ringformer.train.update import apply_update


def make_train_step(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    shardings: TrainState,
    mesh: Mesh,
    *,
    clip_norm: float,
    accumulate: int = 1,
    skip_spikes: bool = False,
    rings: int = 1,
    lora: Lora | None = None,
    gradients_in_host: bool = False,
    reduce_dtype: DTypeLike = "float32",
) -> jax.stages.Wrapped:
    """Return the jitted `step(state, batch) -> (state, metrics)` for global [B, T] arrays; the state is donated.

    Loss and gradient are sums over tokens that are divided once, by the global number of trained tokens. So masks may
    be arbitrarily uneven. Metrics: loss (nats per token; 0 if no token is trained on), grad_norm (before clipping),
    tokens (those trained on), masked (tokens that the store masks, not counting document ends and padding), skipped (0
    or 1).

    With `rings`, the ranks of `sp` form so many smaller rings, each with its part of every sequence (`data.buckets`).

    A step whose loss or gradient norm is not finite is skipped: on every device, parameters, moments and the
    optimizer's counts stay unchanged, and only the step number advances. With `skip_spikes`, the step takes a third
    argument, a float32 scalar, and is also skipped if its norm is larger than that. With `lora`, the parameters of the
    state are the adapters, and the frozen weights are an argument of their own, after the batch. `gradients_in_host`
    and `reduce_dtype` are as for `make_gradients`.
    """
    options: dict[str, Any] = {"accumulate": accumulate, "rings": rings, "lora": lora}
    options |= {"gradients_in_host": gradients_in_host, "reduce_dtype": reduce_dtype}
    gradients = make_gradients(config, shardings.params, mesh, **options)

    def step(state, batch, *others):
        state = marked_host_memory(state, shardings)
        frozen = others[: lora is not None]
        largest_norm = others[lora is not None :]
        loss, sums, norm, tokens, masked = gradients(state.params, batch, *frozen)
        with jax.named_scope("optimizer"):
            sound = jnp.isfinite(loss) & jnp.isfinite(norm)
            for limit in largest_norm:
                sound &= norm <= limit
            scale = clip_scale(norm, clip_norm) / jnp.maximum(tokens, 1)
            params, opt_state = apply_update(optimizer, state.params, state.opt_state, sums, scale, sound, state.step)
        metrics = {"loss": loss, "grad_norm": norm, "tokens": tokens, "masked": masked, "skipped": 1 - sound}
        return TrainState(state.step + 1, params, opt_state), metrics

    state_specs = specs(shardings)
    in_specs: list[Any] = [state_specs, BATCH]
    if lora:
        in_specs.append(specs(lora.frozen))
    if skip_spikes:
        in_specs.append(P())
    sharded = jax.shard_map(step, mesh=mesh, in_specs=tuple(in_specs), out_specs=(state_specs, P()))
    placed: dict[str, Any] = {}
    if has_host_memory(shardings):  # a result is on the device unless its sharding says otherwise
        placed["out_shardings"] = named(shardings, mesh), None
    return jax.jit(sharded, donate_argnums=0, compiler_options=compiler_options(mesh, training=True), **placed)


def make_gradients(
    config: ModelConfig,
    weights: dict[str, Any],
    mesh: Mesh,
    *,
    accumulate: int,
    rings: int = 1,
    lora: Lora | None = None,
    gradients_in_host: bool = False,
    reduce_dtype: DTypeLike = "float32",
) -> Callable[..., Any]:
    """Return the per-device `gradients(params, batch) -> (loss, sums, norm, tokens, masked)` of `make_train_step`; with
    `lora`, `gradients(params, batch, frozen)`. The sums are the gradients times the number of trained tokens.

    With `gradients_in_host`, gradients of parameters that are in host memory are, too: the backward of a layer sends
    its own there. The step then has one microbatch, because gradients are only written there. Others are summed over
    dp in `reduce_dtype`, after all other sums, in float32.
    """
    if lora:
        weights = lora.weights
    definition, axes, gather = _per_device(config, weights, mesh, rings)

    def gradients(params, batch, *frozen):
        copies = vary(device_copies(params, config.compute_dtype), AXIS_NAMES)

        def gets_gradient(x, copy):
            return x if copy is None else _without_values(x, gradients_in_host)

        params = jax.tree.map(gets_gradient, params, copies)

        def loss_sum(params, batch):
            params = jax.tree.map(lambda x, copy: x if copy is None else Copy(copy, x), params, copies)
            for base in frozen:
                params = combine(vary(base, AXIS_NAMES), params, Adapted)
            return nnx.merge(definition, params).loss(batch, axes=axes, gather=gather)

        params, sum_over_replicas = jax.vjp(partial(_varied, reduce_dtype), params)
        loss, of_device = _over_microbatches(jax.value_and_grad(loss_sum), params, batch, accumulate)
        (sums,) = sum_over_replicas(of_device)

        tokens, masked = (lax.psum(x.sum(), AXIS_NAMES) for x in (batch.mask, ~batch.mask & ~batch.ends))
        trained = jnp.maximum(tokens, 1)
        with jax.named_scope("optimizer"):
            norm = global_norm(sums) / trained
        return lax.psum(loss, AXIS_NAMES) / trained, sums, norm, tokens, masked

    return gradients


def _varied(reduce_dtype: DTypeLike, params: dict[str, Any]) -> dict[str, Any]:
    """Return parameters that vary over all axes. The transpose sums a gradient over the axes along which its parameter
    is replicated: dp and others. What is in host memory stays as it is (`device_stand_ins`)."""

    copies = lax.axis_size("dp") > 1
    reduce_apart = copies and jnp.dtype(reduce_dtype) != jnp.float32  # else, one sum is over all axes

    def varied(x):
        if is_in_host(x):
            return x
        if reduce_apart:
            x = vary_reducing(x, "dp", reduce_dtype)
        return vary(x, AXIS_NAMES)

    return jax.tree.map(varied, params)


def _over_microbatches(function: Callable[..., Any], params: Any, batch: Any, accumulate: int) -> Any:
    """Return the sum of `function(params, microbatch)` over the microbatches of a device's batch."""
    if accumulate == 1:
        return function(params, batch)

    def add_microbatch(total, microbatch):
        return jax.tree.map(jnp.add, total, function(params, microbatch)), None

    zero = jax.tree.map(jnp.zeros_like, jax.eval_shape(function, params, batch))
    total, _ = lax.scan(add_microbatch, vary(zero, AXIS_NAMES), _microbatches(batch, accumulate))
    return total


def device_copies(params: dict[str, Any], dtype: DTypeLike) -> dict[str, Any]:
    """Return the parameters on the device that cannot get a float32 gradient themselves: copies of those in host memory
    in `dtype`, or in their own if that is narrower, and those that are not float32; None for the others."""

    def copy(x):
        if is_in_host(x):
            return _copied(x, dtype)
        return None if x.dtype == jnp.float32 else x

    return jax.tree.map(copy, params)


def on_device(params: dict[str, Any], dtype: DTypeLike) -> dict[str, Any]:
    """Return the parameters on the device: those that are in host memory as copies in `dtype`, or in their own if that
    is narrower."""
    return jax.tree.map(lambda x: _copied(x, dtype) if is_in_host(x) else x, params)


def _copied(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    return copy_to_device(x, narrower(x.dtype, dtype))


def _without_values(x: jax.Array, stay_in_host: bool) -> jax.Array:
    """Return float32 zeros that vary as x does, in its shape; nothing reads them. They are on the device, or in host
    memory if x is, and they are to stay there."""
    zeros = vary_like(jnp.zeros(x.shape, jnp.float32), x)
    return jax.device_put(zeros, jax.memory.Space.Host) if stay_in_host and is_in_host(x) else zeros


def make_eval_step(
    config: ModelConfig, weights: dict[str, Any], mesh: Mesh, *, seq_len: int, accumulate: int = 1
) -> jax.stages.Wrapped:
    """Return the jitted `evaluate(params, batch) -> (nats, tokens)`, which sums over trained tokens by RoPE position.

    Both are [buckets], one bucket per power of two (`position_bucket`): the summed loss, float32, and the number of
    tokens in the sum, int32. The evaluation uses as many microbatches as training, so that it fits into memory wherever
    training does.
    """
    buckets = jnp.arange((seq_len - 1).bit_length() + 1)

    def evaluate(params, batch):
        definition, axes, gather = _per_device(config, weights, mesh)
        params = on_device(marked_host_memory(params, weights), config.compute_dtype)
        model = nnx.merge(definition, vary(params, AXIS_NAMES))

        def add_microbatch(total, batch):
            counted = batch.mask[..., None] & (position_bucket(batch.positions)[..., None] == buckets)
            losses = model.token_losses(batch, axes=axes, gather=gather)[..., None]
            sums = jnp.where(counted, losses, 0.0).sum(axis=(0, 1)), counted.sum(axis=(0, 1), dtype=jnp.int32)
            return jax.tree.map(jnp.add, total, sums), None

        zero = jnp.zeros(buckets.shape, jnp.float32), jnp.zeros(buckets.shape, jnp.int32)
        sums, _ = lax.scan(add_microbatch, vary(zero, AXIS_NAMES), _microbatches(batch, accumulate))
        return lax.psum(sums, AXIS_NAMES)

    sharded = jax.shard_map(evaluate, mesh=mesh, in_specs=(specs(weights), BATCH), out_specs=P())
    return jax.jit(sharded, compiler_options=compiler_options(mesh, training=True))


def position_bucket(position: Any) -> jax.Array:
    """Return the buckets of positions, an int32 array: 0 for 0, k for 2^(k-1) to 2^k - 1."""
    return 32 - lax.clz(position)


def _microbatches(batch, accumulate: int):
    """Reshape the batch's fields [B, T, ...] to [accumulate, B / accumulate, T, ...], on each device."""
    return jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)


def make_logits(config: ModelConfig, weights: dict[str, Any], mesh: Mesh) -> jax.stages.Wrapped:
    """Return the jitted `logits(params, batch)`: float32 [B, T, V], sharded like the batch, in its layout's order."""
    definition, axes, gather = _per_device(config, weights, mesh)

    def logits(params, batch):
        model = nnx.merge(definition, vary(params, AXIS_NAMES))
        return model(batch.tokens, batch.positions, batch.segment_ids, axes=axes, gather=gather)

    return jax.jit(jax.shard_map(logits, mesh=mesh, in_specs=(specs(weights), BATCH), out_specs=BATCH))


def _per_device(config, weights, mesh, rings=1):
    """Return the model's definition, the axes that the model communicates over, and the function that gathers its
    weights."""

    def gather(name, shards):
        return jax.tree.map(lambda w, x: w.for_layer(x, config.compute_dtype), weights[name], shards)

    definition, _, _ = abstract_model(config)
    tp = "tp" if mesh.shape["tp"] > 1 else None
    return definition, Axes("sp", tp, rings), gather
