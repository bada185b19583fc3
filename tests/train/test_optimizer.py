"""Runs through `train` itself, whose saved parameters must be those of AdamW in numpy on the oracle's gradients."""

import dataclasses
from pathlib import Path

import jax
import pytest
from flax import nnx

from ringformer.models.decoder import Decoder
from ringformer.runs.config import Config, DataConfig, OptimizerConfig
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from tests.helpers import relative_error
from tests.oracle import llama, packing
from tests.oracle.adamw import AdamW, global_norm
from tests.train.runs import MODEL, first_parameters, flatten, read_parameters, unflatten, write_chats

SETTINGS = {
    "cosine": dict(schedule="cosine", final_fraction=0.2),
    "constant": dict(schedule="constant"),
}
UNUSUAL = dict(learning_rate=0.02, warmup_steps=2, b1=0.8, b2=0.9, eps=1e-4, weight_decay=0.5, clip_norm=0.7)
"""No value is a default of ours or of optax's: one that is ignored shows."""


def config(folder: Path, schedule: str, seed: int, tied: bool) -> Config:
    write_chats(folder / "chats.json")
    return Config(
        model=dataclasses.replace(MODEL, tie_embeddings=tied),
        data=DataConfig(
            store=str(folder / "store"), source=f"json:{folder}/chats.json", format="messages", held_out=0.0
        ),
        optimizer=OptimizerConfig(**UNUSUAL, **SETTINGS[schedule]),
        run_dir=str(folder / "run"),
        mesh_dim="2,2,2,1",
        seq_len=64,
        batch_size=8,
        accumulate=2,
        steps=5,
        seed=seed,
        checkpoint_every=1,
        keep_checkpoints=5,
    )


def expected_parameters(c: Config, params: dict) -> list[dict]:
    """After each step, from the parameters that the run began with."""
    o = c.optimizer
    adamw = AdamW(
        o.learning_rate,
        o.warmup_steps,
        c.steps,
        o.schedule,
        o.final_fraction,
        o.b1,
        o.b2,
        o.eps,
        o.weight_decay,
        o.clip_norm,
    )
    store = Path(c.data.store, "train")
    architecture = llama.Architecture(c.model.rope_theta, c.model.norm_eps)
    moments, found = adamw.init(params), []
    for step in range(1, c.steps + 1):
        rows = packing.batch(store, step - 1, c.batch_size, c.seq_len, c.seed)
        _, gradients = llama.loss_and_gradients(unflatten(params), rows, architecture)
        gradients = {name: g / rows.mask.sum() for name, g in flatten(gradients).items()}
        assert global_norm(gradients) > o.clip_norm  # or clipping is not tested
        params, moments = adamw.update(step, params, moments, gradients)
        found.append(params)
    return found


@pytest.mark.parametrize(("schedule", "seed", "tied"), [("cosine", 7, False), ("constant", 3, True)])
def test_a_run_is_adamw_on_the_gradients_of_the_oracle(schedule, seed, tied, tmp_path, monkeypatch):
    """Five updates of float32 parameters, by the relative norm of what was added to them since the start."""
    c = config(tmp_path, schedule, seed, tied)
    seen = set()
    loss = Decoder.loss
    monkeypatch.setattr(Decoder, "loss", lambda self, b, **kw: seen.add(b.tokens.shape) or loss(self, b, **kw))
    train(prepare(c))
    assert (c.batch_size // 4 // c.accumulate, c.seq_len // 2) in seen  # a device's part of a microbatch

    saved = [flatten(read_parameters(c.run_dir, step)) for step in range(1, c.steps + 1)]
    first = flatten(first_parameters(c.model, seed))
    drawn = c.model.init_std * jax.random.normal(nnx.Rngs(seed).params(), first["embed"].shape)
    assert relative_error(first["embed"], drawn) < 1e-6
    assert ("head" in first) != tied
    for name, x in first.items():
        if name.endswith("norm.scale"):
            assert (x == 1).all()
        else:
            assert abs(x.mean()) < 4 * c.model.init_std / x.size**0.5
            assert x.std() == pytest.approx(c.model.init_std, rel=0.1)

    for step, (actual, expected) in enumerate(zip(saved, expected_parameters(c, first), strict=True), 1):
        moved = {name: relative_error(actual[name] - x, expected[name] - x) for name, x in first.items()}
        assert max(moved.values()) < 2e-5, (step, moved)
        assert all((expected[name] != x).any() for name, x in first.items())
