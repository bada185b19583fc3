"""Preparation of a run: its checked configuration, programs and data."""

from collections.abc import Collection
from dataclasses import fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from ringformer.checkpoints.saved_model import latest_step, restore_params
from ringformer.data import Loader, Tokenizer, TokenStore, check_vocabulary, load_tokenizer, open_mixture, open_or_build
from ringformer.data.loader import Parts
from ringformer.data.packing.options import PackingOptions
from ringformer.data.stores.beginning import texts_begin
from ringformer.files.output_place import check_output
from ringformer.files.run_layout import CHECKPOINTS
from ringformer.hardware import Chip, chip_of
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.gathered_keys import check_gathered_keys
from ringformer.models.interface import ModelConfig
from ringformer.models.kernel_check import check_kernel
from ringformer.models.kernel_choice import with_kernel
from ringformer.models.registry import check_mesh, family_with
from ringformer.parallel.host_memory import device_bytes
from ringformer.parallel.mesh import check_batch, make_mesh
from ringformer.runs.config import Config
from ringformer.runs.identity import Identity, check_same_on_all, run_identity, stores_identity
from ringformer.runs.record import Checked, check_keys, check_run
from ringformer.train.checks import check_folders, check_host_memory, check_tokenizer, count_batches
from ringformer.train.program import Program, make_program
from ringformer.train.state import TrainState, init_state, state_in_host_bytes


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
        stores = list(self.train_data.stores)
        if self.eval_data is not None:
            stores += self.eval_data.stores
        return stores

    def first_state(self) -> TrainState:
        """Return the state of step 0, with the parameters of init_from if the config sets init_from."""
        program = self.program
        source = self.config.init_from
        params = None
        if program.lora:
            params = program.lora.make_init(self.config.seed)()
        elif source:
            params = restore_params(source, program.shardings.params, program.mesh)
        return init_state(program.model, program.optimizer, program.shardings, program.mesh, self.config.seed, params)

    def frozen(self) -> list[dict[str, Any]]:
        """Return the frozen weights of a program with adapters, those of init_from."""
        lora = self.program.lora
        mesh = self.program.mesh
        assert lora is not None
        frozen = []
        for abstract in self.program.frozen:
            dtypes = jax.tree.map(lambda x: x.dtype, abstract)
            frozen.append(restore_params(self.config.init_from, lora.frozen, mesh, dtypes))
        return frozen

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
    place = find_place(config)
    settings = {field.name: getattr(config.data, field.name) for field in fields(PackingOptions)}
    packing = PackingOptions(**settings)
    model, kernel = _with_kernel(config, place, packing)
    begins = anew or latest_step(run_dir) is None
    tokenizer = _tokenizer(config, allow, begins)
    resumed = None if anew else run_dir
    opened = open_stores(config, tokenizer, resumed, allow)
    model, kernel = check_kernel(
        model, kernel, config.model, place.mesh, place.rank_tokens, packed=packing.has_segments
    )
    program = make_program(
        model,
        place.mesh,
        config.optimizer,
        steps=config.steps,
        seq_len=config.seq_len,
        accumulate=config.accumulate,
        lora=config.lora,
    )
    tokens = config.seq_len * config.batch_size // config.accumulate // place.mesh.size
    of_state = state_in_host_bytes(program.state, program.shardings)
    of_gradients = device_bytes(program.gradients_in_host)
    check_host_memory(model, tokens, of_state, of_gradients, place.mesh.local_devices)
    load = partial(
        Loader,
        batch_size=config.batch_size,
        seq_len=config.seq_len,
        layout=model.layout,
        ring_size=place.ranks,
        features=family_with(type(model)).features,
    )
    train_data = load(opened.train, seed=config.seed, packing=packing)
    eval_data = None
    if opened.held_out:
        eval_data = load(opened.held_out, seed=0, packing=replace(packing, buckets=0, position_range=0))
    run = Run(
        config,
        run_dir,
        program,
        kernel,
        tokenizer,
        train_data,
        eval_data,
        opened.identity,
        opened.checked,
        texts_begin(train_data.stores, tokenizer),
        frozenset(allow),
    )
    _check_data(run)
    return run


class Place(NamedTuple):
    """Devices of a run, and the part of a sequence that each of them has."""

    mesh: Mesh
    ranks: int
    """Ranks of the ring, each of `ulysses` devices."""
    rank_tokens: int
    """Tokens of a sequence on a rank."""
    chip: Chip | None
    """None for a device that is not in `CHIPS`."""

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform


def find_place(config: Config) -> Place:
    """Return the devices of a run. Raises ValueError if the model or the batch cannot be computed on them."""
    of_rank = config.model.ulysses
    mesh = make_mesh(config.mesh_dim, ulysses=of_rank)
    check_mesh(config.model, mesh)
    check_batch(config.model.layout, of_rank, mesh, config.seq_len, config.batch_size, config.accumulate)
    ranks = mesh.shape["sp"] // of_rank
    chip = chip_of(mesh.devices.flat[0].device_kind)
    if isinstance(config.model, DecoderConfig):
        if config.model.ring == "gathered":
            check_gathered_keys(config.model, mesh, config.seq_len, config.batch_size // config.accumulate, chip)
    elif config.data.buckets and ranks > 1:
        raise ValueError(
            f"data.buckets={config.data.buckets} cuts the ring of sp={mesh.shape['sp']} into smaller ones, which "
            f"{type(config.model).__name__} does not know: set data.buckets=0, or sp=1"
        )
    return Place(mesh, ranks, config.seq_len // ranks, chip)


def _with_kernel(config: Config, place: Place, packing: PackingOptions) -> tuple[ModelConfig, str]:
    """Return the model with the attention kernel for these devices, and the reason for choosing it."""
    mesh = place.mesh
    model, kernel = with_kernel(
        config.model,
        place.platform,
        place.chip,
        place.rank_tokens,
        packing.has_segments,
        place.ranks,
        mesh.shape["tp"],
    )
    return model, kernel


def _tokenizer(config: Config, allow: Collection[str], begins: bool) -> Tokenizer:
    """Load the tokenizer. Raises ValueError if it is not that of init_from, or has more tokens than the model."""
    tokenizer = load_tokenizer(config.data.tokenizer)
    if begins and config.init_from and "data.tokenizer" not in allow:
        check_tokenizer(config, tokenizer)
    vocab_size = getattr(config.model, "vocab_size", None)
    if vocab_size is not None:
        check_vocabulary(tokenizer, vocab_size)
    return tokenizer


class Opened(NamedTuple):
    """Stores of a run, and the comparison of its folder with the configuration."""

    train: TokenStore | Parts
    held_out: TokenStore | Parts | None
    identity: Identity
    checked: Checked


def open_stores(config: Config, tokenizer: Tokenizer, run_dir: Path | None, allow: Collection[str]) -> Opened:
    """Open the stores of a run, or build them. What the run's folder contradicts is refused before anything is built.

    Args:
      run_dir: folder of a run that may be resumed; None: the run begins anew.
    """
    data = config.data
    identity = run_identity(config, tokenizer.name)
    checked = Checked() if run_dir is None else check_run(run_dir, identity, config.steps, allow)
    train: TokenStore | Parts
    held_out: TokenStore | Parts | None
    if data.mixture:
        train, held_out = open_mixture(data.mixture, tokenizer.name, held_out=data.held_out > 0)
    else:
        train, held_out = open_or_build(data.store, data, tokenizer)
    if "data.store" not in identity:
        identity |= stores_identity(data.store, data.mixture, data.held_out > 0)
        if run_dir is not None and checked.step is not None:  # a store rebuilt from the same documents is the same
            checked = check_run(run_dir, identity, config.steps, allow)
    return Opened(train, held_out, identity, checked)


def _check_data(run: Run) -> None:
    """Raise ValueError for data that the model or the other processes do not have, and for too few batches."""
    if jax.process_count() > 1:
        check_same_on_all(run.identity)
    vocab_size = getattr(run.config.model, "vocab_size", None)
    if vocab_size is not None:
        for store in run.stores:
            store.check_ids(vocab_size)
    if run.eval_data is not None:
        count_batches(run.config.eval_batches, run.eval_data)


def folder_of(run_dir: str) -> Path:
    """Return the folder of a run, named by the time if the config names none.

    Raises ValueError if checkpoints would not be found in this folder, or if several processes have no common folder.
    """
    if not run_dir and jax.process_count() > 1:
        raise ValueError("several processes need a common folder: set it, e.g. --config.run_dir=/shared/runs/mine")
    path = check_output(run_dir or f"runs/{datetime.now():%Y%m%d-%H%M%S}", "run_dir")
    strange = sorted(set(str(path.absolute())) & set("[]*?"))
    if strange:
        raise ValueError(
            f"run_dir={path.absolute()} contains {' '.join(strange)}, which the checkpoint library takes for a "
            "pattern, so that it would not find what is saved there: choose another path"
        )
    return path
