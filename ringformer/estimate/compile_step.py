"""Compile the project's own train step for a target that is not here, and read what the compiler says of it."""

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
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
from ringformer.estimate.targets import Target, only_compilers
from ringformer.mesh import BATCH, make_mesh
from ringformer.models.llama_config import LlamaConfig
from ringformer.train.config import OptimizerConfig
from ringformer.train.optimizer import make_optimizer
from ringformer.train.run_checks import check_batch
from ringformer.train.state import abstract_state, decayed, state_shardings, weight_shardings
from ringformer.train.step import make_eval_step, make_train_step

WITHOUT_DEVICES = {"tpu": {}, "gpu": {"xla_gpu_autotune_level": "0"}}
"""There is no device to try variants of a kernel on."""


@dataclass(frozen=True)
class Estimate:
    """What one train step takes on one device of a target, compiled. Bytes, seconds, FLOPs; None: nobody said."""

    fits: bool
    peak_bytes: int
    hbm_bytes: int
    host_bytes: int
    """Of host memory per device, for offloaded activations."""
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


class _Compiled(NamedTuple):
    """What the compiler said of a step that it accepted."""

    program: str
    memory: Memory
    rates: Rates
    max_link_hops: int | None
    seconds: float
    generated_code: bool


def compile_step(
    model: LlamaConfig, target: Target, mesh_dim: str, *, seq_len: int, batch_size: int = 1, accumulate: int = 1
) -> Estimate:
    """One step of `ringformer train`, with AdamW, for sequences of `seq_len` tokens, `batch_size` a step in
    `accumulate` microbatches, compiled to machine code.

    Raises ValueError for a mesh that cannot be and CompilerFailure if the compiler fails for another reason than
    memory.
    """
    return _estimate(_compile(None, model, target, mesh_dim, seq_len, batch_size, accumulate), target)


def compile_step_apart(
    model: LlamaConfig,
    target: Target,
    mesh_dim: str,
    *,
    seq_len: int,
    batch_size: int = 1,
    accumulate: int = 1,
    generate_code: bool = False,
) -> Estimate:
    """`compile_step` in a process of its own, which ends when the program is scheduled and its buffers are placed: on
    TPU after a tenth of the compiler's work. With `generate_code` it goes on to machine code, of which nothing is said.

    A compiler that dies is a CompilerFailure too.
    """
    target.require_compiler()
    with tempfile.TemporaryDirectory(prefix="ringformer-", ignore_cleanup_errors=True) as folder:
        dump = None if generate_code else Path(folder, "dump")
        call = dump, model, target, mesh_dim, seq_len, batch_size, accumulate
        Path(folder, "call").write_bytes(pickle.dumps(call))
        program = f"from ringformer.estimate.compile_step import _child; _child({folder!r}, {os.getpid()})"
        done = subprocess.run(
            [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        answer = Path(folder, "answer")
        if not answer.exists():
            raise CompilerFailure(f"its process ended with {done.returncode}: {done.stdout.strip()[-2000:]}")
        found = pickle.loads(answer.read_bytes())
    if isinstance(found, Exception):
        raise found
    return _estimate(found, target)


def _child(folder: str, parent: int) -> None:
    """The process of `compile_step_apart`. It ends without waiting for the compiler, and if its parent is gone."""

    def follow():
        while os.getppid() == parent:
            time.sleep(0.5)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to say
    threading.Thread(target=follow, daemon=True).start()
    only_compilers()
    try:
        found = _compile(*pickle.loads(Path(folder, "call").read_bytes()))
    except (ValueError, RuntimeError) as error:
        found = error
    part = Path(folder, "part")
    part.write_bytes(pickle.dumps(found))
    part.replace(Path(folder, "answer"))
    os._exit(0)


def _compile(
    dump: Path | None, model, target: Target, mesh_dim: str, seq_len: int, batch_size: int, accumulate: int
) -> _Compiled | Estimate:
    """The step compiled to machine code, or up to its schedule, by way of the folder `dump`. An Estimate: too large."""
    mesh = _checked_mesh(model, target, mesh_dim, seq_len, batch_size, accumulate)
    optimizer = make_optimizer(OptimizerConfig(), 1000, decayed(model))
    shardings = state_shardings(weight_shardings(model, mesh), optimizer)
    step = make_train_step(model, optimizer, shardings, mesh, clip_norm=1.0, accumulate=accumulate)
    start = time.perf_counter()
    lowered = step.lower(abstract_state(shardings, optimizer, mesh), _abstract_batch(batch_size, seq_len, mesh))
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
    return _Compiled(program, memory, rates, max_link_hops(mesh), seconds, dump is None)


def _to_machine_code(lowered: jax.stages.Lowered, options: dict) -> tuple[str, Memory]:
    compiled = lowered.compile(compiler_options=options)
    memory = compiled.memory_analysis()
    return compiled.as_text(), Memory(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        host=memory.host_temp_size_in_bytes,
    )


def _estimate(found: _Compiled | Estimate, target: Target) -> Estimate:
    if isinstance(found, Estimate):
        return found
    memory = found.memory
    peak = memory.arguments + memory.outputs + memory.temporaries
    return Estimate(
        fits=target.chip.kind == "tpu" or peak <= target.budget,
        peak_bytes=peak,
        hbm_bytes=target.chip.hbm_bytes,
        host_bytes=memory.host,
        usual_host_bytes=target.chip.host_bytes,
        argument_bytes=memory.arguments,
        temp_bytes=memory.temporaries,
        schedule=read_schedule(found.program, found.rates),
        max_link_hops=found.max_link_hops,
        compile_seconds=found.seconds,
        generated_code=found.generated_code,
    )


def lower_evaluation(model: LlamaConfig, target: Target, mesh_dim: str, *, seq_len: int, batch_size: int):
    """The evaluation step, a forward pass alone, lowered for the target; compile it with `.compile()`."""
    mesh = _checked_mesh(model, target, mesh_dim, seq_len, batch_size)
    weights = weight_shardings(model, mesh)
    no_optimizer = optax.identity()
    params = abstract_state(state_shardings(weights, no_optimizer), no_optimizer, mesh).params
    step = make_eval_step(model, weights, mesh, seq_len=seq_len)
    return step.lower(params, _abstract_batch(batch_size, seq_len, mesh))


def _checked_mesh(
    model: LlamaConfig, target: Target, mesh_dim: str, seq_len: int, batch_size: int, accumulate: int = 1
) -> Mesh:
    mesh = make_mesh(mesh_dim, target.devices())
    model.check_mesh(mesh)
    check_batch(model, mesh, seq_len, batch_size, accumulate)
    return mesh


def _abstract_batch(batch_size: int, seq_len: int, mesh: Mesh) -> Batch:
    def array(dtype):
        return jax.ShapeDtypeStruct((batch_size, seq_len), dtype, sharding=NamedSharding(mesh, BATCH))

    return Batch(*(array(jnp.bool_ if field in ("mask", "ends") else jnp.int32) for field in Batch._fields))


def _rates(target: Target, mesh: Mesh, dtype: str) -> Rates:
    hop = target.ring_bandwidth(mesh.shape["sp"] * mesh.shape["tp"])
    gather = target.ring_bandwidth(mesh.devices.size)
    if target.chip.kind == "tpu":  # in both directions of each dimension of the slice
        coordinates = zip(*(x.coords for x in mesh.devices.flat), strict=True)
        gather *= max(1, 2 * sum(len(set(places)) > 1 for places in coordinates))
    return Rates(target.chip.flops(dtype), hop, gather)


def _does_not_fit(message: str, target: Target, hops: int | None, seconds: float) -> Estimate:
    used = re.search(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm", message)
    used = used or re.search(r"required for HLO temporaries \(([\d.]+)([KMGT])\) exceeds available HBM", message)
    if used is None:
        raise CompilerFailure(message[:2000])
    needed = int(float(used[1]) * {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}[used[2]])
    allocations = message.partition("Largest program allocations in hbm:")[2]
    return Estimate(
        fits=False, peak_bytes=needed, hbm_bytes=target.chip.hbm_bytes, host_bytes=0,
        usual_host_bytes=target.chip.host_bytes, argument_bytes=0, temp_bytes=needed, schedule=None,
        max_link_hops=hops, compile_seconds=seconds, largest=allocations.strip(),
    )  # fmt: skip
