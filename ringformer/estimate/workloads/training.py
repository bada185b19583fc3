"""Workloads of training: a train step of a model on a target."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from ringformer.checkpoints.saved_model import model_of
from ringformer.data.stores.integrity import read_meta
from ringformer.estimate.workloads.command_tools import MODEL_FLAGS
from ringformer.estimate.workloads.targets import Target
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.gathered_keys import check_gathered_keys
from ringformer.models.kernel_choice import with_kernel
from ringformer.models.registry import FAMILIES, check_mesh, preset_config
from ringformer.ops.layouts import PARTS
from ringformer.parallel.device_order import check_slices
from ringformer.parallel.lora import NO_ADAPTERS, LoraConfig
from ringformer.parallel.mesh import AXIS_NAMES, check_batch, make_mesh, mesh_shape
from ringformer.runs.config import Config, DataConfig, OptimizerConfig, check_offload, check_trained_dtype

ADAMW = OptimizerConfig()

STATE_KEYS = {
    "optimizer": ("optimizer", "name"),
    "params_dtype": ("optimizer", "params_dtype"),
    "moment_dtype": ("optimizer", "moment_dtype"),
    "reduce_dtype": ("optimizer", "reduce_dtype"),
    "lora_rank": ("lora", "rank"),
    "lora_base_dtype": ("lora", "base_dtype"),
}
"""Part and name of the key of a config that a flag of `estimate` and `plan` sets, of what a run trains and of what it
keeps between steps."""


@dataclass(frozen=True)
class MemorySettings:
    """Settings of a `DecoderConfig` that trade time for memory."""

    head_groups: int = 1
    remat_group: int = 1
    q_chunk: int | None = None
    k_chunk: int | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in vars(self).items() if value is not None)


@dataclass(frozen=True)
class Workload:
    """One train step on a target, and the number of tokens to train on."""

    model: Any
    """A `ModelConfig`. Only a compiled estimate accepts one that is not a `DecoderConfig` (see `has_closed_forms`)."""
    target: Target
    mesh_dim: str
    seq_len: int
    batch_size: int = 1
    """Sequences per step, split into `accumulate` microbatches."""
    accumulate: int = 1
    tokens: float | None = None
    """Total training tokens; None if not given."""
    name: str = ""
    """The name of a preset or the folder of a model (required by `estimate_command`), or the stage of a config."""
    data: DataConfig | None = None
    """Data of a config."""
    seed: int = 0
    """Seed of the order of the data."""
    lora: LoraConfig = NO_ADAPTERS
    """Adapters to train instead of the weights."""
    optimizer: OptimizerConfig = ADAMW
    """Optimizer of a config; of a preset, AdamW with its state on the devices."""

    @property
    def masks(self) -> bool:
        """True if sequences have segment ids, as packed documents do."""
        return self.data is None or self.data.has_segments

    @property
    def sequences_at_once(self) -> int:
        """Sequences of a microbatch on a device."""
        dp, fsdp, _, _ = self.mesh_shape
        return max(1, self.batch_size // (self.accumulate * dp * fsdp))

    @property
    def passes(self) -> float | None:
        """Number of passes that the run makes through the store's tokens; None if it is not built yet."""
        if not (self.tokens and self.data and self.data.store):
            return None
        path = Path(self.data.store) / "train" / "store.json"
        if not path.is_file():
            return None
        return self.tokens / read_meta(path)["tokens"]

    @property
    def trained_params(self) -> int:
        """Number of parameters that have gradients and moments."""
        if self.lora.rank:
            return self.lora.num_params(self.model)
        return self.model.num_params

    @property
    def weights_in_host(self) -> bool:
        """True if the weights are in host memory; adapters stay on the devices."""
        return self.optimizer.offloads("state") and not self.lora.rank

    @property
    def gradients_in_host(self) -> bool:
        """True if the gradients are in host memory; those of adapters stay on the devices."""
        return self.optimizer.offloads("all") and not self.lora.rank

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the weights that do not train, on all devices that share a copy."""
        if not self.lora.rank:
            return 0
        return self.model.num_params * jnp.dtype(self.lora.base_dtype).itemsize

    @property
    def step_tokens(self) -> int:
        return self.seq_len * self.batch_size

    @property
    def local_tokens(self) -> int:
        """Tokens of a microbatch on one device."""
        return self.step_tokens // self.accumulate // self.target.num_devices

    @property
    def ring_tokens(self) -> int:
        """Tokens of one sequence on a rank of the ring. tp does not reduce them: it splits the heads instead."""
        return self.seq_len * self.model.ulysses // self.mesh_shape[3]

    @property
    def ring_size(self) -> int:
        """Number of ranks of a ring; 1 without one."""
        return self.mesh_shape[3] // self.model.ulysses if self.model.on_ring else 1

    @property
    def parts(self) -> int:
        """Parts that all ranks of a ring have of a sequence; 1 without a ring."""
        return self.model.sequence_parts(self.ring_size)

    @property
    def windows(self) -> dict[int, int]:
        """Number of layers by the keys that a query sees at most; 0 if it sees all before it."""
        layers: Counter[int] = Counter()
        for window, count in self.model.windows.items():
            layers[window if window < self.seq_len else 0] += count
        return dict(layers)

    def hops(self, window: int) -> int:
        """Count the hops that keys make in a pass of the layers with a window: between ranks, or along the parts of the
        sequence that the window reaches."""
        if self.ring_size == 1:
            return 0
        if window:
            parts = PARTS[self.model.layout]
            return min(-(-(window - 1) * parts // self.ring_tokens), parts * self.ring_size - 1)
        if self.model.ring == "gathered":
            return 0
        return self.ring_size - 1

    @cached_property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of the axes (dp, fsdp, tp, sp)."""
        return mesh_shape(self.mesh_dim, self.target.num_devices)

    def mesh(self) -> Mesh:
        """Make the mesh of the target's devices. Raises MissingCompiler, and ValueError for sizes that do not fit."""
        return make_mesh(self.mesh_dim, self.target.devices(), self.model.ulysses)

    @property
    def state_shards(self) -> int:
        """Number of devices that share one copy of the parameters and the optimizer's state."""
        _, fsdp, tp, sp = self.mesh_shape
        return fsdp * tp * sp

    @property
    def has_closed_forms(self) -> bool:
        """True for models with closed forms and memory settings, which only LLaMA has."""
        return isinstance(self.model, DecoderConfig)

    @property
    def settings(self) -> MemorySettings:
        m = self.model
        return MemorySettings(m.head_groups, m.remat_group, m.q_chunk, m.k_chunk)

    def check(self) -> None:
        """Raise ValueError for a mesh, length or batch that is invalid for every run; needs no compiler."""
        mesh = AbstractMesh(self.mesh_shape, AXIS_NAMES)
        check_mesh(self.model, mesh)
        check_slices(self.mesh_shape[0], self.target.slices, self.target.slices_are)
        if not self.lora.rank:
            check_offload(self.optimizer, self.model, self.accumulate)
        check_batch(self.model.layout, self.model.ulysses, mesh, self.seq_len, self.batch_size, self.accumulate)
        check_trained_dtype(self.optimizer, self.lora)
        if self.has_closed_forms and self.model.ring == "gathered":
            check_gathered_keys(self.model, mesh, self.seq_len, self.batch_size // self.accumulate, self.target.chip)
        self.with_kernel()  # raises if it cannot

    def with_kernel(self) -> tuple[Self, str]:
        """Return the workload with kernel and chunks chosen for the target, and a line that names them and the reason.
        Raises ValueError for a kernel that the target does not support."""
        chip = self.target.chip
        _, _, tp, sp = self.mesh_shape
        ranks = sp // self.model.ulysses
        model, why = with_kernel(self.model, chip.kind, chip, self.ring_tokens, self.masks, ranks, tp)
        return replace(self, model=model), why

    def with_settings(self, settings: MemorySettings) -> "Workload":
        return replace(self, model=replace(self.model, **vars(settings)))


def described(model: DecoderConfig) -> str:
    """Describe a model's window, exchange of heads and form of the ring; empty for the plain ring."""
    words = []
    for window, layers in model.windows.items():
        if window:
            words.append(f"window {window:,}")
            if len(model.windows) > 1:
                words.append(f"in {layers} of {model.num_layers} layers")
    if model.ulysses > 1:
        words.append(f"ulysses {model.ulysses}")
    if model.ring != "one_way":
        words.append(f"ring {model.ring}")
    return " ".join(words)


def named_model(name: str, **settings: Any) -> Any:
    """Return the configuration of a preset, or that of the model in a folder with default options; `settings` replace
    some of its fields. Raises ValueError for a name that is neither."""
    if any(name in family.presets for family in FAMILIES.values()) or not Path(name).is_dir():
        return preset_config(name, **settings)
    model = model_of(name)
    architecture = {field: getattr(model, field) for field in (*model.ARCHITECTURE, *model.INHERITED)}
    return type(model)(**architecture | settings)


def preset_workload(name: str, target: Target, seq_len: int, **settings: Any) -> Workload:
    """Return the workload of a preset, or of the model in a folder, with some of its settings replaced, on one ring of
    all devices of each slice, or group of GPUs."""
    slices = target.slices
    return Workload(named_model(name, **settings), target, f"{slices},1,1,-1", seq_len, batch_size=slices, name=name)


def stage_workloads(configs: list[Config], target: Target) -> list[Workload]:
    """Return the workloads of the runs of `parse_stages` on a target, each with the tokens of all its steps."""
    workloads = []
    for n, c in enumerate(configs, 1):
        tokens = c.steps * c.batch_size * c.seq_len
        name = f"stage {n}" if len(configs) > 1 else "run"
        shape = c.mesh_dim, c.seq_len, c.batch_size, c.accumulate
        workloads.append(Workload(c.model, target, *shape, tokens, name, c.data, c.seed, c.lora, c.optimizer))
    return workloads


def state_settings(workload: Workload) -> dict[str, Any]:
    """Return the values of a workload that are not those of a preset, by the flag that sets them."""
    defaults = {"optimizer": ADAMW, "lora": NO_ADAPTERS}
    values = {}
    for flag, (part, name) in STATE_KEYS.items():
        value = getattr(getattr(workload, part), name)
        if value != getattr(defaults[part], name):
            values[flag] = value
    return values


def estimate_command(workload: Workload) -> str:
    """Return the command line that estimates a preset's workload; raises ValueError if flags cannot express it."""
    model = workload.model
    flags = {name: getattr(model, name) for name in MODEL_FLAGS}
    if named_model(workload.name, **flags) != model:
        raise ValueError(f"no flags of `ringformer estimate` turn {workload.name!r} into {model}; write a config file")
    changed = {name: value for name, value in flags.items() if value != getattr(DecoderConfig, name)}
    options: dict[str, Any] = {
        "model": workload.name,
        "target": workload.target.name,
        "attention": model.attention,
        "compute_dtype": model.compute_dtype,
        "mesh_dim": workload.mesh_dim,
        "batch_size": workload.batch_size,
    }
    if workload.accumulate != 1:
        options["accumulate"] = workload.accumulate
    for name in ("layout", "ulysses", "ring", "window", "kernel", "remat", "full_remat_layers"):
        options[name] = changed.get(name)
    options |= {"seq_len": workload.seq_len} | vars(workload.settings)
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    for name, value in state_settings(workload).items():
        words.append(f"--{name}={value}")
    if workload.optimizer.offload != "none":
        words.append(f"--optimizer_offload={workload.optimizer.offload}")
    if workload.target.host_gib is not None:
        words.append(f"--host_gib={workload.target.host_gib:g}")
    if workload.target.group_gb_per_s is not None:
        words.append(f"--group_gb_per_s={workload.target.group_gb_per_s:g}")
    for name in ("offload", "fetch_ahead"):
        if name in changed:
            words.append(f"--{name}" if changed[name] else f"--no-{name}")
    return " ".join(["ringformer estimate", *words, "--json"])
