"""The training loop: check everything, restore or initialise, step, evaluate, save."""

import dataclasses
import json
import math
import shutil
import time
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from ringformer.data import (
    Batch,
    Loader,
    Tokenizer,
    TokenStore,
    check_vocabulary,
    load_tokenizer,
    open_mixture,
    open_or_build,
    save_tokenizer,
)
from ringformer.data.loader import Parts
from ringformer.mesh import BATCH, check_batch, check_model, make_mesh
from ringformer.train.checkpoint import CARRIED, HF_CONFIG, Checkpoints, restore_params
from ringformer.train.config import ARCHITECTURE, Config
from ringformer.train.metrics import Reporter, model_flops_per_token, peak_flops
from ringformer.train.optimizer import make_optimizer, schedule
from ringformer.train.state import TrainState, decayed, first_state, init_state, state_shardings, weight_shardings
from ringformer.train.step import make_eval_step, make_train_step


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

    @property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, BATCH)


def prepare(config: Config) -> Run:
    """Check the configuration against devices, data and tokenizer; raise ValueError naming what clashes."""
    mesh = make_mesh(config.mesh_dim)
    check_model(config.model, mesh)
    check_batch(config.model, mesh, config.seq_len, config.batch_size, config.accumulate)
    tokenizer = load_tokenizer(config.data.tokenizer)
    check_vocabulary(tokenizer, config.model.vocab_size)
    d = config.data
    if d.mixture:
        train_store, eval_store = open_mixture(d.mixture, tokenizer.name, held_out=d.held_out > 0)
    else:
        train_store, eval_store = open_or_build(
            d.store, source=d.source, field=d.field, split=d.split, tokenizer=tokenizer, held_out=d.held_out,
            skip_empty=d.skip_empty, format=d.format, template=d.template, chat_length=d.chat_length, clean=d.clean,
            skip_malformed=d.skip_malformed,
        )  # fmt: skip
    optimizer = make_optimizer(config.optimizer, config.steps, decayed(config.model))
    shardings = state_shardings(weight_shardings(config.model, mesh), optimizer)
    run_dir = Path(config.run_dir or _new_run_dir())
    for folder in (run_dir, Path(config.init_from or run_dir)):
        _check_architecture(folder, config)
    if (run_dir / HF_CONFIG).exists() and not (run_dir / "metrics.jsonl").exists():
        raise ValueError(f"run_dir={run_dir} is a converted model: name it with init_from, and another run_dir")
    run = Run(
        config, run_dir, mesh, tokenizer, _loader(train_store, config, mesh, config.seed),
        _loader(eval_store, config, mesh, seed=0) if eval_store else None, optimizer, shardings,
    )  # fmt: skip
    _evaluation_batches(run)
    return run


def train(run: Run) -> TrainState:
    """Train to the last step, from the run's latest checkpoint if there is one; returns the final state."""
    config = run.config
    _write_config(run)
    checkpoints = Checkpoints(run.run_dir, run.shardings, run.optimizer, run.mesh, config.keep_checkpoints)
    start = checkpoints.latest_step
    if start is None:
        start, state = 0, _first_state(run)
    else:
        state = checkpoints.restore(start)
    reporter = Reporter(run.run_dir, start, config)
    shape = dict(zip(run.mesh.axis_names, run.mesh.devices.shape, strict=True))
    reporter.say(f"{config.model.num_params / 1e6:.1f}M parameters, {config.seq_len} tokens x {config.batch_size}, "
                 f"mesh {shape}, from step {start} to {config.steps}, in {run.run_dir}")  # fmt: skip
    step_fn = make_train_step(
        config.model, run.optimizer, run.shardings, run.mesh,
        clip_norm=config.optimizer.clip_norm, accumulate=config.accumulate,
    )  # fmt: skip
    evaluate = make_evaluation(run)

    with closing(reporter), closing(checkpoints), closing(run.train_data.iterate(start, run.batch_sharding)) as batches:
        if start == 0 and evaluate:
            reporter.evaluation(0, evaluate(state.params))
        report = _step_reporter(run, reporter)
        pending = None
        chats = run.train_data.sequences.masked
        for step in range(start + 1, config.steps + 1):
            batch = next(batches)
            masked = count_masked(batch) if chats else None
            state, metrics = step_fn(state, batch)
            if chats:
                metrics |= {"masked": masked}
            if pending:  # fetched one step late: the devices never wait for the host
                report(*pending)
            pending = step, metrics
            last = step == config.steps
            if last or _due(step, config.eval_every) or _due(step, config.checkpoint_every):
                report(*pending)
                pending = None
            if evaluate and (last or _due(step, config.eval_every)):
                reporter.evaluation(step, evaluate(state.params))
            if last or _due(step, config.checkpoint_every):
                checkpoints.save(state)
    return state


def make_evaluation(run: Run):
    """`evaluate(params) -> metrics` over the first `eval_batches` of the held-out data, or None without any.

    eval_loss is in nats per token; eval_bits_per_byte is its equivalent per byte of text, comparable between
    tokenizers; eval_perplexity is its exponential.
    """
    data = run.eval_data
    if data is None:
        return None
    batches = _evaluation_batches(run)
    step = make_eval_step(run.config.model, run.shardings.params, run.mesh)

    def evaluate(params) -> dict[str, float]:
        sums = [step(params, data.batch(i, run.batch_sharding)) for i in range(batches)]
        nats, tokens = (float(sum(float(x) for x in column)) for column in zip(*sums, strict=True))
        loss = nats / tokens
        return {
            "eval_loss": loss,
            "eval_bits_per_byte": loss / math.log(2) / data.sequences.bytes_per_token,
            "eval_perplexity": math.exp(min(loss, 700.0)),
        }

    return evaluate


def _evaluation_batches(run: Run) -> int:
    """How many batches an evaluation takes; raises ValueError if the held-out data has none."""
    data = run.eval_data
    if data is None:
        return 0
    batches = min(run.config.eval_batches, data.sequences.per_epoch // data.batch_size)
    if batches == 0:
        raise ValueError(
            f"the held-out data has {data.sequences.per_epoch} sequences of {run.config.seq_len} tokens, fewer than "
            f"batch_size={data.batch_size}: raise data.held_out, or set it to 0 to train without evaluation"
        )
    return batches


@jax.jit
def count_masked(batch: Batch) -> jax.Array:
    """How many targets are masked for another reason than the end of their document; at most 0: none."""
    ends = batch.segment_ids.max(axis=1)
    return (~batch.mask).sum() - ends.sum()


def _step_reporter(run: Run, reporter: Reporter):
    config = run.config
    rate = schedule(config.optimizer, config.steps)
    tokens = config.batch_size * config.seq_len
    peak = peak_flops(run.mesh.devices.flat[0])
    last = time.perf_counter()

    def report(step, metrics):
        nonlocal last
        metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if metrics["tokens"] == 0:
            raise ValueError(f"the batch of step {step} has no token to train on: its loss mask is empty")
        if "masked" in metrics and metrics["masked"] <= 0:
            raise ValueError(f"the batch of step {step} trains on every token, though its store masks questions: "
                             f"rebuild the store, or raise seq_len={config.seq_len} if an answer fills it")  # fmt: skip
        if not math.isfinite(metrics["loss"]):
            raise FloatingPointError(f"the loss of step {step} is {metrics['loss']}: lower the learning rate, or "
                                     "look at the batch")  # fmt: skip
        seconds, last = time.perf_counter() - last, time.perf_counter()
        values = {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"], "learning_rate": float(rate(step - 1)),
                  "trained_tokens": int(metrics["tokens"]), "tokens_per_second": tokens / seconds}  # fmt: skip
        if peak:
            flops = model_flops_per_token(config.model, config.seq_len) * values["tokens_per_second"]
            values["mfu"] = flops / (peak * run.mesh.size)
        reporter.step(step, values)

    return report


def _loader(store: TokenStore | Parts, config: Config, mesh: Mesh, seed: int) -> Loader:
    d = config.data
    return Loader(
        store, batch_size=config.batch_size, seq_len=config.seq_len, seed=seed, layout=config.model.layout,
        ring_size=mesh.shape["sp"], packing=d.packing, min_length=d.min_length, max_length=d.max_length,
    )  # fmt: skip


def _new_run_dir() -> str:
    if jax.process_count() > 1:
        raise ValueError("several processes need one folder: name it, e.g. --config.run_dir=/shared/runs/mine")
    return f"runs/{datetime.now():%Y%m%d-%H%M%S}"


def _first_state(run: Run) -> TrainState:
    """Drawn from the seed; the parameters those of another run, if the config names one."""
    config = run.config
    if not config.init_from:
        return init_state(config.model, run.optimizer, run.shardings, run.mesh, config.seed)
    params = restore_params(config.init_from, run.shardings.params, run.mesh)
    return first_state(params, run.optimizer, run.shardings, run.mesh)


def _check_architecture(run_dir: Path, config: Config) -> None:
    """Raise ValueError if the folder holds a run of another architecture."""
    path = run_dir / "config.json"
    if not path.exists():
        return
    there, here = json.loads(path.read_text())["model"], dataclasses.asdict(config.model)
    clash = [f"{k} {there[k]} there, {here[k]} here" for k in ARCHITECTURE if there[k] != here[k]]
    if clash:
        raise ValueError(f"{run_dir} holds a run of another model ({'; '.join(clash)}): choose another folder")


def _write_config(run: Run) -> None:
    """Keep the resolved config and the tokenizer beside the run, and what came along with a converted model."""
    run.run_dir.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:
        resolved = dataclasses.asdict(run.config)
        write_json(run.run_dir / "config.json", resolved)
        (run.run_dir / "metrics.jsonl").touch()  # now it is a run, interrupted or not, and no converted model
        for name in (*CARRIED, HF_CONFIG):
            if run.config.init_from and (Path(run.config.init_from) / name).is_file():
                shutil.copyfile(Path(run.config.init_from) / name, run.run_dir / name)
        save_tokenizer(run.tokenizer, run.run_dir)


def write_json(path: Path, content) -> None:
    """In one piece: another process may be reading it."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
