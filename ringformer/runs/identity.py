"""Identity of a run: the values, in its config and in the files that the config names, that determine its numbers.

An identity is a flat dict from config keys (`optimizer.b1`) to JSON values. Files and folders are identified by their
contents: token stores by their fingerprints, the tokenizer by its name, the initial model by its checkpoint.

Every field of a config is in `DEFINES` or in `HARMLESS`. For a model's fields, the model family decides (fields in
`EXECUTION` are harmless). A field in neither set counts as defining.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringformer.checkpoints.saved_model import checkpoint_hash, latest_step
from ringformer.data import parse_mixture
from ringformer.data.stores.integrity import read_meta
from ringformer.files.run_layout import CHECKPOINTS
from ringformer.processes.agreement import from_all
from ringformer.runs.config import Config, DataConfig, OptimizerConfig

Identity = dict[str, Any]

DEFINES = frozenset(
    {
        "seq_len",
        "batch_size",
        "seed",
        "data.packing",
        "data.packed_attention",
        "data.min_length",
        "data.max_length",
        "optimizer.learning_rate",
        "optimizer.schedule",
        "optimizer.b1",
        "optimizer.b2",
        "optimizer.eps",
        "optimizer.weight_decay",
        "optimizer.clip_norm",
        "optimizer.skip_spikes",
    }
)
"""Keys whose values are compared as they are."""

RESOLVED = frozenset(
    {
        "steps",
        "optimizer.warmup_steps",
        "optimizer.final_fraction",  # resolved by the schedule
        "init_from",
        "data.tokenizer",
        "data.store",
        "data.mixture",  # resolved by contents
    }
)
"""Keys that define a run by the values that the keys resolve to; `data.store` also stands for a mixture."""

IN_STORE = frozenset(
    {
        "data.source",
        "data.field",
        "data.split",
        "data.skip_empty",
        "data.held_out",
        "data.format",
        "data.template",
        "data.chat_length",
        "data.chat_date",
        "data.clean",
        "data.skip_malformed",
        "data.max_document_bytes",
    }
)
"""Keys that the token stores were built with. They are compared with the stores' records when the stores are opened,
and are part of the value that `data.store` resolves to."""

HARMLESS = frozenset(
    {
        "run_dir",
        "preset",
        "stages",  # location, and origin of the values
        "mesh_dim",
        "cpu_devices",
        "accumulate",  # execution: numbers differ only by rounding
        "eval_every",
        "eval_batches",
        "tensorboard",
        "wandb",  # reports
        "checkpoint_every",
        "checkpoint_minutes",  # times of saves
        "keep_checkpoints",
        "keep_every",
        "keep_best",
        "copy_to",  # checkpoints kept, and copies
        "max_skipped_in_a_row",
        "debug_nans",  # conditions that stop it
        "handshake_seconds",
        "startup_minutes",
        "compile_minutes",
        "step_minutes",  # time limits
    }
)
"""Keys that do not change a run."""


def run_identity(config: Config, tokenizer: str) -> Identity:
    """Return the identity of a run; without `data.store` if a token store is not built yet.

    `data.store` has the fingerprints of the train and held-out stores, in order and with their shares of a mixture.

    Args:
      tokenizer: name of the run's tokenizer.
    """
    identity: Identity = {"data.tokenizer": tokenizer, "init_from": origin(config.init_from)}
    for part, values in (("", config), ("data.", config.data), ("optimizer.", config.optimizer)):
        for field in dataclasses.fields(values):
            key = part + field.name
            if key not in RESOLVED | IN_STORE | HARMLESS | {"model", "data", "optimizer"}:
                identity[key] = getattr(values, field.name)
    optimizer, cosine = config.optimizer, config.optimizer.schedule == "cosine"
    identity |= {  # with a constant rate a run of more steps is the same run, longer
        "steps": config.steps if cosine else None,
        "optimizer.final_fraction": optimizer.final_fraction if cosine else None,
        "optimizer.warmup_steps": optimizer.warmup_steps if cosine else optimizer.warmup(config.steps),
    }
    harmless, model = getattr(config.model, "EXECUTION", ()), dataclasses.asdict(config.model)  # type: ignore[call-overload]
    identity |= {f"model.{name}": value for name, value in model.items() if name not in harmless}
    data = config.data
    parts = parse_mixture(data.mixture) if data.mixture else [(data.store, 1)]
    splits = ("train", "eval") if data.held_out else ("train",)
    described = {split: [Path(path, split, "store.json") for path, _ in parts] for split in splits}
    if all(path.is_file() for paths in described.values() for path in paths):
        stores: dict[str, Any] = {"at": data.mixture or data.store}
        for split, paths in described.items():
            metas = [read_meta(path) for path in paths]  # verified: a damaged store is not a different one
            prints = [identity_hash([meta["fingerprint"], meta["files"]]) for meta in metas]
            stores[split] = [[fingerprint, share] for fingerprint, (_, share) in zip(prints, parts, strict=True)]
        identity["data.store"] = stores
    return json.loads(json.dumps(identity))


def defaults() -> Identity:
    """Return the defaults of the keys that a run of an older version did not record."""
    parts: tuple[tuple[str, type], ...] = (("", Config), ("data.", DataConfig), ("optimizer.", OptimizerConfig))
    return {
        part + field.name: field.default
        for part, cls in parts
        for field in dataclasses.fields(cls)
        if field.default is not dataclasses.MISSING
    }


def identity_hash(value: Any) -> str:
    """Return the hash of an identity, or of one of its values, as 32 hexadecimal digits; paths do not affect it."""
    text = json.dumps(contents(value), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def check_same_on_all(identity: Identity) -> None:
    """Raise ValueError on all processes if their identities differ: files at the same path may differ between hosts.

    A collective.
    """
    mine = {key: identity_hash(value)[:8] for key, value in identity.items()}
    first, *others = from_all(mine)
    for index, other in enumerate(others, 1):
        if differs := sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key)):
            raise ValueError(
                f"process {index} has another {' and another '.join(differs)} than process 0: a file or folder that "
                "the config names must have the same contents on all hosts"
            )


def contents(value: Any) -> Any:
    """Return an identity, or one of its values, without the paths."""
    if not isinstance(value, Mapping):
        return value
    return {key: contents(x) for key, x in value.items() if key != "at"}


def origin(init_from: str) -> dict[str, Any] | None:
    """Return the path, step and hash of the checkpoint that parameters come from; if there is no checkpoint, return
    only the path."""
    if not init_from:
        return None
    step = latest_step(init_from)
    if step is None:
        return {"at": init_from}
    return {"at": init_from, "step": step, "checkpoint": checkpoint_hash(Path(init_from, CHECKPOINTS, str(step)))}
