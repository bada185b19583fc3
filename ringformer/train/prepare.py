"""A run before it begins: its configuration, checked, and what belongs to it."""

from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from ringformer.data import Loader, Tokenizer, TokenStore, check_vocabulary, load_tokenizer, open_mixture, open_or_build
from ringformer.data.loader import Parts
from ringformer.hardware import chip_of
from ringformer.models.interface import ModelConfig
from ringformer.models.kernel_choice import with_kernel
from ringformer.models.registry import check_mesh
from ringformer.parallel.mesh import BATCH, check_batch, make_mesh
from ringformer.parallel.parameters import weight_shardings
from ringformer.runs.config import Config
from ringformer.runs.identity import check_same_on_all, run_identity
from ringformer.runs.record import check_run
from ringformer.train.checks import check_folders, check_host_pool, check_platform
from ringformer.train.evaluation import count_batches
from ringformer.train.optimizer import make_optimizer
from ringformer.train.state import TrainState, decayed, state_shardings


class Run(NamedTuple):
    """A checked configuration and what belongs to it; nothing is compiled yet."""

    config: Config
    run_dir: Path
    mesh: Mesh
    tokenizer: Tokenizer
    train_data: Loader
    eval_data: Loader | None
    optimizer: optax.GradientTransformation
    shardings: TrainState
    model: ModelConfig
    """The config's, with the kernel and the chunks that these devices compute it with."""
    kernel: str
    """Which kernel that is, and why; empty for a family that has no choice."""
    allow: frozenset[str] = frozenset()
    """Keys of the config that may have changed since the run was begun."""

    @property
    def stores(self) -> list[TokenStore]:
        """All stores that are trained or evaluated on."""
        return [store for data in (self.train_data, self.eval_data) if data for store in data.stores]

    @property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, BATCH)


def prepare(config: Config, allow: Collection[str] = (), *, anew: bool = False) -> Run:
    """Check the configuration against devices, data and tokenizer; raise ValueError naming what clashes.

    Args:
      allow: keys that may have changed since the run in `config.run_dir` was begun (`record.check_run`).
      anew: what is in `config.run_dir` will be set aside before the run.
    """
    run_dir = Path(config.run_dir or _new_run_dir())
    check_folders(run_dir, config)  # first: the rest may take hours
    mesh = make_mesh(config.mesh_dim)
    check_mesh(config.model, mesh)
    check_batch(config.model, mesh, config.seq_len, config.batch_size, config.accumulate)
    device = mesh.devices.flat[0]
    chip = chip_of(device.device_kind)
    check_platform(config.model, device.platform, chip, config.data.has_segments)
    check_host_pool(config, mesh)
    tokenizer = load_tokenizer(config.data.tokenizer)
    check_vocabulary(tokenizer, config.model.vocab_size)
    if not anew:
        check_run(run_dir, config, tokenizer.name, allow)  # before a store is built
    d = config.data
    train_store: TokenStore | Parts
    eval_store: TokenStore | Parts | None
    if d.mixture:
        train_store, eval_store = open_mixture(d.mixture, tokenizer.name, held_out=d.held_out > 0)
    else:
        train_store, eval_store = open_or_build(d.store, d, tokenizer)
    optimizer = make_optimizer(config.optimizer, config.steps, decayed(config.model))
    shardings = state_shardings(weight_shardings(config.model, mesh), optimizer)
    train_data = _loader(train_store, config, mesh, config.seed)
    eval_data = _loader(eval_store, config, mesh, seed=0) if eval_store else None
    local_tokens, masks = config.seq_len // mesh.shape["sp"], config.data.has_segments
    model, kernel = with_kernel(config.model, device.platform, chip, local_tokens, masks)
    run = Run(
        config, run_dir, mesh, tokenizer, train_data, eval_data, optimizer, shardings, model, kernel, frozenset(allow)
    )
    if not anew:
        check_run(run_dir, config, tokenizer.name, allow)  # with the stores
    check_same_on_all(run_identity(config, tokenizer.name))
    for store in run.stores:
        store.check_ids(model.vocab_size)
    count_batches(config, run.eval_data)
    return run


def _loader(store: TokenStore | Parts, config: Config, mesh: Mesh, seed: int) -> Loader:
    return Loader(
        store,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        seed=seed,
        layout=config.model.layout,
        ring_size=mesh.shape["sp"],
        packing=config.data,
    )


def _new_run_dir() -> str:
    if jax.process_count() > 1:
        raise ValueError("several processes need one folder: name it, e.g. --config.run_dir=/shared/runs/mine")
    return f"runs/{datetime.now():%Y%m%d-%H%M%S}"
