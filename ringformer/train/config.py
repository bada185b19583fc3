"""The configuration of a run: `ml_collections` files outside, frozen and validated dataclasses inside.

A config file's `get_config()` starts from `base_config(model)`, which has every key there is, with its default.
`parse` turns the result into a `Config` at the door; nothing past it reads a ConfigDict.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from ml_collections import ConfigDict, config_dict

from ringformer.models.llama import LlamaConfig
from ringformer.models.presets import preset


@dataclass(frozen=True)
class DataConfig:
    """Where documents come from; see `ringformer.data`."""

    store: str = ""
    """The folder of the token stores; built from `source` by the first run."""
    source: str = "stdlib"
    """stdlib, text:PATTERN, jsonl:PATTERN, json:PATTERN, parquet:PATTERN or datasets:NAME_OR_PATH."""
    field: str = "text"
    split: str = "train"
    tokenizer: str = "bytes"
    """bytes, or the path of a SentencePiece .model file, a tokenizer.json or a folder with one of them."""
    held_out: float = 0.05
    """The share of documents kept for evaluation."""
    skip_empty: bool = False
    format: str = "documents"
    """documents, or conversations as sharegpt or messages: then only answers are trained on."""
    template: str = "vicuna"
    """Of conversations: vicuna, llama2, llama3, or tokenizer for the tokenizer's own."""
    max_length: int = 0
    """Conversations of more tokens are split between turns; 0: never."""
    clean: str = "html,unprintable,duplicate"
    """Rules for conversations (ringformer/data/clean.py)."""
    skip_malformed: bool = False
    """Leave conversations out that cannot be read, and count them."""

    def __post_init__(self):
        if not self.store:
            raise ValueError("data.store is empty: name the token store's folder, e.g. --config.data.store=runs/data")
        if not 0.0 <= self.held_out < 1.0:
            raise ValueError(f"data.held_out={self.held_out} must be in [0, 1)")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter) with a warm-up; vectors are not decayed."""

    learning_rate: float = 3e-4
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = 100
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
        if self.clip_norm <= 0:
            raise ValueError(f"optimizer.clip_norm={self.clip_norm} must be positive")


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
    """Begin with the parameters of the latest checkpoint of this run directory, e.g. to go on at a longer context."""
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
    """Steps between checkpoints; 0: at the end only."""
    keep_checkpoints: int = 2
    tensorboard: bool = False
    """Also write TensorBoard event files (pip install ringformer[tensorboard])."""
    wandb: str = ""
    """Also log to this Weights & Biases project (pip install ringformer[wandb])."""

    def __post_init__(self):
        for field in ("seq_len", "batch_size", "accumulate", "steps", "eval_batches", "keep_checkpoints"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        if self.optimizer.warmup_steps >= self.steps:
            warmup = self.optimizer.warmup_steps
            raise ValueError(f"optimizer.warmup_steps={warmup} must be less than steps={self.steps}")


def base_config(model: str) -> ConfigDict:
    """Every key of a run with its default, and the architecture of a preset; locked against new keys."""
    config = ConfigDict(_defaults(Config))
    for part, cls in (("model", LlamaConfig), ("data", DataConfig), ("optimizer", OptimizerConfig)):
        config[part] = ConfigDict(_defaults(cls) | (preset(model) if cls is LlamaConfig else {}))
    return config.lock()


def parse(config: ConfigDict) -> Config:
    """The validated dataclass of a config. Raises ValueError for a value that cannot be."""
    values = config.to_dict()
    parts = {"model": LlamaConfig, "data": DataConfig, "optimizer": OptimizerConfig}
    return Config(**{k: parts[k](**v) if k in parts else v for k, v in values.items()})


def _defaults(cls) -> dict[str, Any]:
    """The fields of a dataclass that have a default; None (an optional int) becomes a placeholder, so that
    a flag can set it."""
    return {
        f.name: config_dict.placeholder(int) if f.default is None else f.default
        for f in dataclasses.fields(cls)
        if f.default is not dataclasses.MISSING
    }
