"""What defines a run: the part of its config, and of what that names, that its numbers follow from.

An identity is a flat dict of keys as they are written in a config (`optimizer.b1`) and values as JSON has them. What is
named by a path is identified by its contents: token stores by their fingerprints, the tokenizer by its name, the model
that the run begins with by its checkpoint.

Every field of a config is in `DEFINES` or in `HARMLESS`, a model's in the classes that its family says (`EXECUTION` are
the harmless ones). A field that is in neither counts as defining.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from ringformer.checkpoints.saved_model import checkpoint_hash, latest_step
from ringformer.data import parse_mixture
from ringformer.data.stores.integrity import read_meta
from ringformer.files.run_layout import CHECKPOINTS
from ringformer.processes.agreement import tell_all
from ringformer.runs.config import Config, DataConfig, OptimizerConfig

Identity = dict[str, Any]

SAID_BYTES = 2**14
"""What a process tells the others of its identity: a digest for each of some sixty keys."""

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
        "optimizer.final_fraction",  # what the schedule makes of them
        "init_from",
        "data.tokenizer",
        "data.store",
        "data.mixture",  # what is there
    }
)
"""Keys that define a run by what they come to; `data.store` is of a mixture, too."""

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
"""Keys that the token stores were built by: compared with what these record when they are opened, and part of what
`data.store` comes to."""

HARMLESS = frozenset(
    {
        "run_dir",
        "preset",
        "stages",  # where it is; what the values came from
        "mesh_dim",
        "cpu_devices",
        "accumulate",  # how it is computed: the numbers differ by rounding alone
        "eval_every",
        "eval_batches",
        "tensorboard",
        "wandb",  # what is said of it
        "checkpoint_every",
        "checkpoint_minutes",  # when it is saved
        "keep_checkpoints",
        "keep_every",
        "keep_best",
        "copy_to",  # what is kept of it, and where
        "max_skipped_in_a_row",
        "debug_nans",  # when it stops
        "handshake_seconds",
        "startup_minutes",
        "compile_minutes",
        "step_minutes",  # when it is given up
    }
)
"""Keys that do not change a run."""


def run_identity(config: Config, tokenizer: str) -> Identity:
    """Return the identity of a run; without `data.store` if that is not built yet.

    Args:
      tokenizer: the name of the run's tokenizer.
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
    return json.loads(json.dumps(identity | store_identity(config.data)))


def defaults() -> Identity:
    """What a run of an older version was, of keys that were added since."""
    parts: tuple[tuple[str, type], ...] = (("", Config), ("data.", DataConfig), ("optimizer.", OptimizerConfig))
    return {
        part + field.name: field.default
        for part, cls in parts
        for field in dataclasses.fields(cls)
        if field.default is not dataclasses.MISSING
    }


def identity_hash(identity: Identity) -> str:
    """32 hexadecimal digits that stand for an identity; where things lie does not matter."""
    essence = {key: contents(value) for key, value in identity.items()}
    return _digest(essence)


def check_same_on_all(identity: Identity) -> None:
    """Raise ValueError, on all processes, if they are not of one run: a config names files, and those of two hosts may
    differ. A collective."""
    if jax.process_count() == 1:
        return
    mine = {key: _digest(contents(value))[:8] for key, value in identity.items()}
    first, *others = (json.loads(said) for said in tell_all(json.dumps(mine).encode(), SAID_BYTES))
    for index, other in enumerate(others, 1):
        if differs := sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key)):
            raise ValueError(
                f"process {index} has another {' and another '.join(differs)} than process 0: where a config names a "
                "file or a folder, all hosts must find the same in it"
            )


def contents(value: Any) -> Any:
    """A value of an identity without its path."""
    return {key: x for key, x in value.items() if key != "at"} if isinstance(value, Mapping) else value


def origin(init_from: str) -> dict[str, Any] | None:
    """The checkpoint that parameters come from; with its path alone if there is none there."""
    if not init_from:
        return None
    step = latest_step(init_from)
    if step is None:
        return {"at": init_from}
    return {"at": init_from, "step": step, "checkpoint": checkpoint_hash(Path(init_from, CHECKPOINTS, str(step)))}


def store_identity(data: DataConfig) -> Identity:
    """Return the fingerprints of the train and held-out stores, in their order and with their shares of a mixture, as
    `data.store`; nothing if a store is not built yet."""
    parts = parse_mixture(data.mixture) if data.mixture else [(data.store, 1)]
    stores: dict[str, Any] = {"at": data.mixture or data.store}
    for split in ("train", "eval") if data.held_out else ("train",):
        described = [Path(path, split, "store.json") for path, _ in parts]
        if not all(path.is_file() for path in described):
            return {}
        metas = [read_meta(path) for path in described]  # verified: a damaged store is not another one
        prints = [_digest([meta["fingerprint"], meta["files"]]) for meta in metas]
        stores[split] = [[fingerprint, share] for fingerprint, (_, share) in zip(prints, parts, strict=True)]
    return {"data.store": stores}


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
