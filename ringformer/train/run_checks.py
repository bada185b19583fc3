"""What must be true of a run: of the folders it begins with, of its batches, of the state it keeps."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ringformer.models.llama import LlamaConfig
from ringformer.ops.rope import RopeScaling
from ringformer.train.checkpoints import HF_CONFIG
from ringformer.train.config import ARCHITECTURE, INHERITED, Config, model_of

PATIENCE = 100
"""So many batches in a row without a trained token, or without a masked one in chats, are no chance."""


def check_folders(run_dir: Path, config: Config) -> None:
    """Raise ValueError if the run's folder holds another model's run, or init_from a model that cannot go on as this.

    A folder of init_from that is not there yet, an earlier stage's, is passed over.
    """
    if strange := sorted(set(str(run_dir.absolute())) & set("[]*?")):
        raise ValueError(
            f"run_dir={run_dir.absolute()} has {' '.join(strange)} in it, which the checkpoint library takes for a "
            "pattern, so that nothing saved there is found again: choose a path without it"
        )
    if (run_dir / HF_CONFIG).exists() and not (run_dir / "metrics.jsonl").exists():
        raise ValueError(f"run_dir={run_dir} is a converted model: name it with init_from, and another run_dir")
    # A run goes on with its own rope; another run may take the parameters with a new one.
    for folder, fields in ((run_dir, ARCHITECTURE + INHERITED), (config.init_from, (*ARCHITECTURE, "norm_eps"))):
        if folder and (Path(folder) / "config.json").is_file():
            clash = _differences(model_of(folder), config.model, fields, "{} there, {} here")
            if clash:
                raise ValueError(f"{folder} holds a run of another model ({'; '.join(clash)}): choose another folder")


def rope_changes(config: Config) -> list[str]:
    """What of the rope is not as in the model that the run begins with, as "rope_theta 10000 -> 5e+07"."""
    if not config.init_from:
        return []
    return _differences(model_of(config.init_from), config.model, ("rope_theta", "rope_scaling"), "{} -> {}")


def _differences(there: LlamaConfig, here: LlamaConfig, fields: tuple[str, ...], form: str) -> list[str]:
    pairs = [(name, getattr(there, name), getattr(here, name)) for name in fields]
    return [f"{name} {form.format(_short(a), _short(b))}" for name, a, b in pairs if a != b]


def _short(value: Any) -> str:
    if isinstance(value, RopeScaling):
        given = {k: v for k, v in vars(value).items() if k != "kind" and v is not None}
        return value.kind + (f"({', '.join(f'{k}={v:g}' for k, v in given.items())})" if given else "")
    return f"{value:g}" if isinstance(value, float) else str(value)


class BatchWatch:
    """Counts the batches without a token to train on and, in chats, those without a masked one.

    Either may happen: a context of a long document's chat is all question, or all answer. `PATIENCE` in a row are a
    store that was made wrong.
    """

    def __init__(self, chats: bool):
        self._kinds = {"no token to train on": "trained_tokens"}
        if chats:
            self._kinds["no question that is masked"] = "masked_tokens"
        self.counts = dict.fromkeys(self._kinds, 0)
        self._in_a_row = dict.fromkeys(self._kinds, 0)

    def see(self, step: int, values: dict[str, Any]) -> list[str]:
        """Count a step's batch; returns what there is to say of it. Raises ValueError after `PATIENCE` in a row."""
        said = []
        for kind, name in self._kinds.items():
            self._in_a_row[kind] = 0 if values[name] else self._in_a_row[kind] + 1
            if values[name]:
                continue
            self.counts[kind] += 1
            if self._in_a_row[kind] == PATIENCE:
                raise ValueError(
                    f"{PATIENCE} batches in a row, up to step {step}, have {kind}: look at what is trained on with "
                    "`ringformer data inspect`, at the chat template and the roles, and rebuild the store"
                )
            if self.counts[kind] == 1:
                said.append(f"the batch of step {step} has {kind}; such batches are counted")
        return said

    def summary(self, steps: int) -> list[str]:
        """What there is to say after so many steps."""
        return [f"{count} of {steps} batches had {kind}" for kind, count in self.counts.items() if count]


def check_metrics_finite(step: int, metrics: dict[str, float]) -> None:
    """Raise FloatingPointError if the loss or the gradient of a step is not finite."""
    for name, of in (("loss", "loss"), ("grad_norm", "gradient's norm")):
        if not math.isfinite(metrics[name]):
            raise FloatingPointError(
                f"the {of} of step {step} is {metrics[name]}: nothing after it is saved. Lower the learning rate, or "
                "look at the batch; the same command goes on from the latest checkpoint"
            )


def check_state_finite(state, which: str) -> None:
    """Raise FloatingPointError if any number of the state is not finite; `which` completes "the state"."""
    if not bool(_all_finite(state)):
        raise FloatingPointError(f"numbers that are not finite are in the state {which}; it is not saved")


@jax.jit
def _all_finite(tree) -> jax.Array:
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()
