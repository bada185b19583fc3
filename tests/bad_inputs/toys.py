"""Tiny things that the verbs read, made once: a tokenizer, documents, a store, a model, a run and its evaluation."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ringformer.cli import main
from tests.data.chat_samples import llama3

VOCABULARY = 420

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 4,
}

CONFIG = '''"""A model that compiles quickly."""

from ringformer import base_config


def get_config():
    config = base_config("tiny")
    config.data.source = "jsonl:toys/documents.jsonl"
    config.data.store = "toys/store"
    config.data.held_out = 0.0
    config.run_dir = "row/run"
    config.mesh_dim = "-1,1,1,1"
    config.seq_len = 16
    config.batch_size = 8
    config.steps = 2
    config.eval_batches = 1
    config.model.vocab_size = 257
    config.model.hidden_size = 8
    config.model.intermediate_size = 8
    config.model.num_layers = 1
    config.model.num_heads = 1
    config.model.num_kv_heads = 1
    config.model.head_dim = 8
    config.model.compute_dtype = "float32"
    config.model.attention = "vanilla"
    config.model.remat = "none"
    return config
'''


def make_toys(base: Path) -> None:
    """Make the folder `toys` in `base`, which is the current folder."""
    toys = base / "toys"
    toys.mkdir()
    (toys / "config.py").write_text(CONFIG)
    rows = [json.dumps({"text": f"the ring carries block {number}. " * 8}) for number in range(40)]
    (toys / "documents.jsonl").write_text("\n".join(rows) + "\n")
    (toys / "words.jsonl").write_text(json.dumps({"text": "a" * 40 + " " + "a" * 24 + "!"}) + "\n")
    turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a ring"}]
    (toys / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (toys / "prompts.jsonl").write_text('{"prompt": "the ring"}\n')
    llama3(toys / "tokenizer")
    model = toys / "hf"
    shutil.copytree(toys / "tokenizer", model)
    (model / "config.json").write_text(json.dumps(HF_CONFIG))
    save_file(_tensors(), model / "model.safetensors")
    for words in (
        ["convert", "from-hf", "toys/hf", "toys/model"],
        ["train", "--config=toys/config.py", "--config.run_dir=toys/run", "--config.checkpoint_every=1"],
    ):
        assert main(words) == 0, words


def _tensors() -> dict[str, np.ndarray]:
    """The tensors of the model of `HF_CONFIG`."""
    rng = np.random.default_rng(0)
    width, inner = HF_CONFIG["hidden_size"], HF_CONFIG["intermediate_size"]
    shapes = {"model.embed_tokens": (VOCABULARY, width), "lm_head": (VOCABULARY, width), "model.norm": (width,)}
    layer = "model.layers.0."
    for name in "qkvo":
        shapes[f"{layer}self_attn.{name}_proj"] = (width, width)
    shapes |= {f"{layer}mlp.gate_proj": (inner, width), f"{layer}mlp.up_proj": (inner, width)}
    shapes |= {f"{layer}mlp.down_proj": (width, inner)}
    shapes |= {f"{layer}input_layernorm": (width,), f"{layer}post_attention_layernorm": (width,)}
    return {f"{name}.weight": rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
