"""There and back: the same bits, the same logits at four times the context, the same greedy tokens."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoConfig

from ringformer.convert import from_hf, hf_weights, to_hf
from ringformer.inference.generator import Generator, load_model
from tests.convert.models import CONTEXT, FAMILIES, load, logits, save_model, tensors


@pytest.mark.usual("yarn")
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_logits_and_greedy_tokens(family, tmp_path):
    theirs = save_model(tmp_path / "theirs", family)
    from_hf(theirs, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert tensors(tmp_path / "back") == tensors(theirs)

    before, after = load(theirs), load(tmp_path / "back")
    assert after.config.rope_parameters == before.config.rope_parameters
    assert after.config.max_position_embeddings == before.config.max_position_embeddings
    model = load_model(tmp_path / "ours", compute_dtype="float32", attention="vanilla")
    tokens = np.random.default_rng(0).integers(0, before.config.vocab_size, (1, 4 * CONTEXT))
    expected = logits(before, tokens)
    np.testing.assert_array_equal(logits(after, tokens), expected)
    found = np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens, jnp.int32)))
    assert np.abs(expected).max() > 1
    assert np.abs(found - expected).max() <= 1e-4

    prompt = tokens[0, :8].tolist()
    generator = Generator.load(tmp_path / "ours", max_length=72, compute_dtype="float32")
    (written,) = generator.generate([prompt], max_new_tokens=64)
    assert len(set(written)) > 4
    for torch_model in (before, after):
        torch_model.generation_config.eos_token_id = None
        out = torch_model.generate(
            torch.tensor([prompt]),
            max_new_tokens=64,
            do_sample=False,
            pad_token_id=0,
            attention_mask=torch.ones(1, 8, dtype=torch.long),
        )
        assert out[0, 8:].tolist() == written


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", None], ids=["as float32", "as it is"])
def test_half_precision_keeps_its_bits(dtype, stored, tmp_path, monkeypatch):
    """Through float32 and stored as it came; in shards; in blocks of a head or a few rows."""
    monkeypatch.setattr(hf_weights, "BLOCK_BYTES", 4000)
    theirs = save_model(tmp_path / "theirs", "llama_3", dtype=dtype, max_shard_size="30KB")
    assert len(list(theirs.glob("*.safetensors"))) > 3
    from_hf(theirs, tmp_path / "ours", stored or dtype)
    to_hf(tmp_path / "ours", tmp_path / "back", dtype if stored else None, shard_bytes=40_000)
    assert tensors(tmp_path / "back") == tensors(theirs)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    shards = {path.name for path in (tmp_path / "back").glob("*.safetensors")}
    assert len(shards) > 3 and shards == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(len(data) for _, data in tensors(theirs).values())
    assert AutoConfig.from_pretrained(tmp_path / "back").dtype == getattr(torch, dtype)
    assert load(tmp_path / "back").model.embed_tokens.weight.dtype == torch.float32


def test_what_came_along_goes_along(tmp_path):
    theirs = save_model(tmp_path / "theirs", "llama_2", pad_token_id=0, eos_token_id=[2, 5])
    kept = {"tokenizer.model": "a", "tokenizer.json": "b", "tokenizer_config.json": "c", "special_tokens_map.json": "d"}
    for name, text in kept.items():
        (theirs / name).write_text(text)
    from_hf(theirs, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    for name, text in kept.items():
        assert (tmp_path / "back" / name).read_text() == text
    assert (tmp_path / "back" / "generation_config.json").read_text() == (theirs / "generation_config.json").read_text()
    config = AutoConfig.from_pretrained(tmp_path / "back")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, [2, 5], 0)
