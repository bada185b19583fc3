"""Fixtures: a whole run of the training loop around a step that only counts; nothing of it is compiled."""

from types import SimpleNamespace

import pytest

from ringformer.models.families.llama import LlamaConfig
from ringformer.runs.config import Config, DataConfig, OptimizerConfig
from ringformer.train import evaluation, prepare, program
from ringformer.train.state import init_state as real_init_state

MODEL = LlamaConfig(
    vocab_size=257,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=16,
    compute_dtype="float32",
)


@pytest.fixture
def config(tmp_path):
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text(f"{i} ring block key " * 40)
    return Config(
        model=MODEL,
        data=DataConfig(store=str(tmp_path / "store"), source=f"text:{tmp_path}/*.txt", held_out=0.2),
        optimizer=OptimizerConfig(),
        run_dir=str(tmp_path / "run"),
        mesh_dim="1,1,1,8",
        seq_len=64,
        batch_size=1,
        steps=6,
        eval_batches=1,
    )


@pytest.fixture(scope="module")
def first_states():
    """The first state is made once: it would be compiled for every run."""
    made = []

    def init_state(*arguments):
        *_, params = arguments
        if params is not None:
            return real_init_state(*arguments)
        if not made:
            made.append(real_init_state(*arguments))
        return made[0]

    return init_state


@pytest.fixture
def steps(monkeypatch, first_states):
    """A train step that adds 1 to the parameters, and what it did: `steps.at[N] = function(state, metrics)` may change
    what step N returns. Evaluations are of no model either."""
    steps = SimpleNamespace(at={}, evaluated=[])

    def step_fn(state, batch):
        del batch
        state = state._replace(step=state.step + 1, params={k: _add_one(v) for k, v in state.params.items()})
        metrics = {"loss": 1.0, "grad_norm": 1.0, "tokens": 64, "masked": 0, "skipped": 0}
        change = steps.at.get(int(state.step))
        return change(state, metrics) if change else (state, metrics)

    def evaluate(step, params, *_, stop, likelihood):
        steps.evaluated.append(float(params["norm"]["scale"][0]))
        return None if stop() else {"eval_loss": 1.0, "eval_tokens": 1, "eval_by_position": []}

    monkeypatch.setattr(prepare, "init_state", first_states)
    monkeypatch.setattr(program, "make_train_step", lambda *_, **__: step_fn)
    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    return steps


def _add_one(tree):
    return {k: _add_one(v) for k, v in tree.items()} if isinstance(tree, dict) else tree + 1
