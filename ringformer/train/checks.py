"""Checks of a run before it begins: its folders, the pool of host memory, its held-out data."""

import os
from collections.abc import Iterable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from ringformer.checkpoints.saved_model import model_of
from ringformer.data import Loader
from ringformer.files.run_layout import CONFIG, HF_CONFIG, METRICS
from ringformer.hardware import GiB
from ringformer.models.interface import ModelConfig
from ringformer.parallel.runtime_environment import HOST_POOL, host_pool, host_pool_needed
from ringformer.runs.config import Config


def check_folders(run_dir: Path, config: Config) -> None:
    """Raise ValueError if the run's folder or init_from holds a model that this run cannot continue.

    An init_from that does not exist yet, the folder of an earlier stage, is skipped.
    """
    if (run_dir / HF_CONFIG).exists() and not (run_dir / METRICS).exists():
        raise ValueError(f"run_dir={run_dir} is a converted model: name it with init_from, and choose another run_dir")
    here = config.model
    inherited = [name for name in here.INHERITED if name not in here.CONTEXT]
    advice = "leave out what the config changes of it, or choose another init_from"
    for folder, fields, what in (
        (run_dir, here.ARCHITECTURE, "choose another folder"),
        (config.init_from, (*here.ARCHITECTURE, *inherited), advice),
    ):
        begun = folder and (Path(folder) / CONFIG).is_file()
        if begun and (clash := _differences(model_of(folder), here, fields, "{} there, {} here")):
            raise ValueError(f"{folder} holds another model ({'; '.join(clash)}): {what}")


def context_changes(config: Config) -> list[str]:
    """List the changes to positional settings since the model that the run starts from, e.g. "rope_theta 10000 ->
    5e+07"."""
    return _differences(model_of(config.init_from), config.model, config.model.CONTEXT, "{} -> {}")


def _differences(there: ModelConfig, here: ModelConfig, fields: Iterable[str], form: str) -> list[str]:
    pairs = [(name, getattr(there, name, None), getattr(here, name)) for name in fields]  # None: another family
    return [f"{name} {form.format(_short(a), _short(b))}" for name, a, b in pairs if a != b]


def _short(value: Any) -> str:
    if is_dataclass(value):
        (_, kind), *options = vars(value).items()
        given = ", ".join(f"{k}={v:g}" for k, v in options if v is not None)
        return kind + (f"({given})" if given else "")
    return f"{value:g}" if isinstance(value, float) else str(value)


def check_host_pool(model: ModelConfig, tokens: int) -> None:
    """Raise ValueError if a GPU offloads more than the pool of host memory that XLA has in this environment.

    Args:
      tokens: tokens of a microbatch on each GPU.
    """
    if not hasattr(model, "offloaded_bytes"):
        return
    offloaded = model.offloaded_bytes(tokens)
    needed, pool = host_pool_needed(offloaded), host_pool(os.environ)
    if needed > pool:
        raise ValueError(
            f"model.offload keeps {offloaded / GiB:.1f} GiB of each GPU in host memory, for which XLA has a pool of "
            f"{pool} GiB per GPU: set {HOST_POOL}={needed} before the run starts (scripts/gpu_node.sh and "
            "scripts/slurm.sh do)"
        )


def count_batches(eval_batches: int, data: Loader) -> int:
    """Return the number of batches in an evaluation; raises ValueError if the held-out data do not fill a batch."""
    batches = min(eval_batches, data.sequences.per_epoch // data.batch_size)
    if batches == 0:
        raise ValueError(
            f"the held-out data has {data.sequences.per_epoch} sequences of {data.seq_len} tokens, fewer than "
            f"batch_size={data.batch_size}: raise data.held_out, or set it to 0 to train without evaluation"
        )
    return batches
