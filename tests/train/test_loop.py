"""Whole runs: two meshes train alike, an interrupted run goes on as if nothing had happened, bad input stops early."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from ringformer.data import load_tokenizer
from ringformer.models.families.llama import LlamaConfig
from ringformer.runs.config import Config, DataConfig, OptimizerConfig
from ringformer.train.evaluation import evaluate
from ringformer.train.loop import train
from ringformer.train.optimizer import schedule
from ringformer.train.prepare import prepare
from tests.data.chat_samples import llama3
from tests.helpers import relative_error

MODEL = LlamaConfig(
    vocab_size=257,
    hidden_size=36,
    intermediate_size=40,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    compute_dtype="float32",
    ffn_chunk=64,
    loss_chunk=64,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Text files of all lengths, of a language that a small model learns quickly."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for i in range(60):
        words = rng.choice(["ring", "block", "key", "query", "value"], rng.integers(5, 400))
        (folder / f"{i}.txt").write_text(" ".join(words))
    return folder


def small_config(corpus, folder):
    return Config(
        model=MODEL,
        data=DataConfig(store=str(folder / "store"), source=f"text:{corpus}/*.txt", held_out=0.2),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        run_dir=str(folder / "run"),
        mesh_dim="1,1,1,8",
        seq_len=128,
        batch_size=4,
        steps=8,
        eval_batches=2,
    )


@pytest.fixture
def config(corpus, tmp_path):
    return small_config(corpus, tmp_path)


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """A run from its first step to its last: its config and final state."""
    config = dataclasses.replace(small_config(corpus, tmp_path_factory.mktemp("whole")), checkpoint_every=5)
    return config, train(prepare(config))


def rows(config):
    return [json.loads(line) for line in Path(config.run_dir, "metrics.jsonl").read_text().splitlines()]


def losses(config):
    return [row["loss"] for row in rows(config) if "loss" in row]


def test_a_run_learns(whole):
    whole, _ = whole
    evaluations = [row for row in rows(whole) if "eval_loss" in row]
    assert [row["step"] for row in evaluations] == [0, whole.steps]
    assert evaluations[-1]["eval_bits_per_byte"] < 0.8 * evaluations[0]["eval_bits_per_byte"]
    assert [row["step"] for row in rows(whole) if "loss" in row] == list(range(1, whole.steps + 1))
    saved = json.loads(Path(whole.run_dir, "config.json").read_text())
    assert saved["mesh_dim"] == "1,1,1,8" and saved["texts_begin"] is False, "bytes have no BOS token"


@pytest.mark.slow
def test_another_mesh_gives_the_same_losses(whole, config):
    whole, _ = whole
    other = dataclasses.replace(config, mesh_dim="1,2,2,2", accumulate=2)
    train(prepare(other))
    np.testing.assert_allclose(losses(other), losses(whole), rtol=1e-4)


def test_an_interrupted_run_resumes_on_another_mesh(whole, config, capfd):
    """5 of 8 steps, then the rest from the checkpoint on disk, with padded weights and other devices, and with the
    kernel that suits them: config.json keeps what was asked for."""
    whole, expected = whole
    run = prepare(dataclasses.replace(config, checkpoint_every=5))
    stopped = run._replace(train_data=_Stops(run.train_data, after=6))
    with pytest.raises(KeyboardInterrupt):
        train(stopped)
    auto = dataclasses.replace(MODEL, kernel="auto")
    resumed = prepare(dataclasses.replace(run.config, mesh_dim="1,2,1,4", model=auto))
    state = train(resumed)
    assert int(state.step) == config.steps and resumed.program.model == dataclasses.replace(auto, kernel="xla")
    assert "kernel xla: there are kernels for TPU and GPU, none for cpu" in capfd.readouterr().err
    assert json.loads(Path(config.run_dir, "config.json").read_text())["model"]["kernel"] == "auto"
    assert [row["step"] for row in rows(config) if "loss" in row] == list(range(1, config.steps + 1))
    np.testing.assert_allclose(losses(config), losses(whole), rtol=1e-5)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True):
        a, b = (np.asarray(x) for x in (a, b))
        cut = tuple(slice(min(s, t)) for s, t in zip(a.shape, b.shape, strict=True))
        assert relative_error(a[cut], b[cut]) < 1e-3


@pytest.mark.slow
def test_a_run_begins_with_the_parameters_of_another(whole, config, tmp_path):
    """At twice the context: step 0 evaluates the other run's parameters, and the optimizer starts anew."""
    whole, first = whole
    longer = dataclasses.replace(config, steps=3, seq_len=256, init_from=whole.run_dir)
    run = prepare(longer)
    train(run)
    step_0 = next(row for row in rows(longer) if row["step"] == 0)
    again = evaluate(
        run.program.eval_step, first.params, run.eval_data, run.config.eval_batches, run.program.batch_sharding
    )
    assert step_0["eval_loss"] == pytest.approx(again["eval_loss"], rel=1e-6)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        train(prepare(dataclasses.replace(longer, init_from=str(tmp_path), run_dir=str(tmp_path / "other"))))
    wider = dataclasses.replace(longer, model=dataclasses.replace(MODEL, intermediate_size=48))
    with pytest.raises(ValueError, match=r"run holds another model"):
        prepare(dataclasses.replace(wider, run_dir=str(tmp_path / "wider")))


class _Stops:
    """A loader that is interrupted when it is asked for one batch too many."""

    def __init__(self, loader, after):
        self._loader, self._after = loader, after

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def iterate(self, start, sharding):
        for step, batch in zip(range(self._after), self._loader.iterate(start, sharding), strict=False):
            del step
            yield batch
        raise KeyboardInterrupt


@pytest.mark.slow
def test_a_run_on_a_mixture_of_whole_documents(config, corpus, tmp_path):
    """Two stores 3:1, filtered by length, train and evaluate; the run's rows are of one store each."""
    prepare(config)  # builds the first store
    second = DataConfig(store=str(tmp_path / "second"), source=f"text:{corpus}/1*.txt", held_out=0.5)
    prepare(dataclasses.replace(config, data=second, seq_len=64))
    mixture = f"{config.data.store}:3,{second.store}:1"
    data = DataConfig(mixture=mixture, packing="whole", min_length=50, max_length=1000)
    run = prepare(dataclasses.replace(config, data=data, steps=3, eval_batches=1))
    for loader in (run.train_data, run.eval_data):
        assert [part.store.path.parent.name for part in loader.sequences.parts] == ["store", "second"]
        assert sum(loader.sequences.source(i)[0] for i in range(40)) == 10
        assert all(np.diff(p.store.offsets)[p.documents].min() >= 50 for p in loader.sequences.parts)
    train(run)
    assert [row["step"] for row in rows(run.config) if "eval_bits_per_byte" in row] == [0, 3]
    assert losses(run.config)[-1] < losses(run.config)[0]
    short = dataclasses.replace(config.data, min_length=10**5)
    with pytest.raises(ValueError, match=r"none of the .* has min_length=100000"):
        prepare(dataclasses.replace(config, run_dir=f"{config.run_dir}2", data=short))


def test_resuming_another_architecture_is_refused(config):
    Path(config.run_dir).mkdir()
    Path(config.run_dir, "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    wider = dataclasses.replace(config, model=dataclasses.replace(MODEL, intermediate_size=48))
    with pytest.raises(ValueError, match=r"another model \(intermediate_size 40 there, 48 here\)"):
        prepare(wider)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 100}, "sequence length 100 is not divisible by 16"),
        ({"batch_size": 3, "mesh_dim": "1,2,1,4"}, "batch_size=3 is not a multiple of 2"),
        ({"mesh_dim": "1,1,1,7"}, "needs 7 devices, there are 8"),
        ({"model": dataclasses.replace(MODEL, vocab_size=256)}, "tokenizer bytes has 257 tokens"),
        ({"model": dataclasses.replace(MODEL, attention="vanilla")}, "needs sp=1"),
        ({"seq_len": 2**20}, "fewer than the 1048577"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_bad_input_stops_before_anything_is_compiled(config, change, message, monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    with pytest.raises(ValueError, match=message):
        prepare(dataclasses.replace(config, **change))


@pytest.fixture
def chats(config, tmp_path):
    """The config of a run on conversations in LLaMA-3's form, with a tokenizer.json; some ask about a document that is
    longer than a batch."""
    records = [
        {
            "messages": [
                {"role": "user", "content": f"ring {i}?" + " value" * (500 if i % 10 == 0 else 0)},
                {"role": "assistant", "content": "block " * (i % 9 + 1)},
            ]
        }
        for i in range(150)
    ]
    (tmp_path / "chats.json").write_text(json.dumps(records))
    data = DataConfig(
        store=str(tmp_path / "chats"),
        source=f"json:{tmp_path}/chats.json",
        format="messages",
        template="tokenizer",
        tokenizer=str(llama3(tmp_path / "tokenizer")),
        held_out=0.2,
    )
    model = dataclasses.replace(MODEL, vocab_size=420)
    return dataclasses.replace(
        config, data=data, model=model, steps=6, seq_len=64, optimizer=OptimizerConfig(warmup_steps=1)
    )


@pytest.mark.slow
def test_a_chat_run_trains_on_answers_and_keeps_its_tokenizer(chats, capfd):
    """Batches that are all question are counted, and end nothing."""
    run = prepare(chats)
    train(run)
    steps = [row for row in rows(chats) if "trained_tokens" in row]
    batches = [run.train_data.read(step) for step in range(chats.steps)]
    assert [row["trained_tokens"] for row in steps] == [int(batch.mask.sum()) for batch in batches]
    assert [row["masked_tokens"] for row in steps] == [int((~b.mask & ~b.ends).sum()) for b in batches]
    assert all(row["trained_tokens"] < chats.batch_size * chats.seq_len / 2 for row in steps)
    odd = [row["step"] for row in steps if row["trained_tokens"] == 0]
    assert 0 < len(odd) < len(steps) and all(("loss" in row) == (row["step"] not in odd) for row in steps)
    said = capfd.readouterr().err
    assert f"the batch of step {odd[0]} has no token to train on" in said
    assert f"{len(odd)} of 6 batches had no token to train on" in said
    kept = load_tokenizer(chats.run_dir)
    assert (kept.name, kept.config) == (run.tokenizer.name, run.tokenizer.config)


def test_missing_files_are_named(config, tmp_path):
    data = dataclasses.replace(config.data, source=f"text:{tmp_path}/nothing/*.txt")
    with pytest.raises(FileNotFoundError, match="no file matches"):
        prepare(dataclasses.replace(config, data=data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"optimizer": OptimizerConfig(warmup_steps=8)}, "warmup_steps=8 must be less than steps=8"),
        ({"run_dir": "gs://bucket/run"}, "run_dir='gs://bucket/run' is not a folder of this machine"),
        ({"init_from": "gs://bucket/run"}, "init_from='gs://bucket/run' is not a folder of this machine"),
        ({"data": DataConfig(store="s3://b/store")}, "data.store='s3://b/store' is not a folder of this machine"),
        ({"checkpoint_minutes": float("nan")}, "checkpoint_minutes=nan must be at least 0"),
    ],
)
def test_configs_that_cannot_be(config, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **change)
    with pytest.raises(ValueError, match=r"unknown optimizer\.schedule"):
        OptimizerConfig(schedule="linear")
    with pytest.raises(ValueError, match=r"data\.store is empty"):
        DataConfig()
    with pytest.raises(ValueError, match=r"unknown data\.packing 'hole'"):
        DataConfig(store="s", packing="hole")
    with pytest.raises(ValueError, match=r"unknown data\.packed_attention 'all'; known: document, sequence"):
        DataConfig(store="s", packed_attention="all")
    with pytest.raises(ValueError, match=r"data\.min_length=9 and data\.max_length=5 leave no length"):
        DataConfig(store="s", min_length=9, max_length=5)
    with pytest.raises(ValueError, match=r"data\.store='s' and data\.mixture='a:1' are both set"):
        DataConfig(store="s", mixture="a:1")
    with pytest.raises(ValueError, match="'a' is not STORE:WEIGHT"):
        DataConfig(mixture="a")
    with pytest.raises(ValueError, match="learning_rate=nan must be a finite number"):
        OptimizerConfig(learning_rate=float("nan"))


def test_schedules():
    cosine = schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=10, final_fraction=0.1), 110)
    rates = [cosine(i) for i in (0, 5, 9, 10, 60, 110)]
    np.testing.assert_allclose(rates, [0.1, 0.6, 1, 1, 0.55, 0.1], atol=1e-6)
    one = schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=1, schedule="constant"), 10)
    assert one(0) == one(1) == 1.0  # a single step of warm-up had the rate 0, and trained nothing
    constant = schedule(OptimizerConfig(learning_rate=2.0, warmup_steps=0, schedule="constant"), 10)
    assert constant(0) == constant(9) == 2.0
