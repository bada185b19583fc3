"""Identity of a run: the values, in its config and in the files that the config names, that determine its numbers.

An identity is a flat dict from config keys (`optimizer.b1`) to JSON values. Files and folders are identified by their
contents: token stores by their fingerprints, the tokenizer by its name, the initial model by its checkpoint.

The value of a config's field is part of the identity, unless the field is in `RESOLVED`, `IN_STORE` or `HARMLESS`. For
a model's fields, the model family decides (fields in `EXECUTION` are harmless).
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
from ringformer.data.stores.options import StoreOptions
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
    parts = [name for name in PARTS if name != "lora" or config.lora.rank]
    for part, values in (("", config), *((f"{name}.", getattr(config, name)) for name in parts)):
        for field in dataclasses.fields(values):
            key = part + field.name
            if key not in RESOLVED | IN_STORE | HARMLESS | {"model", *PARTS}:
                identity[key] = getattr(values, field.name)
    optimizer = config.optimizer
    cosine = config.optimizer.schedule == "cosine"
    identity |= {  # with a constant rate, a run with more steps is the same run, only longer
        "steps": config.steps if cosine else None,
        "optimizer.final_fraction": optimizer.final_fraction if cosine else None,
        "optimizer.warmup_steps": optimizer.warmup_steps if cosine else optimizer.warmup(config.steps),
    }
    harmless, model = getattr(config.model, "EXECUTION", ()), dataclasses.asdict(config.model)  # type: ignore[call-overload]
    identity |= {f"model.{name}": value for name, value in model.items() if name not in harmless}
    if "attention" in harmless:  # all of ringformer's compute the same
        identity["model.attention"] = model["attention"] if model["attention"] in REGISTERED else "ring"
    identity |= stores_identity(config.data.store, config.data.mixture, config.data.held_out > 0)
    return json.loads(json.dumps(identity))


def stores_identity(store: str, mixture: str, held_out: bool) -> Identity:
    """Return `data.store` of an identity: the fingerprints of the train and held-out stores, in order, each with its
    share of a mixture. Return nothing if one of these stores is not built yet."""
    parts = parse_mixture(mixture) if mixture else [(store, 1)]
    splits = ("train", "eval") if held_out else ("train",)
    described = {split: [(Path(path, split, "store.json"), share) for path, share in parts] for split in splits}
    if not all(path.is_file() for paths in described.values() for path, _ in paths):
        return {}
    stores: dict[str, Any] = {"at": mixture or store}
    for split, paths in described.items():
        metas = [(read_meta(path), share) for path, share in paths]  # verified: a damaged store is not a different one
        stores[split] = [[identity_hash([meta["fingerprint"], meta["files"]]), share] for meta, share in metas]
    return {"data.store": stores}


def defaults() -> Identity:
    """Return the defaults of the keys that a run of an older version did not record."""
    parts: list[tuple[str, type]] = [("model.", family.config) for family in FAMILIES.values()]
    parts += [("", Config), *((f"{name}.", cls) for name, cls in PARTS.items())]
    return {
        part + field.name: field.default
        for part, cls in parts
        for field in dataclasses.fields(cls)
        if isinstance(field.default, int | float | str | None)
    }


def identity_hash(value: Any) -> str:
    """Return the hash of an identity, or of one of its values, as 32 hexadecimal digits; paths do not affect the
    hash."""
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
