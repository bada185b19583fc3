"""Checks of a run before it begins: its folders, the pool of host memory, its held-out data."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh

from ringformer.checkpoints.saved_model import model_of, other_tokenizer
from ringformer.data import Loader, Tokenizer
from ringformer.files.run_layout import CONFIG, HF_CONFIG, METRICS
from ringformer.hardware import GiB
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.interface import ModelConfig
from ringformer.models.registry import check_mesh
from ringformer.parallel.host_memory import HOST_MEMORY
from ringformer.parallel.mesh import AXIS_NAMES, check_batch, mesh_shape
from ringformer.parallel.runtime_environment import HOST_POOL, host_pool, host_pool_needed
from ringformer.runs.config import Config


def check_folders(run_dir: Path, config: Config) -> None:
    """Raise ValueError if the run's folder or init_from holds a model that this run cannot continue.

    An init_from that does not exist yet, the folder of an earlier stage, is skipped.
    """
    if (run_dir / HF_CONFIG).exists() and not (run_dir / METRICS).exists():
        raise ValueError(f"run_dir={run_dir} is a converted model: name it with init_from, and choose another run_dir")
    if (run_dir / CONFIG).is_file():
        _check_same(run_dir, config.model, config.model.ARCHITECTURE, "choose another folder")
    if config.init_from:
        check_start(config)


def check_start(config: Config) -> None:
    """Raise ValueError if the config sets another value than init_from has, for a key that a run cannot change. An
    init_from that does not exist is skipped."""
    if not config.init_from or not (Path(config.init_from) / CONFIG).is_file():
        return
    model = config.model
    inherited = [name for name in model.INHERITED if name not in model.CONTEXT]
    advice = "leave out what the config changes of it, or choose another init_from"
    _check_same(config.init_from, model, (*model.ARCHITECTURE, *inherited), advice)


def _check_same(folder: str | Path, here: ModelConfig, fields: Iterable[str], advice: str) -> None:
    """Raise ValueError if the model in a folder is of another family than `here`, or differs in one of the fields."""
    there = model_of(folder)
    clash = []
    if type(there) is not type(here):
        clash.append(f"{type(there).__name__} there, {type(here).__name__} here")
    clash += _differences(there, here, fields, "{} there, {} here")
    if clash:
        raise ValueError(f"{folder} holds another model ({'; '.join(clash)}): {advice}")


def check_tokenizer(config: Config, tokenizer: Tokenizer) -> None:
    """Raise ValueError if the model in init_from was trained with another tokenizer than that of the run's data."""
    theirs = other_tokenizer(config.init_from, tokenizer)
    if theirs is not None:
        named = "bytes" if theirs == "bytes" else config.init_from
        raise ValueError(
            f"{config.init_from} was trained with tokenizer {theirs}, but data.tokenizer={config.data.tokenizer} is "
            f"{tokenizer.name}, whose ids mean another text: set --config.data.tokenizer={named} and a new "
            "--config.data.store, or train it on these ids with --allow=data.tokenizer"
        )


def theta_warnings(configs: Sequence[Config]) -> list[str]:
    """Return a warning for each run whose rope theta has no effect, or is below that of the model in init_from or of an
    earlier stage.

    Args:
      configs: the stages, or a single run.
    """
    init_from = configs[0].init_from
    largest: dict[str, float] = {}
    if init_from and (Path(init_from) / CONFIG).is_file():
        largest = thetas(model_of(init_from))
    warnings = []
    for number, config in enumerate(configs, 1):
        stage = f"stage {number}: " if len(configs) > 1 else ""
        for name, theta in thetas(config.model).items():
            before = largest.get(name, theta)
            largest[name] = max(theta, before)
            if theta != before and isinstance(config.model, DecoderConfig) and not any(config.model.ropes):
                warnings.append(
                    f"warning: {stage}model.{name}={theta:g} has no effect: no layer of the model has rotary positions"
                )
            elif theta < before:
                warnings.append(
                    f"warning: {stage}model.{name}={theta:g} is below the {before:g} that the model has had: a longer "
                    f"context needs a larger one; leave model.{name} out to keep the model's"
                )
    return warnings


def thetas(model: ModelConfig) -> dict[str, float]:
    """Return the bases of a model's rotary frequencies that stages may change, by field."""
    bases = {}
    for name in model.CONTEXT:
        base = getattr(model, name)
        if isinstance(base, float):
            bases[name] = base
    return bases


def context_changes(config: Config) -> list[str]:
    """List the changes to positional settings since the model that the run starts from, e.g. "rope_theta 10000 ->
    5e+07"."""
    return _differences(model_of(config.init_from), config.model, config.model.CONTEXT, "{} -> {}")


def _differences(there: ModelConfig, here: ModelConfig, fields: Iterable[str], form: str) -> list[str]:
    differences = []
    for name in fields:
        theirs = getattr(there, name, None)  # None: another family
        ours = getattr(here, name)
        if theirs != ours:
            differences.append(f"{name} {form.format(_short(theirs), _short(ours))}")
    return differences


def _short(value: Any) -> str:
    if is_dataclass(value):
        (_, kind), *options = vars(value).items()
        given = ", ".join(f"{k}={v:g}" for k, v in options if v is not None)
        return f"{kind}({given})" if given else kind
    return f"{value:g}" if isinstance(value, float) else str(value)


def check_devices(config: Config, count: int) -> None:
    """Raise ValueError if the run's mesh, length or batch does not fit this number of devices; needs none of them."""
    mesh = AbstractMesh(mesh_shape(config.mesh_dim, count), AXIS_NAMES)
    check_mesh(config.model, mesh)
    check_batch(config.model.layout, config.model.ulysses, mesh, config.seq_len, config.batch_size, config.accumulate)


def check_host_memory(
    model: ModelConfig, tokens: int, of_state: int, of_gradients: int, devices: Sequence[jax.Device]
) -> None:
    """Raise ValueError if this machine cannot keep in host memory what a run offloads: its devices have no such memory,
    it has too little, or XLA's pool for GPUs has too little in this environment.

    Args:
      tokens: tokens of a microbatch on each device.
      of_state: bytes of a device's shards of what is offloaded of the state.
      of_gradients: bytes of a device's shards of the gradients that are in host memory.
      devices: all devices of this machine's process.
    """
    kinds = [memory.kind for memory in devices[0].addressable_memories()]
    if of_state and HOST_MEMORY not in kinds:
        raise ValueError(
            f"optimizer.offload keeps a part of the state in {HOST_MEMORY} memory, but a {devices[0].device_kind} has "
            f"only {', '.join(kinds)}: set optimizer.offload=none"
        )
    activations = model.offloaded_bytes(tokens) if hasattr(model, "offloaded_bytes") else 0
    offloaded = of_state + of_gradients + activations
    held = offloaded + of_state  # a save copies what a step overwrites
    keys = " and ".join(key for key, size in (("optimizer.offload", of_state), ("model.offload", activations)) if size)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if held * len(devices) > machine:
        raise ValueError(
            f"{keys} would keep {offloaded / GiB:.1f} GiB of each of {len(devices)} devices in host memory, and a save "
            f"{of_state / GiB:.1f} more, {held * len(devices) / GiB:.1f} GiB in all, but this machine has "
            f"{machine / GiB:.1f} GiB: use more devices on fsdp or sp, or offload less"
        )
    pool = host_pool(os.environ)
    needed = host_pool_needed(offloaded)
    if devices[0].platform == "gpu" and needed > pool:
        raise ValueError(
            f"{keys} would keep {offloaded / GiB:.1f} GiB of each GPU in host memory, for which XLA has a pool of "
            f"{pool} GiB per GPU: set {HOST_POOL}={needed} before the run starts (scripts/gpu_node.sh and "
            "scripts/slurm.sh do)"
        )


def count_batches(eval_batches: int, data: Loader) -> int:
    """Return the number of batches in an evaluation; raises ValueError if the held-out data do not fill a batch."""
    batches = min(eval_batches, data.sequences.per_epoch // data.batch_size)
    if batches == 0:
        raise ValueError(
            f"the held-out data has {data.sequences.per_epoch} sequences of {data.seq_len} tokens, fewer than "
            f"batch_size={data.batch_size}: raise data.held_out, or set it to 0 to train without evaluation"
        )
    return batches
