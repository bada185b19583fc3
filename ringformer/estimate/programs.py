"""Device programs of a training run, lowered for a target as the trainer does it.

Saving, restoring and `init_from` run no program (`checkpoints/sharded_arrays.py`): they move shards between device and
host.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from ringformer.data import Batch
from ringformer.estimate.workload import Workload
from ringformer.ops.kernels.block_kernels import BLOCK_KERNELS
from ringformer.parallel.mesh import BATCH, compiler_options, make_mesh
from ringformer.runs.config import OptimizerConfig
from ringformer.train.program import make_program
from ringformer.train.state import all_finite, make_first_state, make_init

TRAIN_STEP, EVALUATION, INIT, FIRST_STATE, CHECK = "train step", "evaluation", "init", "first state", "finiteness check"
PROGRAMS = (TRAIN_STEP, EVALUATION, INIT, FIRST_STATE, CHECK)
"""Init draws the parameters from the seed (`init_from` reads them instead); first state adds the optimizer's state; the
finiteness check reads the state before a save."""

BATCHES_AHEAD = 2
"""Batches on the devices in addition to the current one: one handed over by the loader, one in preparation."""

# Before JAX 0.12, the default tiles of an untuned Triton product do not fit every shape: 0.10.2 fails on heads of 100.
_ONLY_CUBLAS = {"xla_gpu_enable_triton_gemm": "False"} if jax.__version_info__ < (0, 12) else {}

WITHOUT_DEVICES = {"tpu": {}, "gpu": {"xla_gpu_autotune_level": "0"} | _ONLY_CUBLAS}
"""Options for a compiler that has no device to autotune kernels on."""


class LoweredProgram(NamedTuple):
    """A program ready to compile, with its compiler options and its surroundings."""

    lowered: jax.stages.Lowered
    options: dict[str, str]
    mesh: Mesh
    state: int
    """Bytes of the training state on a device."""
    alive: int
    """Bytes alive on a device while it runs that are neither its arguments nor its results."""


def lower_program(workload: Workload, program: str) -> LoweredProgram:
    """Lower one of `PROGRAMS` for abstract arrays on the target, with AdamW. Raises ValueError for an invalid mesh."""
    workload.check()
    model, mesh = workload.model, make_mesh(workload.mesh_dim, workload.target.devices())
    run = make_program(
        model, mesh, OptimizerConfig(), steps=1000, seq_len=workload.seq_len, accumulate=workload.accumulate
    )
    state, batch = run.state, _abstract_batch(workload, mesh)
    options, alive = dict(compiler_options(mesh)), BATCHES_AHEAD * device_bytes(batch)
    if program == TRAIN_STEP:
        lowered = run.step.lower(state, batch)
    elif program == EVALUATION:
        lowered = run.eval_step.lower(state.params, batch)
        alive += device_bytes(state._replace(params=None))
    elif program == INIT:
        lowered, options, alive = make_init(model, run.shardings.params, mesh, seed=0).lower(), {}, 0
    elif program == FIRST_STATE:
        # The parameters are alive although the program only makes zeros and does not read them.
        lowered, options = make_first_state(run.optimizer, run.shardings, mesh).lower(state.params), {}
        alive = device_bytes(state.params)
    elif program == CHECK:
        lowered, options = all_finite.lower(state), {}
    else:
        raise ValueError(f"unknown program {program!r}; a run has: {', '.join(PROGRAMS)}")
    options |= WITHOUT_DEVICES[workload.target.chip.kind]
    return LoweredProgram(lowered, options, mesh, device_bytes(state), alive)


def device_bytes(tree: Any) -> int:
    """Bytes of a tree of abstract arrays on one device, without the padding of tiles."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _abstract_batch(workload: Workload, mesh: Mesh) -> Batch:
    """Return a batch with segment ids if the workload has them; if unspecified, if the model's kernel supports them."""

    def array(dtype):
        shape = workload.batch_size, workload.seq_len
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, BATCH))

    batch = Batch(*(array(jnp.bool_ if field in ("mask", "ends") else jnp.int32) for field in Batch._fields))
    kernel = BLOCK_KERNELS.get(getattr(workload.model, "kernel", "xla"))
    masks = kernel is None or kernel.takes_any_mask if workload.masks is None else workload.masks
    return batch if masks else batch._replace(segment_ids=None)
