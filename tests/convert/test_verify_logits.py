"""The limits of `convert verify`: float32 rounding agrees, and planted errors do not."""

import re
import shutil

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from ringformer.convert import from_hf, verify
from ringformer.convert.sample_text import TEXT
from ringformer.convert.verify_logits import USUAL_LENGTH, both_forms, compare_logits, difference
from ringformer.inference.generator import load_model
from tests.convert.models import save_model

TOKENS = np.random.default_rng(0).integers(0, 257, (1, 64))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny LLaMA's folder, and ringformer's logits [T, V] of TOKENS."""
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "theirs", "llama_2")
    from_hf(folder / "theirs", folder / "ours")
    model = load_model(folder / "ours", compute_dtype="float32", attention="blockwise")
    return folder / "theirs", np.asarray(model(TOKENS.astype(np.int32)))[0]


def swap_rows(weight):
    weight[[2, 3]] = weight[[3, 2]].clone()


def plant(model, error):
    """Make one error in a model of transformers."""
    layers = model.model.layers
    attention = layers[1].self_attn
    width = attention.head_dim
    with torch.no_grad():
        if error == "rows of one tensor":
            swap_rows(layers[1].mlp.up_proj.weight)
        elif error == "sign of one head":
            attention.o_proj.weight[:, width : 2 * width].neg_()
        elif error == "no scale of the queries":
            for layer in layers:
                layer.self_attn.scaling = 1.0


@pytest.mark.parametrize(
    ("error", "settings"),
    [
        ("theta 0.1% off", {"rope_parameters": {"rope_type": "default", "rope_theta": 1.001e4}}),
        ("theta 2% off", {"rope_parameters": {"rope_type": "default", "rope_theta": 1.02e4}}),
        ("eps of another power", {"rms_norm_eps": 1e-6}),
        ("rows of one tensor", {}),
        ("sign of one head", {}),
        ("no scale of the queries", {}),
        (None, {}),
    ],
)
def test_a_planted_error_is_noticed(models, error, settings):
    folder, logits = models
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings).eval()
    plant(model, error)
    comparison = compare_logits(*both_forms(model, TOKENS), logits, "random ids")
    assert comparison.agrees == (error is None), str(comparison)


def test_the_table_gives_position_share_and_limits(models):
    folder, logits = models
    changed = logits.copy()
    changed[5] = np.roll(changed[5], 1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = str(compare_logits(*both_forms(model, TOKENS), changed, "random ids"))
    assert "64 tokens of random ids" in text and "at position 5)" in text
    assert "98.44%            100.00%" in text, "63 of 64 positions have the same top choice"
    assert "another top choice at 1 of 64 positions" in text


def test_not_a_number_is_no_agreement():
    logits = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    none = difference(logits, logits)
    assert none == (0, 0, 0, 0, ())
    assert compare_logits(logits, none, logits, "text").agrees, "without noise, the rounding of a logit remains"
    for value in (np.nan, np.inf, -np.inf):
        broken = logits.copy()
        broken[1, 1] = value
        comparison = compare_logits(logits, none, broken, "text")
        assert not comparison.agrees and comparison.difference.mean_kl == np.inf and comparison.difference.position == 1
        assert not compare_logits(broken, difference(broken, broken), broken, "text").agrees


def test_kl_is_that_of_the_definition():
    """Also where differences are so small that its terms of first order would cancel to nothing."""
    first, second = np.random.default_rng(0).standard_normal((2, 100, 30)).astype(np.float32)
    p, q = (torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (first, second))
    expected = (p.exp() * (p - q)).sum(-1)
    found = difference(first, second)
    assert found.mean_kl == pytest.approx(float(expected.mean()), rel=1e-12)
    assert found.largest_kl == pytest.approx(float(expected.max()), rel=1e-12) and found.position == expected.argmax()
    assert difference(first.astype(np.float64), first + 1e-9 * second).mean_kl == pytest.approx(5e-19, rel=0.1)
    assert difference(first, first + 1).mean_kl == pytest.approx(0, abs=1e-12), "logits count up to a constant"


def test_ties_may_fall_the_other_way():
    """Up to the noise of a logit; a wider gap is another choice, which the verdict names."""
    logits = np.zeros((4, 8), np.float32)
    logits[:, 3] = 2
    logits[:, 5] = 2 - 4e-6
    noise = logits.copy()
    noise[:, 3] -= 1e-6
    other = logits.copy()
    other[0, 5] = 2 + 1e-6
    assert other[0].argmax() == 5
    assert compare_logits(logits, difference(logits, noise), other, "text").agrees
    for array in (logits, noise):
        array[0, 5] = 2 - 1e-3
    faults = compare_logits(logits, difference(logits, noise), other, "text").faults
    assert "another top choice at 1 of 4 positions" in faults


def test_a_noisy_reference_forgives_nothing():
    """Queries without their scale make transformers' forms differ by 0.08 nats of mean KL in SmolLM2."""
    first, second, third = np.random.default_rng(0).standard_normal((3, 100, 30)).astype(np.float32)
    noise = difference(first, second)
    comparison = compare_logits(first, noise, first + 0.1 * third, "text")
    assert comparison.difference.mean_kl < noise.mean_kl / 10 and not comparison.agrees
    assert len(comparison.faults) == 3


@pytest.mark.parametrize(
    ("vocabulary", "tokens"),
    [
        ({"[UNK]": 0, "the": 1, "water": 2}, "40 tokens of text"),
        ({"[UNK]": 0, "the": 257}, "40 tokens of random ids, because the tokenizer has id 257 and the model only 257"),
        pytest.param(
            None,
            "40 tokens of random ids, because transformers cannot read the tokenizer (",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_tokenizer_gives_text(models, tmp_path, vocabulary, tokens):
    theirs = shutil.copytree(models[0], tmp_path / "theirs")
    if vocabulary is None:
        (theirs / "tokenizer.json").write_text("{}")
    else:
        words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
        words.pre_tokenizer = Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(theirs)
    comparison = verify(theirs, models[0].parent / "ours", length=40)
    assert comparison.agrees and comparison.tokens.startswith(tokens)


def test_the_text_is_longer_than_the_usual_length():
    """Of each character a token at most; words and digits are fewer."""
    assert len(re.findall(r"\w+|[^\w\s]", TEXT)) > USUAL_LENGTH
