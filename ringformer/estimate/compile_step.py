"""Compile the project's own train step for a target that is not here, and read what the compiler says of it."""

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from ringformer.compiler_options import compiler_options
from ringformer.data import Batch
from ringformer.device_order import max_link_hops
from ringformer.estimate.compiler_dump import CompilerFailure, Memory, compile_until_scheduled
from ringformer.estimate.overlap import Rates, Schedule, read_schedule
from ringformer.estimate.targets import Target
from ringformer.estimate.workload import Workload
from ringformer.mesh import BATCH, make_mesh
from ringformer.models.registry import check_mesh
from ringformer.train.config import OptimizerConfig
from ringformer.train.optimizer import make_optimizer
from ringformer.train.run_checks import check_batch
from ringformer.train.state import abstract_state, decayed, state_shardings, weight_shardings
from ringformer.train.step import make_eval_step, make_train_step

# The tiles that JAX 0.10.2 gives an untried Triton product do not fit every shape: with heads of 100 it breaks down. Of
# 0.12 they do.
_ONLY_CUBLAS = {"xla_gpu_enable_triton_gemm": "False"} if jax.__version_info__ < (0, 12) else {}

WITHOUT_DEVICES = {"tpu": {}, "gpu": {"xla_gpu_autotune_level": "0"} | _ONLY_CUBLAS}
"""Options of a compiler that has no device to try variants of a kernel on."""


@dataclass(frozen=True)
class Estimate:
    """What one train step takes on one device of a target, compiled: bytes, seconds, FLOPs. None: nobody said."""

    fits: bool
    peak_bytes: int
    hbm_bytes: int
    host_bytes: int
    """Host memory per device, for offloaded activations."""
    usual_host_bytes: int
    """What a host of the target usually has for each device."""
    argument_bytes: int | None
    temp_bytes: int | None
    schedule: Schedule | None
    """None if the compiler gave up on memory before it had one."""
    max_link_hops: int | None
    compile_seconds: float | None
    generated_code: bool = False
    """Whether the compiler went on to machine code; its verdict, the memory and the schedule come before that."""
    largest: str = ""
    """What the compiler lists as the largest allocations, where it does not fit."""

    @property
    def fits_host(self) -> bool:
        return self.host_bytes <= self.usual_host_bytes


class Compiled(NamedTuple):
    """What the compiler said of a step that it accepted."""

    program: str
    memory: Memory
    rates: Rates
    max_link_hops: int | None
    seconds: float
    generated_code: bool


def compile_step(workload: Workload) -> Estimate:
    """One step of `ringformer train`, with AdamW, compiled to machine code in this process.

    Raises ValueError for a mesh that cannot be and CompilerFailure if the compiler fails for another reason than
    memory.
    """
    return read_estimate(run_compiler(workload), workload.target)


def run_compiler(workload: Workload, dump: Path | None = None) -> Compiled | Estimate:
    """The step compiled to machine code, or up to its schedule, by way of the folder `dump`. An Estimate: too large."""
    model, target, accumulate = workload.model, workload.target, workload.accumulate
    mesh = _checked_mesh(workload)
    optimizer = make_optimizer(OptimizerConfig(), 1000, decayed(model))
    shardings = state_shardings(weight_shardings(model, mesh), optimizer)
    step = make_train_step(model, optimizer, shardings, mesh, clip_norm=1.0, accumulate=accumulate)
    start = time.perf_counter()
    lowered = step.lower(abstract_state(shardings, optimizer, mesh), _abstract_batch(workload, mesh))
    options = compiler_options(mesh) | WITHOUT_DEVICES[target.chip.kind]
    try:
        if dump is None:
            program, memory = _to_machine_code(lowered, options)
        else:
            program, memory = compile_until_scheduled(lowered, options, target.chip.kind, dump)
    except jax.errors.JaxRuntimeError as error:
        return _does_not_fit(str(error), target, max_link_hops(mesh), time.perf_counter() - start)
    seconds = time.perf_counter() - start
    rates = _rates(target, mesh, model.compute_dtype)
    return Compiled(program, memory, rates, max_link_hops(mesh), seconds, dump is None)


def _to_machine_code(lowered: jax.stages.Lowered, options: dict) -> tuple[str, Memory]:
    compiled = lowered.compile(compiler_options=options)
    program, memory = compiled.as_text(), compiled.memory_analysis()
    if program is None or memory is None:
        raise CompilerFailure("this compiler tells neither its program nor its memory")
    return program, Memory(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        host=memory.host_temp_size_in_bytes,
    )


def read_estimate(compiled: Compiled | Estimate, target: Target) -> Estimate:
    """The estimate of a compiled step: its memory, and the schedule read from its program."""
    if isinstance(compiled, Estimate):
        return compiled
    memory = compiled.memory
    peak = memory.arguments + memory.outputs + memory.temporaries
    return Estimate(
        fits=target.chip.kind == "tpu" or peak <= target.budget,
        peak_bytes=peak,
        hbm_bytes=target.chip.hbm_bytes,
        host_bytes=memory.host,
        usual_host_bytes=target.chip.host_bytes,
        argument_bytes=memory.arguments,
        temp_bytes=memory.temporaries,
        schedule=read_schedule(compiled.program, compiled.rates),
        max_link_hops=compiled.max_link_hops,
        compile_seconds=compiled.seconds,
        generated_code=compiled.generated_code,
    )


def lower_evaluation(workload: Workload) -> jax.stages.Lowered:
    """The evaluation step, a forward pass alone, lowered for the target; compile it with `.compile()`."""
    mesh = _checked_mesh(workload)
    weights = weight_shardings(workload.model, mesh)
    no_optimizer = optax.identity()
    params = abstract_state(state_shardings(weights, no_optimizer), no_optimizer, mesh).params
    step = make_eval_step(workload.model, weights, mesh, seq_len=workload.seq_len)
    return step.lower(params, _abstract_batch(workload, mesh))


def _checked_mesh(workload: Workload) -> Mesh:
    mesh = make_mesh(workload.mesh_dim, workload.target.devices())
    check_mesh(workload.model, mesh)
    check_batch(workload.model, mesh, workload.seq_len, workload.batch_size, workload.accumulate)
    return mesh


def _abstract_batch(workload: Workload, mesh: Mesh) -> Batch:
    def array(dtype):
        shape = workload.batch_size, workload.seq_len
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, BATCH))

    return Batch(*(array(jnp.bool_ if field in ("mask", "ends") else jnp.int32) for field in Batch._fields))


def _rates(target: Target, mesh: Mesh, dtype: str) -> Rates:
    hop = target.ring_bandwidth(mesh.shape["sp"] * mesh.shape["tp"])
    gather = target.ring_bandwidth(mesh.devices.size)
    if target.chip.kind == "tpu":  # in both directions of each dimension of the slice, shared by the cores of a chip
        chips = [tuple(x.coords) for x in mesh.devices.flat]
        links = 2 * sum(len(set(places)) > 1 for places in zip(*chips, strict=True))
        gather *= max(1, links) * len(set(chips)) / len(chips)
    return Rates(target.chip.flops(dtype), hop, gather)


def _does_not_fit(message: str, target: Target, hops: int | None, seconds: float) -> Estimate:
    size = r"\(?([\d.]+)([KMGT])\)?"
    used = re.search(rf"Used {size} of {size} hbm", message)
    used = used or re.search(rf"required for HLO temporaries {size} exceeds available HBM {size}", message)
    if used is None:
        raise CompilerFailure(message[:2000])
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    needed, available = int(float(used[1]) * units[used[2]]), int(float(used[3]) * units[used[4]])
    allocations = message.partition("Largest program allocations in hbm:")[2]
    return Estimate(
        fits=False, peak_bytes=needed, hbm_bytes=available, host_bytes=0,
        usual_host_bytes=target.chip.host_bytes, argument_bytes=0, temp_bytes=needed, schedule=None,
        max_link_hops=hops, compile_seconds=seconds, largest=allocations.strip(),
    )  # fmt: skip
