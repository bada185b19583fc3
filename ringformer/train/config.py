"""The configuration of a run: `ml_collections` files outside, frozen and validated dataclasses inside.

A config file's `get_config()` starts from `base_config(model)`, which has every key there is, with its default.
`parse_stages` turns the result into one `Config` for each stage at the door (`parse`: of a config without stages);
nothing past it reads a ConfigDict.

Three values of a model decide what its weights mean and not their shapes: rope theta and scaling, and the norm's
epsilon (`INHERITED`). Where a config does not write them they are inherited: from the model that the run begins with,
or else from the preset.
"""

import dataclasses
import difflib
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from ml_collections import ConfigDict, config_dict

from ringformer.data import parse_mixture
from ringformer.data.packing.options import PackingOptions
from ringformer.data.stores.options import StoreOptions
from ringformer.models.llama import LlamaConfig
from ringformer.models.llama_presets import preset
from ringformer.ops.rope import RopeScaling
from ringformer.untrusted_files import read_object

ARCHITECTURE = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                "tie_embeddings")  # fmt: skip
"""The fields of a model that decide the shapes of its parameters."""

INHERITED = ("rope_theta", "rope_scaling", "norm_eps")
"""The fields of a model that a config need not write; None in a ConfigDict: inherited."""


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
            raise ValueError(f"data.store={self.store!r} and data.mixture={self.mixture!r} are both set; name the "
                             "store in the mixture, with a weight, or leave the mixture out")  # fmt: skip
        if self.mixture:
            parse_mixture(self.mixture)
        PackingOptions.__post_init__(self)
        StoreOptions.__post_init__(self)
        _check_local("data.store", self.store)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter) with a warm-up; vectors are not decayed."""

    learning_rate: float = 3e-4
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int | None = None
    """Unset: 100, or a tenth of the steps if that is less."""
    final_fraction: float = 0.1
    """The cosine ends at this fraction of the learning rate."""
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    """Largest global norm of a gradient."""

    def __post_init__(self):
        if self.schedule not in ("cosine", "constant"):
            raise ValueError(f"unknown optimizer.schedule {self.schedule!r}; known: cosine, constant")
        if not self.clip_norm > 0:
            raise ValueError(f"optimizer.clip_norm={self.clip_norm} must be positive")
        for field in ("learning_rate", "final_fraction", "weight_decay", "eps"):
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

    model: LlamaConfig
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
    batch_size: int = 8
    """Sequences per step."""
    accumulate: int = 1
    """Microbatches per step."""
    steps: int = 1000
    seed: int = 0
    eval_every: int = 0
    """Steps between evaluations, of eval_batches batches; 0: at the end only."""
    eval_batches: int = 8
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: none by their count."""
    checkpoint_minutes: float = 30.0
    """Minutes between checkpoints, besides those of checkpoint_every; 0: none by the clock. The last step's state is
    always saved, and that of a single process which SIGTERM ends."""
    keep_checkpoints: int = 2
    tensorboard: bool = False
    """Also write TensorBoard event files (pip install tensorboardX)."""
    wandb: str = ""
    """Also log to this Weights & Biases project (pip install wandb)."""
    stages: tuple = ()
    """Runs one after the other, each a dict of what differs from the other keys, e.g. {"seq_len": 131072,
    "model.rope_theta": 1e7}; see `parse_stages`. Empty in the config of one run."""
    preset: str = ""
    """The model that `base_config` was called with: without init_from, what the config does not write of its rope and
    norm_eps is that model's."""

    def __post_init__(self):
        least = dict.fromkeys(("seq_len", "batch_size", "accumulate", "steps", "eval_batches", "keep_checkpoints"), 1)
        for field, bound in (least | {"eval_every": 0, "checkpoint_every": 0, "seed": 0}).items():
            if getattr(self, field) < bound:
                raise ValueError(f"{field}={getattr(self, field)} must be at least {bound}")
        if (warmup := self.optimizer.warmup(self.steps)) >= self.steps:
            raise ValueError(f"optimizer.warmup_steps={warmup} must be less than steps={self.steps}")
        if not 0 <= self.checkpoint_minutes < math.inf:
            raise ValueError(f"checkpoint_minutes={self.checkpoint_minutes} must be at least 0, and finite")
        for field in ("run_dir", "init_from"):
            _check_local(field, getattr(self, field))


def _check_local(field: str, path: str) -> None:
    if "://" in path:
        raise ValueError(f"{field}={path!r} is no folder of this machine: ringformer reads and writes mounted file "
                         "systems only (gcsfuse or NFS for a bucket)")  # fmt: skip


def base_config(model: str) -> ConfigDict:
    """Every key of a run with its default, and the architecture of a preset; locked against new keys.

    `model.rope_theta`, `model.rope_scaling` and `model.norm_eps` are unset (None): inherited.
    """
    config = ConfigDict(_defaults(Config, preset=model))
    for part, cls in (("data", DataConfig), ("optimizer", OptimizerConfig)):
        config[part] = ConfigDict(_defaults(cls))
    config.model = ConfigDict(_defaults(LlamaConfig, **preset(model) | dict.fromkeys(("rope_theta", "norm_eps"))))
    config.model.rope_scaling = ConfigDict(_defaults(RopeScaling, kind=None))
    return config.lock()


def parse(config: ConfigDict, *, inherit: bool = True) -> Config:
    """The validated dataclass of a config without stages.

    Args:
      inherit: read what the config leaves open (`INHERITED`) from the run itself if it is to be resumed, else from
        init_from. False: the checkpoint need not be here; it is the preset's, as without init_from.

    Raises:
      ValueError: for a value that cannot be.
      FileNotFoundError: if init_from is no folder of a run or of a converted model.
    """
    return _parse(config, _begun(config.run_dir, config.init_from) if inherit else None)


def model_of(run_dir: str | Path) -> LlamaConfig:
    """The model of a run's folder, or of a converted model's. Raises FileNotFoundError, ValueError if it is neither."""
    if not (Path(run_dir) / "config.json").is_file():
        raise FileNotFoundError(f"{run_dir} has no config.json: name the folder of a run or of a converted model")
    found = read_object(run_dir, "config.json")
    if "model" not in found:
        advice = "convert it first, with ringformer convert from-hf" if "model_type" in found else "name a run's folder"
        raise ValueError(f"{run_dir}/config.json is not that of a run or of a converted model: {advice}")
    return LlamaConfig(**found["model"])


def _begun(run_dir: str, init_from: str, before: LlamaConfig | None = None) -> LlamaConfig | None:
    """The model that a run goes on with: its own if it was begun, else `before`, else that of init_from."""
    if run_dir and (Path(run_dir) / "metrics.jsonl").is_file() and (Path(run_dir) / "config.json").is_file():
        return model_of(run_dir)
    return before or (model_of(init_from) if init_from else None)


def _parse(config: ConfigDict, base: LlamaConfig | None) -> Config:
    """`base`: the model that the run begins with; None: begin with the preset's."""
    values = config.to_dict()
    if values["stages"]:
        raise ValueError(f"the config has {len(values['stages'])} stages, one run was expected: use parse_stages")
    known = preset(values["preset"])
    given = values["model"] = _without_none(values["model"])
    for field in INHERITED:
        default = known.get(field, getattr(LlamaConfig, field)) if base is None else getattr(base, field)
        if field != "rope_scaling":
            given.setdefault(field, default)
        elif "kind" not in given[field]:  # the fields that are written, in the scaling that is there
            given[field] = dataclasses.replace(default, **given[field])
    parts = {"model": LlamaConfig, "data": DataConfig, "optimizer": OptimizerConfig}
    return Config(**{k: parts[k](**v) if k in parts else v for k, v in values.items()})


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {k: _without_none(v) if isinstance(v, dict) else v for k, v in values.items() if v is not None}


def parse_stages(config: ConfigDict, *, inherit: bool = True) -> list[Config]:
    """The runs that a config describes, in their order: one for each of its stages; itself if it has none.

    Stage N is the config with the overrides of `config.stages[N - 1]` (dotted keys). It runs in
    RUN_DIR/stage-N-CONTEXT and begins with the parameters of stage N-1, the first with those of `init_from`; optimizer
    and schedule start anew. What it does not write of its rope is as in the stage before (`inherit`: see `parse`). Its
    data come in an order of their own: its seed is the config's plus N-1, unless the stage names one.

    Raises ValueError, naming the stage, for an unknown key, a value that cannot be, a context shorter than that of the
    stage before, and a rope theta beside a scaling of it.
    """
    if not config.stages:
        return [parse(config, inherit=inherit)]
    runs = []
    for number, overrides in enumerate(config.stages, 1):
        values = config.copy_and_resolve_references()
        values.stages = ()
        values.seed += number - 1
        try:
            _override(values, overrides)
            if config.run_dir:
                values.run_dir = f"{config.run_dir}/stage-{number}-{values.seq_len}"
            if runs:
                values.init_from = runs[-1].run_dir
            before = runs[-1].model if runs else None
            base = _begun(values.run_dir, config.init_from, before) if inherit else before
            runs.append(_parse(values, base))
            _check_rope(runs[-1].model, overrides)
        except (TypeError, ValueError) as error:
            raise ValueError(f"stage {number}: {error}") from None
    for number, (before, after) in enumerate(pairwise(runs), 2):
        if after.seq_len < before.seq_len:
            raise ValueError(
                f"stage {number} shrinks the context, from {before.seq_len} to {after.seq_len} tokens: order the "
                "stages by seq_len"
            )
    return runs


def _override(values: ConfigDict, overrides: dict[str, Any]) -> None:
    """Set dotted keys of a config. Raises ValueError for one that is not there or that all stages share."""
    shared = {"stages", "run_dir", "init_from", "cpu_devices", "preset", "data.tokenizer", "model.norm_eps",
              *(f"model.{f}" for f in ARCHITECTURE)}  # fmt: skip
    known = _dotted(values)
    for key, value in overrides.items():
        if key in shared:
            raise ValueError(f"{key} is the same in all stages: set it outside of them")
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise ValueError(f"there is no key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        *folders, field = key.split(".")
        place = values
        for folder in folders:
            place = place[folder]
        try:
            place[field] = value
        except TypeError as error:
            raise ValueError(f"{key}={value!r}: {error}") from None


def _check_rope(model: LlamaConfig, overrides: dict[str, Any]) -> None:
    """Raise ValueError for a stage that names a theta for a model with a scaling, written or inherited."""
    kind = model.rope_scaling.kind
    if "model.rope_theta" in overrides and kind != "none":
        raise ValueError(
            f"model.rope_theta={model.rope_theta:g} and model.rope_scaling.kind={kind!r} both say how far positions "
            "reach: give the theta or the scaling (model.rope_scaling.kind='none' gives up one that is inherited)"
        )


def _dotted(values: ConfigDict, prefix: str = "") -> list[str]:
    """The dotted keys of a config."""
    found = []
    for key in values:
        place = values[key]
        found += _dotted(place, f"{prefix}{key}.") if isinstance(place, ConfigDict) else [prefix + key]
    return found


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
