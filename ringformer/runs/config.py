"""Configuration of a run: frozen dataclasses that check their own values, and the ConfigDict from which a config file
starts.

The fields are the keys `--config.KEY=VALUE`, and their docstrings are the help of `ringformer train --help`.
`config_file.py` turns a file into the dataclasses.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from ml_collections import ConfigDict, FieldReference, config_dict

from ringformer.data import parse_mixture
from ringformer.data.packing.options import PackingOptions
from ringformer.data.stores.options import StoreOptions
from ringformer.files.bucket import check_url
from ringformer.models.interface import ModelConfig
from ringformer.models.registry import family_of
from ringformer.parallel.lora import NO_ADAPTERS, LoraConfig
from ringformer.runs.choices import Offload, OptimizerName, ParamsDtype, ReduceDtype
from ringformer.runs.shifted_positions import check_position_range
from ringformer.settings import check_settings


@dataclass(frozen=True)
class DataConfig(StoreOptions, PackingOptions):
    """Data of a run: one token store, which the first run builds if it is missing, or several existing stores; and the
    packing of their documents."""

    key_prefix: ClassVar[str] = "data."

    source: str = "stdlib"
    store: str = ""
    """Folder of the token stores; the first run builds them from `source`."""
    mixture: str = ""
    """Several existing stores instead of one, with weights: "stores/chat:7,stores/long:3"."""

    def __post_init__(self) -> None:
        check_settings(self, self.key_prefix, 2**63 - 1)
        if not self.store and not self.mixture:
            raise ValueError("data.store is empty: set the token store's folder, e.g. --config.data.store=runs/data")
        if self.store and self.mixture:
            raise ValueError(
                f"data.store={self.store!r} and data.mixture={self.mixture!r} are both set; add the "
                "store to the mixture, with a weight, or remove the mixture"
            )
        if self.mixture:
            parse_mixture(self.mixture)
        PackingOptions.__post_init__(self)
        StoreOptions.__post_init__(self)


NOT_BUILT = {
    "muon": "optimizer.name=muon orthogonalises whole matrices, which are sharded here and would have to be gathered"
}
"""Optimizers that users ask for, and why they are not here."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter), Lion (Chen et al.) or Adafactor (Shazeer & Stern) with a warm-up; vectors are not
    decayed."""

    name: OptimizerName = "adamw"
    """lion has one moment instead of two; it needs a learning rate 3 to 10 times smaller, with as much more decay, and
    b2=0.99. adafactor has means of rows and columns instead of moments, about a thousandth of their bytes; it has no
    b1, b2 and eps, and its learning rate is absolute, as AdamW's."""
    learning_rate: float = 3e-4
    """Peak learning rate, after the warm-up."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Schedule after the warm-up."""
    warmup_steps: int | None = None
    """Steps of the warm-up, whose last one has the peak rate; unset: 100 or a tenth of the steps, whichever is less."""
    final_fraction: float = 0.1
    """Fraction of the learning rate at which the cosine ends."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Constant added to the root of the second moment."""
    weight_decay: float = 0.1
    """Weight decay, multiplied by the learning rate; matrices only."""
    clip_norm: float = 1.0
    """Largest global norm of a gradient."""
    params_dtype: ParamsDtype = "float32"
    """Dtype of the matrices between steps: float32, or bfloat16, which halves them: there is no float32 copy, and each
    update is rounded stochastically. Vectors stay float32, and so do adapters."""
    moment_dtype: str = "float32"
    """Dtype of the moments between steps: float32, or bfloat16 with stochastic rounding, which halves them. A dtype for
    each of AdamW's: first,second, e.g. "bfloat16,float32"."""
    reduce_dtype: ReduceDtype = "float32"
    """Dtype in which copies of the model (dp) sum up their gradients: float32, or bfloat16, which halves what crosses a
    slow network between them. Sums inside a copy are float32."""
    offload: Offload = "none"
    """Part of the state that lies in the host's memory, where it is updated in place: "moments" saves 8 bytes a
    parameter on the devices; "state" has the weights there, too, and a step copies them to the devices in the
    compute dtype; "all" has the gradients there, too, which saves 4 bytes more and needs accumulate=1. Adapters and
    their gradients stay on the devices. The numbers are the same, those of "all" but for the last bits."""
    skip_spikes: float = 0.0
    """Skip a step whose gradient norm exceeds the median of the last 128 steps' norms by more than this many median
    absolute deviations, e.g. 20; 0: no step is skipped for its norm."""

    def __post_init__(self) -> None:
        check_settings(self, "optimizer.")
        if self.name not in get_args(OptimizerName):
            words = NOT_BUILT.get(self.name, f"unknown optimizer.name {self.name!r}")
            raise ValueError(f"{words}; choose adamw, lion or adafactor")
        if self.schedule not in ("cosine", "constant"):
            raise ValueError(f"unknown optimizer.schedule {self.schedule!r}; choose cosine or constant")
        if self.name == "adafactor":
            self._check_adafactor()

        if self.params_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"unknown optimizer.params_dtype {self.params_dtype!r}; choose float32 or bfloat16")
        dtypes = self.moment_dtypes
        if len(dtypes) != self.moments or not set(dtypes) <= {"float32", "bfloat16"}:
            each = ", or one of them for each moment, first,second" if self.moments == 2 else f" for {self.name}"
            raise ValueError(f"optimizer.moment_dtype={self.moment_dtype!r} must be float32 or bfloat16{each}")
        if self.reduce_dtype not in get_args(ReduceDtype):
            raise ValueError(f"unknown optimizer.reduce_dtype {self.reduce_dtype!r}; choose float32 or bfloat16")
        if self.offload not in get_args(Offload):
            raise ValueError(f"unknown optimizer.offload {self.offload!r}; choose none, moments, state or all")
        if not self.clip_norm > 0:
            raise ValueError(f"optimizer.clip_norm={self.clip_norm} must be positive")
        for field in ("learning_rate", "final_fraction", "weight_decay", "eps", "skip_spikes"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(f"optimizer.{field}={getattr(self, field)} must be a finite number, at least 0")
        if self.final_fraction > 1:
            raise ValueError(f"optimizer.final_fraction={self.final_fraction} must be at most 1: the rate falls to it")
        for field in ("b1", "b2"):
            if not 0 <= getattr(self, field) < 1:
                raise ValueError(f"optimizer.{field}={getattr(self, field)} must be in [0, 1)")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ValueError(f"optimizer.warmup_steps={self.warmup_steps} must be at least 0")

    def offloads(self, part: Offload) -> bool:
        """Return True if host memory has this part, and those before it."""
        parts = get_args(Offload)
        return parts.index(self.offload) >= parts.index(part)

    def _check_adafactor(self) -> None:
        """Raise ValueError for settings of moments, of which Adafactor has only means."""
        if self.offload != "none":
            raise ValueError(
                f"optimizer.offload={self.offload} updates a few rows at a time, but optimizer.name=adafactor needs "
                "whole matrices, and its statistics take little: set optimizer.offload=none, or choose adamw or lion"
            )
        if self.moment_dtype != "float32":
            raise ValueError(
                f"optimizer.moment_dtype={self.moment_dtype!r} is one of moments, but optimizer.name=adafactor has "
                "float32 means: set optimizer.moment_dtype=float32, or choose adamw or lion"
            )

    @property
    def elementwise(self) -> bool:
        """True if rows of a parameter are updated without the others, so parts of the state may be offloaded."""
        return self.name != "adafactor"

    @property
    def moments(self) -> int:
        """Number of moments of a parameter; Adafactor's one is factored."""
        return {"adamw": 2, "lion": 1, "adafactor": 1}[self.name]

    @property
    def moment_dtypes(self) -> tuple[str, ...]:
        """Dtype of each moment."""
        dtypes = tuple(dtype.strip() for dtype in self.moment_dtype.split(","))
        return dtypes * self.moments if len(dtypes) == 1 else dtypes

    def warmup(self, steps: int) -> int:
        """Return the warm-up's length in a run of `steps` steps."""
        return min(100, steps // 10) if self.warmup_steps is None else self.warmup_steps


def check_offload(optimizer: OptimizerConfig, model: ModelConfig, accumulate: int) -> None:
    """Raise ValueError if host memory cannot have what `optimizer.offload` says of a run that trains all weights."""
    if optimizer.offloads("all") and (reason := reason_against_gradients_in_host(optimizer, model, accumulate)):
        raise ValueError(f"optimizer.offload=all: {reason}. Choose optimizer.offload=state")


def reason_against_gradients_in_host(optimizer: OptimizerConfig, model: ModelConfig, accumulate: int) -> str:
    """Return why host memory cannot have the gradients of a step; empty if it can."""
    if optimizer.reduce_dtype != "float32":
        return (
            f"gradients that leave for host memory are summed up in float32, not reduce_dtype={optimizer.reduce_dtype}"
        )
    if getattr(model, "tie_embeddings", False):
        return "a tied embedding gets two gradients, and host memory adds nothing"
    if accumulate > 1:
        return f"a step writes each gradient to host memory once, so accumulate={accumulate} must be 1"
    if not getattr(model, "one_scan", False):
        return (
            "gradients come to host memory from one scan over all layers, or over periods of equal layers, and the "
            "layers of this model, its groups of remat_group layers, or its full_remat_layers and others, are not one"
        )
    return ""


def check_trained_dtype(optimizer: OptimizerConfig, lora: LoraConfig) -> None:
    """Raise ValueError for adapters in another dtype than float32."""
    if lora.rank and optimizer.params_dtype != "float32":
        raise ValueError(
            f"optimizer.params_dtype={optimizer.params_dtype} with lora.rank={lora.rank}: adapters, which are small, "
            "train in float32; set lora.base_dtype for the frozen weights"
        )


PARTS: dict[str, type] = {"data": DataConfig, "optimizer": OptimizerConfig, "lora": LoraConfig}
"""Parts of a config besides its model, whose class the family decides."""


@dataclass(frozen=True)
class Config:
    """One training run. Lengths are in tokens and refer to the whole sequence, not to a device's part."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    lora: LoraConfig = NO_ADAPTERS
    run_dir: str = ""
    """Folder of everything the run writes: config, metrics, checkpoints. If it holds checkpoints, the run resumes.
    Empty: a new folder in runs/."""
    init_from: str = ""
    """Start from the parameters of the latest checkpoint in this run directory, e.g. to continue at a longer context,
    or from a model of `ringformer convert from-hf`."""
    mesh_dim: str = "1,-1,1,1"
    """Sizes of dp,fsdp,tp,sp; -1: the remaining devices."""
    cpu_devices: int = 0
    """Simulate this many devices on the CPU; 0: use the machine's accelerators."""
    seq_len: int = 4096
    """Tokens in a sequence: the context length."""
    batch_size: int = 8
    """Sequences per step."""
    accumulate: int = 1
    """Microbatches per step."""
    steps: int = 1000
    """Optimizer steps of the run. With the cosine schedule, a different number of steps makes a different run."""
    seed: int = 0
    """Seed of fresh parameters and of the data order; it gives the same numbers on every mesh."""
    eval_every: int = 0
    """Steps between evaluations; 0: only at the end."""
    eval_batches: int = 8
    """Batches of held-out data in an evaluation."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: save by checkpoint_minutes only."""
    checkpoint_minutes: float = 30.0
    """Minutes between checkpoints, besides those of checkpoint_every; 0: save by checkpoint_every only. The last step
    is always saved, and so is the state of a run that a signal ends."""
    keep_checkpoints: int = 2
    """Number of latest checkpoints to keep. The newest checkpoint that later sound steps have proven is kept, too."""
    keep_every: int = 0
    """Also keep every checkpoint whose step is a multiple of this, permanently; 0: none."""
    keep_best: int = 0
    """Also keep this many evaluated checkpoints, those with the lowest held-out loss."""
    copy_to: str = ""
    """Also copy every checkpoint, and the run's reports, to an object store: gs://BUCKET/PATH, or file:///PATH for
    another folder. Checkpoints that keep_checkpoints removes are removed there, too. `ringformer checkpoint copy`
    copies them back. Each stage has its own folder there."""
    handshake_seconds: float = 60.0
    """Seconds that the processes of a run wait for one another. After that, the run ends and names those that are
    missing."""
    startup_minutes: float = 60.0
    """Time limit for reading or creating the first state, and for writing a save. A run that exceeds it has stalled,
    and ends."""
    compile_minutes: float = 60.0
    """Time limit for compiling the train step, and for a batch of an evaluation."""
    step_minutes: float = 30.0
    """Time limit for a step."""
    max_skipped_in_a_row: int = 10
    """Number of consecutive skipped steps that the run tolerates; 0: the first one stops it. A step is skipped if its
    loss or gradient is not finite: parameters and optimizer stay unchanged."""
    debug_nans: bool = False
    """Stop at the first step whose loss or gradient is not finite, and name the operation that produced the first such
    number: its line, the iterations of the loops around it (i.e. the layer) and its device. Slower: the host waits for
    each step."""
    tensorboard: bool = False
    """Also write TensorBoard event files (pip install tensorboardX)."""
    wandb: str = ""
    """Also log to this Weights & Biases project (pip install wandb)."""
    stages: tuple[Any, ...] = ()
    """Consecutive runs, each a dict of the keys that it changes, e.g. {"seq_len": 131072, "model.rope_theta": 1e7}; see
    docs/finetuning.md. Empty in the config of one run."""
    preset: str = ""
    """Model that `base_config` was called with. Without init_from, it supplies the architecture; with init_from, only
    the keys of `config.model` that are set apply, and the model in that folder supplies the rest."""

    def __post_init__(self) -> None:
        check_settings(self)
        positive = ("seq_len", "batch_size", "accumulate", "steps", "eval_batches", "keep_checkpoints")
        for name, kind in get_type_hints(Config).items():
            least = int(name in positive)
            if kind is int and getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if (warmup := self.optimizer.warmup(self.steps)) >= self.steps:
            raise ValueError(f"optimizer.warmup_steps={warmup} must be less than steps={self.steps}")
        if self.data.position_range:
            check_position_range(self.data.position_range, self.seq_len, self.model)
        if not self.lora.rank:
            check_offload(self.optimizer, self.model, self.accumulate)
        if self.lora != NO_ADAPTERS:
            self.lora.check()
            check_trained_dtype(self.optimizer, self.lora)
        if self.lora.rank and not self.init_from:
            raise ValueError(
                f"lora.rank={self.lora.rank} trains adapters of a model: name it with init_from, or set lora.rank=0 to "
                "train all weights"
            )
        if self.keep_best and not (self.eval_every and self.checkpoint_every and self.data.held_out):
            raise ValueError(
                f"keep_best={self.keep_best} needs evaluations of steps that are saved: set eval_every, "
                "checkpoint_every and data.held_out"
            )
        if not 0 <= self.checkpoint_minutes < math.inf:
            raise ValueError(f"checkpoint_minutes={self.checkpoint_minutes} must be at least 0, and finite")
        for field in ("handshake_seconds", "startup_minutes", "compile_minutes", "step_minutes"):
            if not 0 < getattr(self, field) < math.inf:
                raise ValueError(f"{field}={getattr(self, field)} must be more than 0, and finite")
        for field, path in (("run_dir", self.run_dir), ("init_from", self.init_from), ("data.store", self.data.store)):
            if "://" in path:
                raise ValueError(
                    f"{field}={path!r} is not a folder of this machine: a run reads and writes mounted file systems "
                    "(gcsfuse or NFS for a bucket); copy_to copies its checkpoints to a bucket"
                )
        if self.copy_to:
            check_url(self.copy_to)
            if self.keep_checkpoints < 2:
                raise ValueError(
                    f"keep_checkpoints={self.keep_checkpoints} with copy_to must be at least 2: a "
                    "checkpoint is copied while the next one is saved"
                )


class ModelKeys(ConfigDict):
    """`config.model`: a preset's values, and the names of the keys that a file or a command line has set since.

    A key that was set to the preset's own value counts as set, too.
    """

    def __init__(self, initial: Mapping[str, Any] | None = None, *, preset: str = "", **options: Any):
        """
        Args:
          initial: all keys with the preset's values, as for ConfigDict.
          preset: name of the preset.
        """
        object.__setattr__(self, "keys_set", set())
        object.__setattr__(self, "made_from", preset)
        super().__init__(initial, **options)
        self.keys_set.clear()

    def __setitem__(self, key: str, value: Any) -> None:
        # ConfigDict.get_ref replaces a value by a reference to it, which sets nothing.
        only_referenced = isinstance(value, FieldReference) and key in self and value.get() == self[key]
        super().__setitem__(key, value)
        if not only_referenced:
            self.keys_set.add(key)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._remember(state["made_from"], state["keys_set"])

    def copy_and_resolve_references(self, visit_map: dict[str, Any] | None = None) -> "ModelKeys":
        """Return a copy without references, as ConfigDict does, in which the same keys count as set."""
        copy = super().copy_and_resolve_references(visit_map)
        copy._remember(self.made_from, self.keys_set)
        return copy

    def _remember(self, preset: str, keys_set: set[str]) -> None:
        object.__setattr__(self, "made_from", preset)
        object.__setattr__(self, "keys_set", set(keys_set))


def base_config(model: str) -> ConfigDict:
    """Return all keys of a run with their defaults, and the architecture of a preset; locked against new keys.

    Fields of the model that are inherited (for LLaMA: rope_theta, rope_scaling, norm_eps) are unset, None.
    """
    config = ConfigDict(_defaults(Config, preset=model))
    for part, cls in PARTS.items():
        config[part] = ConfigDict(_defaults(cls))
    family = family_of(model)
    unset: dict[str, Any] = {}
    for name in family.config.INHERITED:  # unset is None; in a dataclass, `kind` is None
        default = getattr(family.config, name)
        unset[name] = None
        if dataclasses.is_dataclass(default):
            unset[name] = ConfigDict(_defaults(type(default), kind=None))
    values = dict(family.presets[model]) | unset
    config.model = ModelKeys(_defaults(family.config, **values), preset=model)
    return config.lock()


def _defaults(cls, **values) -> dict[str, Any]:
    """Return the fields of a dataclass with `values`, or their defaults if they have any.

    Nested dataclasses become ConfigDicts. None becomes a placeholder of the field's type, so that a flag can set it.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING} | values
    types = get_type_hints(cls)
    for name, value in defaults.items():
        if value is None:
            defaults[name] = config_dict.placeholder(_flag_type(types[name]))
        elif dataclasses.is_dataclass(value):
            defaults[name] = ConfigDict(_defaults(type(value), **vars(value)))
    return defaults


def _flag_type(kind: Any) -> type:
    """Return the type of a flag for a field that may be None."""
    if get_origin(kind) is Literal:
        return str
    alternatives = get_args(kind)
    return alternatives[0] if alternatives else kind
