"""A run before it begins: its configuration, checked, and what belongs to it."""

from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import jax

from ringformer.checkpoints.saved_model import restore_params
from ringformer.data import Loader, Tokenizer, TokenStore, check_vocabulary, load_tokenizer, open_mixture, open_or_build
from ringformer.data.loader import Parts
from ringformer.files.run_layout import CHECKPOINTS
from ringformer.hardware import chip_of
from ringformer.models.kernel_choice import with_kernel
from ringformer.models.registry import check_mesh
from ringformer.parallel.mesh import check_batch, make_mesh
from ringformer.runs.config import Config
from ringformer.runs.identity import Identity, check_same_on_all, run_identity, store_identity
from ringformer.runs.record import Checked, check_keys, check_run
from ringformer.train.checks import check_folders, check_host_pool, count_batches
from ringformer.train.program import Program, make_program
from ringformer.train.state import TrainState, first_state, init_state


class Run(NamedTuple):
    """A checked configuration and what belongs to it; nothing is compiled yet."""

    config: Config
    run_dir: Path
    program: Program
    kernel: str
    """The kernel that these devices compute attention with, and why; empty for a family that has no choice."""
    tokenizer: Tokenizer
    train_data: Loader
    eval_data: Loader | None
    identity: Identity
    checked: Checked
    """The folder, compared with the configuration."""
    allow: frozenset[str] = frozenset()
    """Keys of the config that may have changed since the run was begun."""

    @property
    def stores(self) -> list[TokenStore]:
        """All stores that are trained or evaluated on."""
        return [store for data in (self.train_data, self.eval_data) if data for store in data.stores]

    def first_state(self) -> TrainState:
        """Return a state drawn from the seed; with the parameters of another run, if the config names one."""
        source, program = self.config.init_from, self.program
        if not source:
            return init_state(program.model, program.optimizer, program.shardings, program.mesh, self.config.seed)
        params = restore_params(source, program.shardings.params, program.mesh)
        return first_state(params, program.optimizer, program.shardings, program.mesh)

    def origin(self, start: int | None) -> str:
        """Describe where the first state comes from, and what to do if it is not finite."""
        if start:
            folder = self.run_dir / CHECKPOINTS / str(start)
            return f"of {folder}, which is damaged: delete that folder to go on from the checkpoint before"
        return f"of init_from={self.config.init_from}" if self.config.init_from else "that the seed gave"


def prepare(config: Config, allow: Collection[str] = (), *, anew: bool = False) -> Run:
    """Check the configuration against devices, data and tokenizer; raise ValueError naming what clashes.

    Args:
      allow: keys that may have changed since the run in `config.run_dir` was begun (`record.check_run`).
      anew: what is in `config.run_dir` will be set aside before the run.
    """
    run_dir = Path(config.run_dir or _new_run_dir())
    check_folders(run_dir, config)  # first: the rest may take hours
    if allow:
        check_keys(config, allow)
    mesh = make_mesh(config.mesh_dim)
    check_mesh(config.model, mesh)
    check_batch(config.model.layout, mesh, config.seq_len, config.batch_size, config.accumulate)
    device, local_tokens = mesh.devices.flat[0], config.seq_len // mesh.shape["sp"]
    chip = chip_of(device.device_kind)
    model, kernel = with_kernel(config.model, device.platform, chip, local_tokens, config.data.has_segments)
    check_host_pool(model, mesh, config.seq_len * config.batch_size // config.accumulate)
    tokenizer = load_tokenizer(config.data.tokenizer)
    check_vocabulary(tokenizer, model.vocab_size)
    identity = run_identity(config, tokenizer.name)
    checked = Checked() if anew else check_run(run_dir, identity, config.steps, allow)  # before a store is built
    train_store: TokenStore | Parts
    eval_store: TokenStore | Parts | None
    if config.data.mixture:
        train_store, eval_store = open_mixture(config.data.mixture, tokenizer.name, held_out=config.data.held_out > 0)
    else:
        train_store, eval_store = open_or_build(config.data.store, config.data, tokenizer)
    if "data.store" not in identity:
        identity |= store_identity(config.data)
        if checked.step is not None:  # built from the same documents, it is the same store
            checked = check_run(run_dir, identity, config.steps, allow)
    program = make_program(
        model, mesh, config.optimizer, steps=config.steps, seq_len=config.seq_len, accumulate=config.accumulate
    )
    train_data, eval_data = (
        Loader(
            store,
            batch_size=config.batch_size,
            seq_len=config.seq_len,
            seed=seed,
            layout=model.layout,
            ring_size=mesh.shape["sp"],
            packing=config.data,
        )
        if store
        else None
        for store, seed in ((train_store, config.seed), (eval_store, 0))
    )
    assert train_data is not None
    run = Run(config, run_dir, program, kernel, tokenizer, train_data, eval_data, identity, checked, frozenset(allow))
    check_same_on_all(identity)
    for store in run.stores:
        store.check_ids(model.vocab_size)
    count_batches(config.eval_batches, eval_data)
    return run


def _new_run_dir() -> str:
    if jax.process_count() > 1:
        raise ValueError("several processes need one folder: name it, e.g. --config.run_dir=/shared/runs/mine")
    return f"runs/{datetime.now():%Y%m%d-%H%M%S}"
