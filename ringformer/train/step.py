"""The train step: one device's view, inside the one `shard_map` of the program."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ringformer.mesh import AXIS_NAMES, BATCH, compiler_options
from ringformer.models.llama import Axes, LlamaConfig
from ringformer.ops.vma import vary
from ringformer.train.optimizer import clip, global_norm
from ringformer.train.state import TrainState, abstract_model, specs


def make_train_step(
    config: LlamaConfig,
    optimizer: optax.GradientTransformation,
    shardings: TrainState,
    mesh: Mesh,
    *,
    clip_norm: float,
    accumulate: int = 1,
):
    """`step(state, batch) -> (state, metrics)`, jitted, for a batch of global [B, T] arrays; the state is donated.

    Loss and gradient are sums over tokens, divided once by the global number of trained tokens, so that masks may
    be as uneven as they like. Metrics: loss (nats per token), grad_norm (before clipping), tokens (trained).
    """
    loss_sum = make_loss_sum(config, shardings.params, mesh)

    def step(state, batch):
        # The transpose of `vary` sums a gradient over the axes that its parameter is replicated on: dp, and more.
        params, sum_over_replicas = jax.vjp(partial(vary, axes=AXIS_NAMES), state.params)

        def add_microbatch(total, microbatch):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_sum)(params, microbatch)), None

        zero = jax.tree.map(jnp.zeros_like, jax.eval_shape(jax.value_and_grad(loss_sum), params, batch))
        microbatches = jax.tree.map(lambda x: x.reshape(accumulate, -1, x.shape[1]), batch)
        (loss, grads), _ = lax.scan(add_microbatch, vary(zero, AXIS_NAMES), microbatches)

        tokens = lax.psum(batch.mask.sum(), AXIS_NAMES)
        loss, grads = jax.tree.map(lambda x: x / jnp.maximum(tokens, 1), (loss, sum_over_replicas(grads)[0]))
        norm = global_norm(grads)
        updates, opt_state = optimizer.update(clip(grads, norm, clip_norm), state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": lax.psum(loss, AXIS_NAMES), "grad_norm": norm, "tokens": tokens}
        return TrainState(state.step + 1, params, opt_state), metrics

    state_specs = specs(shardings)
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(state_specs, BATCH), out_specs=(state_specs, P()))
    return jax.jit(sharded, donate_argnums=0, compiler_options=compiler_options(mesh))


def make_eval_step(config: LlamaConfig, weights: dict, mesh: Mesh):
    """`evaluate(params, batch) -> (nats, tokens)`: the summed loss and the number of tokens it is over."""
    loss_sum = make_loss_sum(config, weights, mesh)

    def evaluate(params, batch):
        loss = loss_sum(vary(params, AXIS_NAMES), batch)
        return lax.psum(loss, AXIS_NAMES), lax.psum(batch.mask.sum(), AXIS_NAMES)

    return jax.jit(jax.shard_map(evaluate, mesh=mesh, in_specs=(specs(weights), BATCH), out_specs=P()))


def make_loss_sum(config: LlamaConfig, weights: dict, mesh: Mesh):
    """`loss_sum(params, batch)`, per device: the model's summed loss, from shards of the parameters."""
    definition, axes, gather = _per_device(config, weights, mesh)

    def loss_sum(params, batch):
        return nnx.merge(definition, params).loss(batch, axes=axes, gather=gather)

    return loss_sum


def make_logits(config: LlamaConfig, weights: dict, mesh: Mesh):
    """`logits(params, batch)`: float32 [B, T, V], sharded like the batch and in its layout's order."""
    definition, axes, gather = _per_device(config, weights, mesh)

    def logits(params, batch):
        model = nnx.merge(definition, vary(params, AXIS_NAMES))
        return model(batch.tokens, batch.positions, batch.segment_ids, axes=axes, gather=gather)

    return jax.jit(jax.shard_map(logits, mesh=mesh, in_specs=(specs(weights), BATCH), out_specs=BATCH))


def _per_device(config, weights, mesh):
    """The model's definition, the axes it communicates over, and the gathering of its weights."""

    def gather(name, shards):
        return jax.tree.map(lambda w, x: w.gather(x, config.compute_dtype), weights[name], shards)

    return abstract_model(config)[0], Axes(sp="sp", tp="tp" if mesh.shape["tp"] > 1 else None), gather
