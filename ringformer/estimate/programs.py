"""Every program that a run executes on its devices, lowered for a target as the trainer does it.

Saving, restoring and `init_from` execute none (`checkpoints/sharded_arrays.py`): they move shards between device
and host.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from ringformer.data import Batch
from ringformer.estimate.workload import Workload
from ringformer.ops.kernels.block_kernels import BLOCK_KERNELS
from ringformer.parallel.compiler_options import compiler_options
from ringformer.parallel.mesh import BATCH, make_mesh
from ringformer.parallel.parameters import abstract_model, weight_shardings
from ringformer.runs.config import OptimizerConfig
from ringformer.train.checks import all_finite
from ringformer.train.optimizer import make_optimizer
from ringformer.train.state import abstract_state, decayed, make_first_state, make_init, state_shardings
from ringformer.train.step import make_eval_step, make_train_step

TRAIN_STEP, EVALUATION, INIT, FIRST_STATE, CHECK = "train step", "evaluation", "init", "first state", "finiteness check"
PROGRAMS = (TRAIN_STEP, EVALUATION, INIT, FIRST_STATE, CHECK)
"""Init draws the parameters from the seed (`init_from` reads them instead); first state is the optimizer's, beside
them; the finiteness check reads the state before it is saved."""

BATCHES_AHEAD = 2
"""Of the loader, on the devices beside the one at work: one handed over, one in preparation."""

# The tiles that JAX 0.10.2 gives an untried Triton product do not fit every shape: with heads of 100 it breaks down. Of
# 0.12 they do.
_ONLY_CUBLAS = {"xla_gpu_enable_triton_gemm": "False"} if jax.__version_info__ < (0, 12) else {}

WITHOUT_DEVICES = {"tpu": {}, "gpu": {"xla_gpu_autotune_level": "0"} | _ONLY_CUBLAS}
"""Options of a compiler that has no device to try variants of a kernel on."""


class LoweredProgram(NamedTuple):
    """A program that can be compiled, and what it is compiled with."""

    lowered: jax.stages.Lowered
    options: dict[str, str]
    mesh: Mesh
    state: int
    """Bytes of the run's state on a device."""
    alive: int
    """Bytes of a device that are neither its arguments nor its results, and are there while it runs."""


def lower_program(workload: Workload, program: str) -> LoweredProgram:
    """One of `PROGRAMS` for abstract arrays on the target, with AdamW. Raises ValueError for a mesh that cannot be."""
    model, mesh = workload.model, _checked_mesh(workload)
    optimizer = make_optimizer(OptimizerConfig(), 1000, decayed(abstract_model(model)[2]))
    shardings = state_shardings(weight_shardings(model, mesh), optimizer)
    state, batch = abstract_state(shardings, optimizer, mesh), _abstract_batch(workload, mesh)
    options, alive = dict(compiler_options(mesh)), BATCHES_AHEAD * device_bytes(batch)
    if program == TRAIN_STEP:
        step = make_train_step(model, optimizer, shardings, mesh, clip_norm=1.0, accumulate=workload.accumulate)
        lowered = step.lower(state, batch)
    elif program == EVALUATION:
        evaluate = make_eval_step(
            model, shardings.params, mesh, seq_len=workload.seq_len, accumulate=workload.accumulate
        )
        lowered = evaluate.lower(state.params, batch)
        alive += device_bytes(state._replace(params=None))
    elif program == INIT:
        lowered, options, alive = make_init(model, shardings.params, mesh, seed=0).lower(), {}, 0
    elif program == FIRST_STATE:
        # The parameters are there though the program, which makes zeros, does not read them.
        lowered, options = make_first_state(optimizer, shardings, mesh).lower(state.params), {}
        alive = device_bytes(state.params)
    elif program == CHECK:
        lowered, options = all_finite.lower(state), {}
    else:
        raise ValueError(f"unknown program {program!r}; a run has: {', '.join(PROGRAMS)}")
    options |= WITHOUT_DEVICES[workload.target.chip.kind]
    return LoweredProgram(lowered, options, mesh, device_bytes(state), alive)


def device_bytes(tree: Any) -> int:
    """Bytes that a device holds of a tree of abstract arrays, without the padding of its tiles."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _checked_mesh(workload: Workload) -> Mesh:
    workload.check()
    return make_mesh(workload.mesh_dim, workload.target.devices())


def _abstract_batch(workload: Workload, mesh: Mesh) -> Batch:
    """With segment ids if the workload has them; if nobody said so, unless the model's kernel can have none."""

    def array(dtype):
        shape = workload.batch_size, workload.seq_len
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, BATCH))

    batch = Batch(*(array(jnp.bool_ if field in ("mask", "ends") else jnp.int32) for field in Batch._fields))
    kernel = BLOCK_KERNELS.get(getattr(workload.model, "kernel", "xla"))
    masks = kernel is None or kernel.takes_masks if workload.masks is None else workload.masks
    return batch if masks else batch._replace(segment_ids=None)
