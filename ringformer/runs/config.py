"""The configuration of a run: frozen dataclasses that check themselves, and the ConfigDict that a file begins with.

The fields are the keys `--config.KEY=VALUE`, and their docstrings what `ringformer train --help` says of them.
`config_file.py` makes the dataclasses of a file.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from ml_collections import ConfigDict, config_dict

from ringformer.data import parse_mixture
from ringformer.data.packing.options import PackingOptions
from ringformer.data.stores.options import StoreOptions
from ringformer.files.bucket import check_url
from ringformer.models.interface import ModelConfig
from ringformer.models.registry import family_of


@dataclass(frozen=True)
class DataConfig(StoreOptions, PackingOptions):
    """The data of a run: a store, built by the first run if it is not there, or several; and how they are packed."""

    key_prefix: ClassVar[str] = "data."

    source: str = "stdlib"
    store: str = ""
    """The folder of the token stores; built from `source` by the first run."""
    mixture: str = ""
    """Instead of one store several that are already built, with weights: "stores/chat:7,stores/long:3"."""

    def __post_init__(self):
        if not self.store and not self.mixture:
            raise ValueError("data.store is empty: name the token store's folder, e.g. --config.data.store=runs/data")
        if self.store and self.mixture:
            raise ValueError(
                f"data.store={self.store!r} and data.mixture={self.mixture!r} are both set; name the "
                "store in the mixture, with a weight, or leave the mixture out"
            )
        if self.mixture:
            parse_mixture(self.mixture)
        PackingOptions.__post_init__(self)
        StoreOptions.__post_init__(self)
        _check_local("data.store", self.store)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter) with a warm-up; vectors are not decayed."""

    learning_rate: float = 3e-4
    """At its peak, after the warm-up."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """What follows the warm-up."""
    warmup_steps: int | None = None
    """Unset: 100, or a tenth of the steps if that is less."""
    final_fraction: float = 0.1
    """The cosine ends at this fraction of the learning rate."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Times the learning rate; of matrices alone."""
    clip_norm: float = 1.0
    """Largest global norm of a gradient."""
    skip_spikes: float = 0.0
    """Skip the update of a gradient whose norm is more than this many times the median absolute deviation above the
    median of the last 128 steps' norms, e.g. 20; 0: skip none for its size."""

    def __post_init__(self):
        if self.schedule not in ("cosine", "constant"):
            raise ValueError(f"unknown optimizer.schedule {self.schedule!r}; known: cosine, constant")
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

    def warmup(self, steps: int) -> int:
        """The warm-up's length in a run of `steps` steps."""
        return min(100, steps // 10) if self.warmup_steps is None else self.warmup_steps


@dataclass(frozen=True)
class Config:
    """One training run. Lengths in tokens, all of them global."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    run_dir: str = ""
    """Everything the run writes: config, metrics, checkpoints. If it holds checkpoints the run resumes. Empty: a new
    folder in runs/."""
    init_from: str = ""
    """Begin with the parameters of the latest checkpoint of this run directory, e.g. to go on at a longer context, or
    with a model from `ringformer convert from-hf`."""
    mesh_dim: str = "1,-1,1,1"
    """Sizes of dp,fsdp,tp,sp; -1 is the rest."""
    cpu_devices: int = 0
    """Simulate this many devices on the CPU; 0: the machine's accelerators."""
    seq_len: int = 4096
    """Tokens of a sequence: the context."""
    batch_size: int = 8
    """Sequences per step."""
    accumulate: int = 1
    """Microbatches per step."""
    steps: int = 1000
    """Optimizer steps of the run. With the cosine schedule a run of other steps is another run."""
    seed: int = 0
    """Of fresh parameters and of the order of the data; it means the same on every mesh."""
    eval_every: int = 0
    """Steps between evaluations, of eval_batches batches; 0: at the end only."""
    eval_batches: int = 8
    """Batches of held-out data in an evaluation."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: none by their count."""
    checkpoint_minutes: float = 30.0
    """Minutes between checkpoints, besides those of checkpoint_every; 0: none by the clock. The last step's state is
    always saved, and that of a run which a signal ends."""
    keep_checkpoints: int = 2
    """How many of the latest checkpoints stay on disk; besides, the newest that sound steps after it have proven."""
    keep_every: int = 0
    """Also keep the checkpoints of steps that this divides, for good; 0: none. Between them the latest come and go."""
    keep_best: int = 0
    """Also keep so many checkpoints of steps that were evaluated, those with the lowest loss on held-out data."""
    copy_to: str = ""
    """Also copy every checkpoint, and what the run reports, to an object store: gs://BUCKET/PATH, or file:///PATH for
    a folder elsewhere; what keep_checkpoints removes is removed there, too. `ringformer checkpoint copy` brings it
    back. A stage has a folder there of its own."""
    handshake_seconds: float = 60.0
    """How long the processes of a run wait for one another, before it ends by naming those that did not come."""
    startup_minutes: float = 60.0
    """The longest that reading or making the first state may take, or a save to be written; then the run is stalled,
    and ends."""
    compile_minutes: float = 60.0
    """The longest that compiling the train step may take, or an evaluation's batch."""
    step_minutes: float = 30.0
    """The longest that a step may take."""
    max_skipped_in_a_row: int = 10
    """A step whose loss or gradient is not finite is skipped: parameters and optimizer stay as they are. More than this
    many in a row stop the run; 0: the first does."""
    debug_nans: bool = False
    """Stop at the first step whose loss or gradient is not finite, and name the operation that gave the first such
    number: its line, the turns of the loops around it (which layer) and its device. Slower: the host waits for each
    step."""
    tensorboard: bool = False
    """Also write TensorBoard event files (pip install tensorboardX)."""
    wandb: str = ""
    """Also log to this Weights & Biases project (pip install wandb)."""
    stages: tuple = ()
    """Runs one after the other, each a dict of what differs from the other keys, e.g. {"seq_len": 131072,
    "model.rope_theta": 1e7}; see docs/finetuning.md. Empty in the config of one run."""
    preset: str = ""
    """The model that `base_config` was called with: without init_from, what the config does not write of the model's
    rope and norm_eps is that model's."""

    def __post_init__(self):
        least = dict.fromkeys(("seq_len", "batch_size", "accumulate", "steps", "eval_batches", "keep_checkpoints"), 1)
        for field, bound in (
            least
            | dict.fromkeys(("eval_every", "checkpoint_every", "keep_every", "keep_best", "seed", "cpu_devices"), 0)
            | {"max_skipped_in_a_row": 0}
        ).items():
            if getattr(self, field) < bound:
                raise ValueError(f"{field}={getattr(self, field)} must be at least {bound}")
        if (warmup := self.optimizer.warmup(self.steps)) >= self.steps:
            raise ValueError(f"optimizer.warmup_steps={warmup} must be less than steps={self.steps}")
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
        for field in ("run_dir", "init_from"):
            _check_local(field, getattr(self, field))
        if self.copy_to:
            check_url(self.copy_to)
            if self.keep_checkpoints < 2:
                raise ValueError(
                    f"keep_checkpoints={self.keep_checkpoints} with copy_to must be at least 2: a "
                    "checkpoint is copied while the next one is saved"
                )


def _check_local(field: str, path: str) -> None:
    if "://" in path:
        raise ValueError(
            f"{field}={path!r} is no folder of this machine: a run reads and writes mounted file systems "
            "(gcsfuse or NFS for a bucket); copy_to copies its checkpoints to a bucket"
        )


def base_config(model: str) -> ConfigDict:
    """Every key of a run with its default, and the architecture of a preset; locked against new keys.

    The model's fields that are inherited (of LLaMA: rope_theta, rope_scaling, norm_eps) are unset, None.
    """
    config = ConfigDict(_defaults(Config, preset=model))
    for part, cls in (("data", DataConfig), ("optimizer", OptimizerConfig)):
        config[part] = ConfigDict(_defaults(cls))
    family = family_of(model)
    unset: dict[str, Any] = {}
    for name in family.config.INHERITED:  # a field is None, of a dataclass its `kind`
        default = getattr(family.config, name)
        unset[name] = ConfigDict(_defaults(type(default), kind=None)) if dataclasses.is_dataclass(default) else None
    config.model = ConfigDict(_defaults(family.config, **dict(family.presets[model]) | unset))
    return config.lock()


def _defaults(cls, **values) -> dict[str, Any]:
    """The fields of a dataclass with their values, or else defaults, if they have any; those of a nested dataclass are
    a ConfigDict. None becomes a placeholder of the field's type, so that a flag can set it."""
    defaults = {f.name: f.default for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING} | values
    types = get_type_hints(cls)
    for name, value in defaults.items():
        if value is None:
            kind = types[name]
            kind = str if get_origin(kind) is Literal else (get_args(kind) or (kind,))[0]
            defaults[name] = config_dict.placeholder(kind)
        elif dataclasses.is_dataclass(value):
            defaults[name] = ConfigDict(_defaults(type(value), **vars(value)))
    return defaults
