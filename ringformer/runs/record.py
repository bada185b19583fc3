"""Record of a run's identity, kept in the run's folder and compared with the config before the run writes anything
again.

    RUN_DIR/identity.json    the run's identity (`identity.py`), and the step of a checkpoint that once existed
    RUN_DIR/changes.jsonl    intended changes, one JSON object per line: the step they apply from, old and new values

A run without a checkpoint begins anew, with its current config.
"""

import dataclasses
import difflib
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ringformer.checkpoints.saved_model import latest_step, model_of
from ringformer.files.atomic import append_line, write_object
from ringformer.files.run_layout import CHANGES, CHECKPOINTS, CONFIG, IDENTITY, METRICS
from ringformer.files.untrusted import read_object
from ringformer.runs.config import PARTS, Config
from ringformer.runs.identity import Identity, contents, defaults, identity_hash, keys_of, run_identity
from ringformer.runs.metrics import read_metrics

Changes = Mapping[str, tuple[Any, Any]]
"""Old and new value of each key that differs."""


FIXED = frozenset({"lora.rank", "lora.targets", "optimizer.name"})
"""Keys that cannot be allowed to change, because a checkpoint has other arrays then."""


class RunChanged(ValueError):
    """The config differs from the run in its folder; `keys` are the keys to allow."""

    def __init__(self, run_dir: str | Path, changes: str, keys: Collection[str]):
        advice = f"undo the change, or continue the run with --allow={','.join(keys)}"
        if any(key in FIXED for key in keys):
            advice = "or undo the change"
        super().__init__(f"{run_dir} holds a different run: {changes}. Choose another run_dir, {advice}")
        self.run_dir = run_dir
        self.changes = changes
        self.keys: list[str] = list(keys)


class Checked(NamedTuple):
    """Result of comparing a run's folder with a config."""

    step: int | None = None
    """Step of its latest checkpoint."""
    changes: Changes = MappingProxyType({})
    """Differences between the config and the run, all of them allowed."""


def check_run(run_dir: Path, identity: Identity, steps: int, allow: Collection[str] = ()) -> Checked:
    """Compare the run in `run_dir` with `identity`. A run without a checkpoint begins anew and has no changes.

    Args:
      steps: number of steps in the config.
      allow: keys that may have changed.

    Raises:
      RunChanged: other keys changed.
      ValueError: the run has metrics but its checkpoints are gone (beginning anew would drop the metrics), or the run
        is already beyond `steps`.
    """
    step = latest_step(run_dir)
    if step is None:
        rows = [row for row in read_metrics(run_dir / METRICS) if row["step"] > 0]
        saved = (run_dir / IDENTITY).is_file() and _read(run_dir)["saved"] is not None
        if rows and (saved or not (run_dir / CHECKPOINTS).is_dir()):
            raise ValueError(
                f"{run_dir / METRICS} goes up to step {rows[-1]['step']}, but there is no checkpoint in "
                f"{run_dir / CHECKPOINTS}: restore the checkpoints, choose another run_dir, or delete metrics.jsonl to "
                "begin anew"
            )
        return Checked()
    changes = _changes(recorded(run_dir, identity["data.tokenizer"]), identity)
    allowed = set(allow)
    if "data.mixture" in allowed:
        allowed.add("data.store")
    if changes.keys() - allowed or changes.keys() & FIXED:
        raise RunChanged(run_dir, describe(changes), list(changes))
    if step > steps:
        raise ValueError(f"{run_dir} is at step {step}, beyond steps={steps}: choose another run_dir")
    return Checked(step, changes)


def describe(changes: Changes) -> str:
    """Return the changes in words."""
    return "; ".join(f"{key} {_shown(old)} -> {_shown(new)}" for key, (old, new) in changes.items())


def recorded(run_dir: str | Path, tokenizer: str = "") -> Identity:
    """Return the identity of the run in a folder; if an older version wrote the folder, it is derived from config.json.

    Raises ValueError if the folder has neither.
    """
    run_dir = Path(run_dir)
    if (run_dir / IDENTITY).is_file():
        return {**defaults(), **_read(run_dir)["identity"]}
    if not (run_dir / CONFIG).is_file():
        raise ValueError(
            f"{run_dir} has checkpoints, but neither {IDENTITY} nor config.json, which identify the run: "
            "restore one of them, or choose another run_dir"
        )
    saved = read_object(run_dir, CONFIG)
    values = _known(Config, saved)
    for part, cls in PARTS.items():
        values[part] = cls(**_known(cls, saved.get(part, {})))
    values["model"] = model_of(run_dir)
    return run_identity(Config(**values), tokenizer)


def keep_record(run_dir: Path, identity: Identity, step: int | None, changes: Changes) -> None:
    """Record the run's identity as of `step` (None: from the start)."""
    if step is not None:
        before = recorded(run_dir, identity["data.tokenizer"])
        identity = dict(identity)
        for key, value in identity.items():
            if _unknown(value):
                identity[key] = before.get(key, value)
    if changes:
        append_line(run_dir / CHANGES, json.dumps({"step": step, "changes": dict(changes)}))
    _write(run_dir, identity, step)


def note_saved(run_dir: Path) -> None:
    """Record that the run has a checkpoint, if it has one. If the run has none later, its checkpoints were lost."""
    step = latest_step(run_dir)
    if step is None or not (run_dir / IDENTITY).is_file():
        return
    record = _read(run_dir)
    if record["saved"] is None:
        _write(run_dir, record["identity"], step)


def set_aside(run_dir: Path) -> Path:
    """Rename a run's folder so that the run can begin anew; return the new path."""
    number = 1
    while (aside := run_dir.with_name(f"replaced-{number}-{run_dir.name}")).exists():
        number += 1
    return run_dir.rename(aside)


def _write(run_dir: Path, identity: Identity, saved: int | None) -> None:
    record = {"identity": identity, "hash": identity_hash(identity), "saved": saved}
    write_object(run_dir / IDENTITY, record)


def _read(run_dir: Path) -> dict[str, Any]:
    advice = "restore it, or delete it to compare the run with its config.json instead"
    record = read_object(run_dir, IDENTITY, advice)
    if not {"identity", "saved"} <= record.keys() or type(record["identity"]) is not dict:
        raise ValueError(f"{run_dir / IDENTITY} does not identify the run; {advice}")
    return record


def _changes(old: Identity, new: Identity) -> Changes:
    """Return the keys that changed or are new. If a path no longer exists, only the path itself is compared."""
    changes: dict[str, tuple[Any, Any]] = {}
    for key, value in new.items():
        before = old.get(key)
        if key == "data.store" and key not in old:
            continue  # recorded by an older version whose store is gone
        same_path = _unknown(value) and isinstance(before, Mapping) and before.get("at") == value["at"]
        if not same_path and contents(before) != contents(value):
            changes[key] = before, value
    return changes


def _unknown(value: Any) -> bool:
    """Return True for a path that does not exist."""
    return isinstance(value, Mapping) and value.keys() == {"at"}


def _known(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values}


def check_keys(config: Config, allow: Collection[str]) -> None:
    """Raise ValueError for a key in `allow` that no config has."""
    keys = list(keys_of(Config, ""))
    for part in (*PARTS, "model"):
        keys += keys_of(type(getattr(config, part)), part)
    for key in allow:
        if key not in keys and not re.fullmatch(r"stage-[1-9]\d*", key):
            near = difflib.get_close_matches(key, keys, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"--allow={key}: there is no such key{hint}")


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) and "at" in value:
        return _shown_path(value)
    if isinstance(value, Mapping):
        return str({key: x for key, x in value.items() if x is not None})
    return "unset" if value is None else str(value)


def _shown_path(value: Mapping[str, Any]) -> str:
    """Return a path, with the hashes of its contents."""
    details = []
    for split in ("train", "eval"):
        for digest, _ in value.get(split, ()):
            details.append(digest[:8])
    if "checkpoint" in value:
        details.append(value["checkpoint"][:8])
    if not details:
        return str(value["at"])
    if "step" in value:
        details.insert(0, f"step {value['step']}")
    return f"{value['at']} ({', '.join(details)})"
