"""Identity of a run: the values, in its config and in the files that the config names, that determine its numbers.

An identity is a flat dict from config keys (`optimizer.b1`) to JSON values. Files and folders are identified by their
contents: token stores by their fingerprints, the tokenizer by its name, the initial model by its checkpoint.

The value of a config's field is part of the identity, unless the field is in `RESOLVED`, `IN_STORE` or `HARMLESS`. For
a model's fields, the model family decides (fields in `EXECUTION` are harmless).
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringformer.checkpoints.saved_model import checkpoint_hash, latest_step
from ringformer.data import parse_mixture
from ringformer.data.stores.integrity import read_meta
from ringformer.data.stores.options import StoreOptions
from ringformer.files.hashes import content_hash
from ringformer.files.run_layout import CHECKPOINTS
from ringformer.models.own_attention import REGISTERED
from ringformer.models.registry import FAMILIES
from ringformer.processes.agreement import from_all
from ringformer.runs.config import PARTS, Config

Identity = dict[str, Any]

RESOLVED = frozenset(
    {
        "steps",
        "optimizer.warmup_steps",
        "optimizer.final_fraction",  # resolved by the schedule
        "optimizer.moment_dtype",  # resolved to one dtype, or one for each moment
        "init_from",
        "data.tokenizer",
        "data.store",
        "data.mixture",  # resolved by contents
    }
)
"""Keys that are part of the identity with the values that they resolve to; `data.store` also stands for a mixture."""

IN_STORE = frozenset(f"data.{field.name}" for field in dataclasses.fields(StoreOptions)) - RESOLVED
"""Keys that the token stores were built with. They are compared with the stores' records when the stores are opened,
and are part of the value that `data.store` resolves to."""

HARMLESS = frozenset(
    {
        "run_dir",
        "preset",
        "stages",  # location, and origin of the values
        "mesh_dim",
        "cpu_devices",
        "optimizer.offload",
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
    """Return the identity of a run; without `data.store` if a token store is not built yet (`stores_identity`).

    Args:
      tokenizer: name of the run's tokenizer.
    """
    identity: Identity = {"data.tokenizer": tokenizer, "init_from": origin(config.init_from)}
    identity["lora.rank"] = config.lora.rank
    elsewhere = RESOLVED | IN_STORE | HARMLESS | {"model", *PARTS}
    for part in ("", *PARTS):
        if part == "lora" and not config.lora.rank:
            continue
        values = getattr(config, part) if part else config
        for key, field in keys_of(type(values), part).items():
            if key not in elsewhere:
                identity[key] = getattr(values, field.name)
    optimizer = config.optimizer
    kinds = sorted(set(optimizer.moment_dtypes))
    identity["optimizer.moment_dtype"] = kinds[0] if len(kinds) == 1 else ",".join(optimizer.moment_dtypes)
    if optimizer.schedule == "cosine":
        identity["steps"] = config.steps
        identity["optimizer.final_fraction"] = optimizer.final_fraction
        identity["optimizer.warmup_steps"] = optimizer.warmup_steps
    else:  # with a constant rate, a run with more steps is the same run, only longer
        identity["steps"] = None
        identity["optimizer.final_fraction"] = None
        identity["optimizer.warmup_steps"] = optimizer.warmup(config.steps)
    harmless = getattr(config.model, "EXECUTION", ())
    model = dataclasses.asdict(config.model)  # type: ignore[call-overload]
    for name, value in model.items():
        if name not in harmless:
            identity[f"model.{name}"] = value
    if "attention" in harmless:  # all of ringformer's compute the same
        identity["model.attention"] = model["attention"] if model["attention"] in REGISTERED else "ring"
    identity |= stores_identity(config.data.store, config.data.mixture, config.data.held_out > 0)
    return json.loads(json.dumps(identity))


def stores_identity(store: str, mixture: str, held_out: bool) -> Identity:
    """Return `data.store` of an identity: the fingerprints of the train and held-out stores, in order, each with its
    share of a mixture. Return nothing if one of these stores is not built yet."""
    parts = parse_mixture(mixture) if mixture else [(store, 1)]
    splits = ("train", "eval") if held_out else ("train",)
    for split in splits:
        if not all(Path(path, split, "store.json").is_file() for path, _ in parts):
            return {}
    stores: dict[str, Any] = {"at": mixture or store}
    for split in splits:
        stores[split] = []
        for path, share in parts:
            meta = read_meta(Path(path, split, "store.json"))  # verified: a damaged store is not a different one
            stores[split].append([store_hash(meta), share])
    return {"data.store": stores}


def store_hash(meta: Mapping[str, Any]) -> str:
    """Return the hash of a token store's contents, given its store.json."""
    return identity_hash([meta["fingerprint"], meta["files"]])


def defaults() -> Identity:
    """Return the defaults of the keys that a run of an older version did not record."""
    fields = dict[str, dataclasses.Field[Any]]()
    for family in FAMILIES.values():
        fields |= keys_of(family.config, "model")
    for part, cls in {"": Config, **PARTS}.items():
        fields |= keys_of(cls, part)
    values: Identity = {}
    for key, field in fields.items():
        if isinstance(field.default, int | float | str | None):
            values[key] = field.default
    return values


def keys_of(cls: type, part: str) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a part of a config, by key; "" is the config itself."""
    prefix = f"{part}." if part else ""
    return {prefix + field.name: field for field in dataclasses.fields(cls)}


def identity_hash(value: Any) -> str:
    """Return the hash of an identity, or of one of its values, as 32 hexadecimal digits; paths do not affect the
    hash."""
    text = json.dumps(contents(value), sort_keys=True)
    return content_hash(text.encode())


def check_same_on_all(identity: Identity) -> None:
    """Raise ValueError on all processes if their identities differ: files at the same path may differ between hosts.

    A collective.
    """
    mine = {key: identity_hash(value)[:8] for key, value in identity.items()}
    first, *others = from_all(mine)
    for index, other in enumerate(others, 1):
        keys = first.keys() | other.keys()
        differs = sorted(key for key in keys if first.get(key) != other.get(key))
        if differs:
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
