"""`ringformer convert verify` of a released model: the right one passes, and planted errors do not."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ringformer.checkpoints.saved_model import model_of
from ringformer.cli import main
from ringformer.convert import verify
from ringformer.convert.sample_text import TEXT
from ringformer.convert.verify_logits import both_forms, compare_logits
from ringformer.inference.generator import load_model

WEIGHTS = "model.safetensors"


def test_the_model_is_what_was_released(smol, smol_converted):
    """Read by transformers and by ringformer."""
    config = LlamaConfig.from_pretrained(smol)
    sizes = config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads
    assert sizes == (576, 30, 9, 3) and config.tie_word_embeddings and config.rms_norm_eps == 1e-5
    tokenizer = PreTrainedTokenizerFast.from_pretrained(smol)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    ours = model_of(smol_converted)
    assert (ours.num_params, ours.rope_theta, ours.tie_embeddings) == (134_515_008, 1e5, True)


def test_the_released_model_is_the_same_model(smol, smol_converted, capsys):
    """On a text, because it has a tokenizer. Few tokens, for the time of the suite."""
    assert main(["convert", "verify", str(smol), str(smol_converted), "--length=32"]) == 0
    output = capsys.readouterr().out
    assert "32 tokens of text" in output and "verdict: the same model" in output


def changed(smol: Path, out: Path, settings: dict, change) -> Path:
    """Copy the model with other settings, or with one tensor that `change` writes into."""
    out.mkdir()
    for path in smol.iterdir():
        if path.name not in ("config.json", WEIGHTS):
            (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((smol / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | settings))
    if change is None:
        os.link(smol / WEIGHTS, out / WEIGHTS)
    else:
        tensors = load_file(smol / WEIGHTS)
        change(tensors)
        save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    return out


def rope(theta: float) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def swap_rows(tensors):
    weight = tensors["model.layers.15.mlp.up_proj.weight"]
    weight[[10, 11]] = weight[[11, 10]].clone()


def turn_a_head(tensors):
    tensors["model.layers.15.self_attn.o_proj.weight"][:, 64:128].neg_()


def lose_the_scale(tensors):
    """Queries of every layer eight times as large: the square root of a head's 64 numbers."""
    for layer in range(30):
        tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] *= 8


def change_an_element(tensors):
    """By one step of bfloat16, 0.4 to 0.8%."""
    weight = tensors["model.layers.15.mlp.up_proj.weight"]
    weight[5, 5] *= 1 + 2**-7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "change", "same"),
    [
        ({}, None, True),
        (rope(1.001e5), None, False),
        (rope(1.02e5), None, False),
        ({"rms_norm_eps": 1e-6}, None, False),
        ({"rms_norm_eps": 1e-4}, None, False),
        ({}, swap_rows, False),
        ({}, turn_a_head, False),
        ({}, lose_the_scale, False),
        ({}, change_an_element, True),
    ],
    ids=["right", "theta 0.1%", "theta 2%", "eps 1e-6", "eps 1e-4", "rows", "sign of a head", "q scale", "an element"],
)
def test_planted_errors(smol, smol_converted, tmp_path, settings, change, same):
    """The last one is smaller than rounding: docs/models.md says that verify cannot see it."""
    comparison = verify(changed(smol, tmp_path / "changed", settings, change), smol_converted)
    print(comparison)
    assert comparison.agrees == same, str(comparison)


@pytest.mark.slow
def test_eps_of_one_layer_is_not_seen(smol, smol_converted):
    """It changes less than rounding does; docs/models.md says so."""
    tokens = np.array([PreTrainedTokenizerFast.from_pretrained(smol)(TEXT).input_ids[:512]])
    model = LlamaForCausalLM.from_pretrained(smol, dtype=torch.float32).eval()
    model.model.layers[15].input_layernorm.variance_epsilon = 1e-6
    ours = load_model(smol_converted, compute_dtype="float32", attention="blockwise")
    comparison = compare_logits(*both_forms(model, tokens), np.asarray(ours(tokens.astype(np.int32)))[0], "text")
    print(comparison)
    assert comparison.agrees, str(comparison)


@pytest.mark.slow
def test_random_ids_have_the_same_verdict(smol, smol_converted, tmp_path):
    """The noise of some positions is fifty times as large there; the limits grow with it."""
    theirs = changed(smol, tmp_path / "theirs", {}, None)
    (theirs / "tokenizer.json").unlink()
    comparison = verify(theirs, smol_converted)
    assert comparison.tokens == "512 tokens of random ids" and comparison.agrees, str(comparison)
    wrong = changed(smol, tmp_path / "wrong", rope(1.001e5), None)
    (wrong / "tokenizer.json").unlink()
    assert not verify(wrong, smol_converted).agrees
