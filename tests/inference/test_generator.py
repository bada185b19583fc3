"""Whole runs: from a checkpoint, against transformers and the oracle; what is refused before anything is computed."""

import json
from dataclasses import asdict, replace

import jax
import numpy as np
import pytest
import torch

from ringformer.checkpoints.saved_model import model_of
from ringformer.convert import from_hf
from ringformer.inference import weight_shares
from ringformer.inference.generator import Generator
from ringformer.inference.inference_config import usual_dtype
from ringformer.inference.programs import Programs
from tests.convert.models import load, save_model
from tests.inference.models import CONFIG, generator, greedy, log_probabilities

PROMPT = [5, 9, 20, 3, 1]


@pytest.mark.parametrize(("asked", "dtype"), [(None, "float32"), ("bfloat16", "bfloat16")])
def test_a_cpu_computes_in_float32_unless_it_is_told_otherwise(asked, dtype, tmp_path):
    """A run in bfloat16, which a GPU computes so."""
    from_hf(save_model(tmp_path / "theirs", "llama_3"), tmp_path / "ours")
    assert model_of(tmp_path / "ours").compute_dtype == usual_dtype(model_of(tmp_path / "ours"), "gpu") == "bfloat16"
    generator = Generator.load(tmp_path / "ours", max_length=32, compute_dtype=asked)
    assert generator.config.compute_dtype == dtype
    held = {str(x.dtype) for x in jax.tree.leaves(generator._weights)}  # norms are float32
    assert ("bfloat16" in held) == (dtype == "bfloat16")


@pytest.mark.usual("yarn-1,1,1,2")
@pytest.mark.parametrize(
    ("family", "mesh_dim"), [("llama_3.1", "1,1,1,1"), ("llama_3", "1,2,2,2"), ("yarn", "1,1,1,2")]
)
def test_greedy_tokens_are_those_of_transformers(family, mesh_dim, tmp_path):
    """128 of them, with grouped heads and scaled positions, in float32."""
    theirs = save_model(tmp_path / "theirs", family)
    from_hf(theirs, tmp_path / "ours")
    ours = Generator.load(tmp_path / "ours", mesh_dim=mesh_dim, max_length=160, compute_dtype="float32")
    prompts = np.random.default_rng(0).integers(0, 257, (2, 9)).tolist()
    written = ours.generate(prompts, max_new_tokens=128)
    assert all(len(set(row)) > 8 for row in written)
    model = load(theirs)
    model.generation_config.eos_token_id = None
    for prompt, row in zip(prompts, written, strict=True):
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=128,
            do_sample=False,
            pad_token_id=0,
            attention_mask=torch.ones(1, 9, dtype=torch.long),
        )
        assert out[0, 9:].tolist() == row


@pytest.mark.parametrize("mesh_dim", ["1,1,1,1", pytest.param("1,1,2,4", marks=pytest.mark.slow)])
def test_greedy_tokens_in_a_window(mesh_dim):
    """The prompt is longer than the window, and so is what is written."""
    config = replace(CONFIG, window=7)
    written = generator(config, mesh_dim).generate([PROMPT * 3], max_new_tokens=20)
    assert written == [greedy(config, PROMPT * 3, 20)] != [greedy(CONFIG, PROMPT * 3, 20)]


def test_one_weight_at_a_time_is_there_twice(monkeypatch):
    """Whenever one is laid out, what is there of checkpoint and generator is all the weights, and no more of them."""
    layout, held, whole = weight_shares.make_reshard, [], []

    def noted(*args):
        def lay_out(x):
            whole.append(x.nbytes)
            held.append(sum(array.nbytes for array in jax.live_arrays()) - before)
            return layout(*args)(x)

        return lay_out

    config = replace(CONFIG, hidden_size=48)  # of no other test
    monkeypatch.setattr(weight_shares, "make_reshard", noted)
    log_probabilities(config, PROMPT)  # which draws the weights, and keeps them
    before = sum(array.nbytes for array in jax.live_arrays())
    generator(config, "1,1,1,1")
    assert len(held) == len(whole) > 10 and max(held) <= 1.02 * sum(whole)  # vectors are twice there


def test_an_end_token_is_the_last_of_its_row():
    """Rows end one by one; several tokens end."""
    model = generator(CONFIG, "1,1,1,1")
    prompts = [PROMPT, [7, 7, 30]]
    alone = [greedy(CONFIG, prompt, 12) for prompt in prompts]
    ends = {alone[0][3], alone[1][1]}
    expected = [row[: next(i for i, token in enumerate(row) if token in ends) + 1] for row in alone]
    assert len(expected[0]) != len(expected[1])
    assert model.generate(prompts, max_new_tokens=12, end_tokens=ends) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("mesh_dim", "ulysses"), [("1,1,1,1", 1), ("2,1,2,2", 1), ("1,1,1,4", 2)])
def test_losses_of_tokens(mesh_dim, ulysses):
    """Of three ragged rows on a mesh with dp=2, too."""
    rows = [[5, 9, 20, 3, 1, 2, 60, 33, 12], [1, 2], list(range(30))]
    found = generator(replace(CONFIG, layout="striped", ulysses=ulysses), mesh_dim).token_losses(rows)
    for row, losses in zip(rows, found, strict=True):
        log_p = log_probabilities(CONFIG, row)
        expected = [-log_p[i, token] for i, token in enumerate(row[1:])]
        np.testing.assert_allclose(losses, expected, atol=1e-4)


def test_bfloat16_is_near():
    """The weights lie in bfloat16; the likeliest token of most places is that of float32."""
    model = generator(replace(CONFIG, compute_dtype="bfloat16"), "1,1,2,2")
    session = model.session(1)
    session.append([PROMPT])
    assert session._state.cache.k.values.dtype == "bfloat16"
    found = torch.log_softmax(torch.from_numpy(np.array(session.logits, np.float64)), -1).numpy()
    assert np.abs(found - log_probabilities(CONFIG, PROMPT)[-1]).max() < 0.25


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "there are no prompts"),
        ([[]], {}, "prompt 0 is empty"),
        ([[61]], {}, "outside the vocabulary"),
        (
            [[1] * 62],
            {"max_new_tokens": 4},
            "at most 2 new tokens fit after this prompt; 4 new ones leave room for a prompt of at most 60",
        ),
        ([[1] * 80], {"max_new_tokens": 4}, "the prompt alone fills it"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
    ],
)
def test_bad_prompts(prompts, options, message, monkeypatch):
    model = generator(CONFIG, "1,1,1,1")
    monkeypatch.setattr(Programs, "prefill", lambda *_: pytest.fail("computed"))
    with pytest.raises(ValueError, match=message):
        model.generate(prompts, **{"max_new_tokens": 2} | options)


def test_rows_that_dp_does_not_divide():
    with pytest.raises(ValueError, match="3 rows on a mesh with dp=2: rows must be a multiple of dp"):
        generator(CONFIG, "2,1,1,1").session(3)


@pytest.mark.parametrize(
    ("mesh_dim", "message"), [("1,1,8,1", "tp=8 does not divide num_heads=4"), ("1,1,1,64", "needs 64 devices")]
)
def test_a_mesh_that_does_not_fit(mesh_dim, message, tmp_path):
    """Refused before a checkpoint is looked for."""
    (tmp_path / "config.json").write_text(json.dumps({"model": asdict(CONFIG)}))
    with pytest.raises(ValueError, match=message):
        Generator.load(tmp_path, mesh_dim=mesh_dim, max_length=32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 1}, "max_length=1 must be at least 2"),
        ({"max_length": 8, "prefill_chunk": 0}, "prefill_chunk=0 must be positive"),
    ],
)
def test_bad_sizes(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Generator.load(tmp_path, **options)
