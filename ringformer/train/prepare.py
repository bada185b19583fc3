"""Preparation of a run: its checked configuration, programs and data."""

from collections.abc import Collection
from dataclasses import fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ringformer.checkpoints.saved_model import latest_step, restore_params
from ringformer.data import Loader, Tokenizer, TokenStore, check_vocabulary, load_tokenizer, open_mixture, open_or_build
from ringformer.data.loader import Parts
from ringformer.data.packing.options import PackingOptions
from ringformer.data.stores.beginning import texts_begin
from ringformer.files.run_layout import CHECKPOINTS
from ringformer.hardware import chip_of
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.gathered_keys import check_gathered_keys
from ringformer.models.kernel_check import check_kernel
from ringformer.models.kernel_choice import with_kernel
from ringformer.models.registry import check_mesh, family_with
from ringformer.parallel.mesh import check_batch, make_mesh
from ringformer.runs.config import Config
from ringformer.runs.identity import Identity, check_same_on_all, run_identity, stores_identity
from ringformer.runs.record import Checked, check_keys, check_run
from ringformer.train.checks import check_folders, check_host_pool, check_tokenizer, count_batches
from ringformer.train.program import Program, make_program
from ringformer.train.state import TrainState, init_state


class Run(NamedTuple):
    """Checked configuration of a run with its programs and data; nothing is compiled yet."""

    config: Config
    run_dir: Path
    program: Program
    kernel: str
    """Attention kernel for these devices, and the reason for choosing it; empty for a model family with no choice of
    kernels."""
    tokenizer: Tokenizer
    train_data: Loader
    eval_data: Loader | None
    identity: Identity
    checked: Checked
    """Result of comparing the run's folder with the configuration."""
    texts_begin: bool | None
    """Result of `texts_begin` for the stores used for training."""
    allow: frozenset[str] = frozenset()
    """Keys of the config that may have changed since the run began."""

    @property
    def stores(self) -> list[TokenStore]:
        """All stores used for training and evaluation."""
        return [store for data in (self.train_data, self.eval_data) if data for store in data.stores]

    def first_state(self) -> TrainState:
        """Return the state of step 0, with the parameters of init_from if the config sets init_from."""
        source, (model, mesh, optimizer, shardings, *_) = self.config.init_from, self.program
        if self.program.lora:
            params = self.program.lora.make_init(self.config.seed)()
        else:
            params = restore_params(source, shardings.params, mesh) if source else None
        return init_state(model, optimizer, shardings, mesh, self.config.seed, params)

    def frozen(self) -> list[dict[str, Any]]:
        """Return the frozen weights of a program with adapters, those of init_from."""
        lora = self.program.lora
        mesh = self.program.mesh
        assert lora is not None
        dtypes = [jax.tree.map(lambda x: x.dtype, abstract) for abstract in self.program.frozen]
        return [restore_params(self.config.init_from, lora.frozen, mesh, of_base) for of_base in dtypes]

    def origin(self, start: int | None) -> str:
        """Describe the origin of the initial state, and what to do if it is not finite."""
        if start:
            folder = self.run_dir / CHECKPOINTS / str(start)
            return f"of {folder}, which is damaged: delete that folder to resume from the previous checkpoint"
        return f"of init_from={self.config.init_from}" if self.config.init_from else "drawn from the seed"


def prepare(config: Config, allow: Collection[str] = (), *, anew: bool = False) -> Run:
    """Check the configuration against devices, data and tokenizer; raise ValueError that names a conflict.

    Args:
      allow: keys that may have changed since the run in `config.run_dir` began (`record.check_run`);
        "data.tokenizer": the model in init_from may have another tokenizer.
      anew: True if the run begins anew; the contents of `config.run_dir` will then be set aside.
    """
    run_dir = folder_of(config.run_dir)
    if run_dir.exists() or config.init_from:
        check_folders(run_dir, config)  # checked first: the rest may take hours
    if allow:
        check_keys(config, allow)
    of_rank = config.model.ulysses
    mesh = make_mesh(config.mesh_dim, ulysses=of_rank)
    check_mesh(config.model, mesh)
    check_batch(config.model.layout, of_rank, mesh, config.seq_len, config.batch_size, config.accumulate)
    ranks = mesh.shape["sp"] // of_rank
    device = mesh.devices.flat[0]
    rank_tokens = config.seq_len // ranks
    chip = chip_of(device.device_kind)
    if isinstance(config.model, DecoderConfig) and config.model.ring == "gathered":
        check_gathered_keys(config.model, mesh, config.seq_len, config.batch_size // config.accumulate, chip)
    data = config.data
    if data.buckets and ranks > 1 and not isinstance(config.model, DecoderConfig):
        raise ValueError(
            f"data.buckets={data.buckets} cuts the ring of sp={mesh.shape['sp']} into smaller ones, which "
            f"{type(config.model).__name__} does not know: set data.buckets=0, or sp=1"
        )
    packing = PackingOptions(**{field.name: getattr(data, field.name) for field in fields(PackingOptions)})
    model, kernel = with_kernel(
        config.model, device.platform, chip, rank_tokens, packing.has_segments, ranks, mesh.shape["tp"]
    )
    if device.platform == "gpu":
        check_host_pool(model, config.seq_len * config.batch_size // config.accumulate // mesh.size)
    tokenizer = load_tokenizer(data.tokenizer)
    begins = anew or latest_step(run_dir) is None
    if begins and config.init_from and "data.tokenizer" not in allow:
        check_tokenizer(config, tokenizer)
    vocab_size = getattr(model, "vocab_size", None)
    if vocab_size is not None:
        check_vocabulary(tokenizer, vocab_size)
    identity = run_identity(config, tokenizer.name)
    checked = Checked() if anew else check_run(run_dir, identity, config.steps, allow)  # before a store is built
    train_store: TokenStore | Parts
    eval_store: TokenStore | Parts | None
    if data.mixture:
        train_store, eval_store = open_mixture(data.mixture, tokenizer.name, held_out=data.held_out > 0)
    else:
        train_store, eval_store = open_or_build(data.store, data, tokenizer)
    if "data.store" not in identity:
        identity |= stores_identity(data.store, data.mixture, data.held_out > 0)
        if checked.step is not None:  # a store rebuilt from the same documents is the same
            checked = check_run(run_dir, identity, config.steps, allow)
    model, kernel = check_kernel(model, kernel, config.model, mesh, rank_tokens, packed=packing.has_segments)
    program = make_program(
        model,
        mesh,
        config.optimizer,
        steps=config.steps,
        seq_len=config.seq_len,
        accumulate=config.accumulate,
        lora=config.lora,
    )
    load = partial(
        Loader,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        layout=model.layout,
        ring_size=ranks,
        features=family_with(type(model)).features,
    )
    train_data = load(train_store, seed=config.seed, packing=packing)
    eval_data = load(eval_store, seed=0, packing=replace(packing, buckets=0, position_range=0)) if eval_store else None
    run = Run(
        config,
        run_dir,
        program,
        kernel,
        tokenizer,
        train_data,
        eval_data,
        identity,
        checked,
        texts_begin(train_data.stores, tokenizer),
        frozenset(allow),
    )
    if jax.process_count() > 1:
        check_same_on_all(identity)
    if vocab_size is not None:
        for store in run.stores:
            store.check_ids(vocab_size)
    if eval_data is not None:
        count_batches(config.eval_batches, eval_data)
    return run


def folder_of(run_dir: str) -> Path:
    """Return the folder of a run, named by the time if the config names none.

    Raises ValueError if checkpoints would not be found in this folder, or if several processes have no common folder.
    """
    if not run_dir and jax.process_count() > 1:
        raise ValueError("several processes need a common folder: set it, e.g. --config.run_dir=/shared/runs/mine")
    path = Path(run_dir or f"runs/{datetime.now():%Y%m%d-%H%M%S}")
    if strange := sorted(set(str(path.absolute())) & set("[]*?")):
        raise ValueError(
            f"run_dir={path.absolute()} contains {' '.join(strange)}, which the checkpoint library takes for a "
            "pattern, so that it would not find what is saved there: choose another path"
        )
    return path
