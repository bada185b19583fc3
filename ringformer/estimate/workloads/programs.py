"""Device programs of a training run, and the attention of one layer, lowered for a target as in the trainer.

Saving, restoring and `init_from` run no program (`checkpoints/sharded_arrays.py`): they move shards between device and
host.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ringformer.data import Batch
from ringformer.estimate.workloads.training import Workload
from ringformer.models.attention_options import attention_options
from ringformer.models.registry import family_with
from ringformer.parallel.compiler_options import compiler_options
from ringformer.parallel.host_memory import HOST_MEMORY, device_bytes
from ringformer.parallel.mesh import BATCH
from ringformer.train.program import make_program
from ringformer.train.state import all_finite, make_first_state, make_init

TRAIN_STEP = "train step"
EVALUATION = "evaluation"
INIT = "init"
FIRST_STATE = "first state"
CHECK = "finiteness check"
PROGRAMS = (TRAIN_STEP, EVALUATION, INIT, FIRST_STATE, CHECK)
"""Device programs of a run. INIT draws the parameters from the seed (`init_from` reads them instead); FIRST_STATE adds
the optimizer's state; CHECK reads the state before a save, to check that it is finite."""

BATCHES_AHEAD = 2
"""Batches on the devices in addition to the current one: one that the loader has ready, and one in preparation."""

# Before JAX 0.12, the default tiles of an untuned Triton product do not fit every shape: 0.10.2 fails on heads of 100.
_ONLY_CUBLAS = {"xla_gpu_enable_triton_gemm": "False"} if jax.__version_info__ < (0, 12) else {}

WITHOUT_DEVICES: dict[str, dict[str, str]] = {"tpu": {}, "gpu": {"xla_gpu_autotune_level": "0"} | _ONLY_CUBLAS}
"""Options for a compiler that has no device to autotune kernels on."""


class LoweredProgram(NamedTuple):
    """A program ready to compile, with its compiler options and its surroundings."""

    lowered: jax.stages.Lowered
    options: dict[str, str]
    mesh: Mesh
    state: int = 0
    """Bytes of a device's shards of the training state."""
    alive: int = 0
    """Bytes alive on a device while the program runs, besides its arguments and its results."""
    in_host: int = 0
    """Part of the state that is in host memory instead."""


def lower_program(workload: Workload, program: str) -> LoweredProgram:
    """Lower one of `PROGRAMS` for abstract arrays on the target, with AdamW. Raises ValueError for an invalid mesh."""
    workload.check()
    model = workload.model
    mesh = workload.mesh()
    sizes: dict[str, Any] = {"seq_len": workload.seq_len, "accumulate": workload.accumulate, "lora": workload.lora}
    optimizer = replace(workload.optimizer, skip_spikes=0.0)
    run = make_program(model, mesh, optimizer, steps=1000 + optimizer.warmup(1000), **sizes)
    state = run.state
    in_host = [w.in_host for w in jax.tree.leaves(run.shardings)]
    on_device = jax.tree.map(lambda x, w: None if w.in_host else x, state, run.shardings)
    frozen = run.frozen
    batch = _abstract_batch(workload, mesh)
    options = dict(compiler_options(mesh, training=True))
    alive = BATCHES_AHEAD * device_bytes(batch)
    if program == TRAIN_STEP:
        lowered = run.step.lower(state, batch, *frozen)
        in_host_memory(lowered, in_host, in_host)
    elif program == EVALUATION:
        lowered = run.eval_step.lower(run.weights(state.params, frozen), batch)
        params_in_host = [w.in_host for w in jax.tree.leaves(run.shardings.params)]
        in_host_memory(lowered, params_in_host, [])
        alive += device_bytes(on_device._replace(params=None))
    elif program == INIT:
        init = run.lora.make_init(0) if run.lora else make_init(model, run.shardings.params, mesh, seed=0)
        lowered = init.lower()
        options = {}
        alive = 0
    elif program == FIRST_STATE:
        # The parameters are alive although the program only makes zeros and does not read them.
        lowered = make_first_state(run.optimizer, run.shardings, mesh).lower(state.params)
        options = {}
        alive = device_bytes((on_device.params, frozen))
    elif program == CHECK:
        lowered = all_finite.lower(on_device)  # what is in host memory is read a few rows at a time
        options = {}
        alive = alive + device_bytes(frozen)
    else:
        raise ValueError(f"unknown program {program!r}; a run has: {', '.join(PROGRAMS)}")
    options |= WITHOUT_DEVICES[workload.target.chip.kind]
    saved = device_bytes(state)
    return LoweredProgram(lowered, options, mesh, saved, alive, saved - device_bytes(on_device))


def in_host_memory(lowered: jax.stages.Lowered, arguments: list[bool], results: list[bool]) -> None:
    """Tell the compiler which of the first arguments and results of a lowered program are in host memory. Shardings may
    not say it: absent GPUs have no memories, and of absent TPUs only those of the first host."""
    if not any((*arguments, *results)):
        return
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        main = next(x for x in module.body.operations if x.attributes["sym_name"].value == "main")

        def placed(attributes: Any, in_host: list[bool]) -> Any:
            together = []
            for i, of_one in enumerate(attributes):
                others = {x.name: x.attr for x in of_one}
                place = HOST_MEMORY if i < len(in_host) and in_host[i] else "device"
                together.append(ir.DictAttr.get(others | {"mhlo.memory_kind": ir.StringAttr.get(place)}))
            return ir.ArrayAttr.get(together)

        main.attributes["arg_attrs"] = placed(main.arg_attrs, arguments)
        main.attributes["res_attrs"] = placed(main.result_attrs, results)


def abstract_array(mesh: Mesh, spec: P, dtype: DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
    """Return an array of a target's mesh, without data."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def _abstract_batch(workload: Workload, mesh: Mesh) -> Batch:
    """Return a batch, with segment ids if the workload has them, and the features of the model's family."""

    def array(dtype: DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
        return abstract_array(mesh, BATCH, dtype, workload.batch_size, workload.seq_len, *shape)

    ids = array(jnp.int32)
    mask = array(jnp.bool_)
    segment_ids = ids if workload.masks else None
    batch = Batch(ids, ids, ids, segment_ids, mask, mask)
    features = family_with(type(workload.model)).features
    if not features:
        return batch
    arrays = {name: array(field.dtype, *field.shape) for name, field in features.fields.items()}
    return batch._replace(features=arrays)


ATTENTION = "attention of a layer"
"""Name of a part of a train step. It is compiled alone, for its machine code, in a fraction of the time that the whole
step takes."""


def lower_attention(workload: Workload) -> LoweredProgram:
    """Lower the forward and backward pass of one layer's attention, over a ring or on one device, for the heads that
    the step computes at once.

    If arrays and memories are the same, the compiler generates the same instructions for this part as for the whole
    step. An instruction that differs from the step's has a different key (`seconds/kernel_keys.py`) and does not count.
    """
    model = workload.model
    mesh = workload.mesh()
    dtype = jnp.dtype(model.compute_dtype)
    spec = P(("dp", "fsdp"), "sp", "tp")
    attend = partial(model.attend, axis_name="sp", layout=model.layout, ulysses=model.ulysses, ring=model.ring)
    if not model.on_ring:  # every device has all keys, as in the model
        attend = partial(attend, axis_name=None, layout="contiguous", ulysses=1)

    def both(q, k, v, segment_ids, do):
        """Compute the attention of one layer of each kind, as far as the kinds differ in it."""
        results = []
        kinds = {kind.window: kind for kind in model.layer_kinds}
        for kind in kinds.values():
            options = attention_options(model, kind, workload.ring_tokens, documents=True, parts=workload.parts)
            options |= {"segment_ids": segment_ids, "segments": "ascending"}
            o, backward = jax.vjp(lambda q, k, v, options=options: attend(q, k, v, **options), q, k, v)
            results.append((o, backward(do)))
        return results

    key_heads = max(model.num_kv_heads, mesh.shape["tp"])  # with fewer heads than tp ranks, each rank reads one
    shape = (workload.batch_size // workload.accumulate, workload.seq_len)
    ids_spec = P(("dp", "fsdp"), "sp")
    q = abstract_array(mesh, spec, dtype, *shape, model.num_heads // model.head_groups, model.head_dim)
    k = abstract_array(mesh, spec, dtype, *shape, key_heads // model.head_groups, model.head_dim)
    ids = abstract_array(mesh, ids_spec, jnp.int32, *shape)
    sharded = jax.shard_map(both, mesh=mesh, in_specs=(spec, spec, spec, ids_spec, spec), out_specs=spec)
    return LoweredProgram(jax.jit(sharded).lower(q, k, k, ids, q), dict(compiler_options(mesh)), mesh)
