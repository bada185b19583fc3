"""Folders of runs and of converted models, as `ringformer train` and `convert from-hf` leave them, most without
weights."""

import dataclasses
import json
import shutil
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ringformer.convert.import_hf import from_hf
from ringformer.data import load_tokenizer, save_tokenizer
from ringformer.files.run_layout import CARRIED
from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.runs.config import base_config
from ringformer.runs.config_file import parse
from tests.data.chat_samples import CORPUS, llama3


def run_folder(folder: Path, tokenizer: str, **data) -> Path:
    """A run of 64 tokens of context."""
    values = base_config("tiny")
    values.data.store, values.data.tokenizer, values.seq_len = "runs/data", tokenizer, 64
    values.model.vocab_size = load_tokenizer(tokenizer).vocab_size + 3
    values.data.update(data)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(parse(values))))
    save_tokenizer(load_tokenizer(tokenizer), folder)
    return folder


def converted_folder(folder: Path, tokenizer: Path, **files) -> Path:
    """A model of Hugging Face with the files of its tokenizer, and of JSON objects by name."""
    vocab_size = load_tokenizer(str(tokenizer)).vocab_size
    folder.mkdir(parents=True)
    model = dataclasses.asdict(LlamaConfig(**preset("tiny") | {"vocab_size": vocab_size}))
    (folder / "config.json").write_text(json.dumps({"model": model}))
    for name in CARRIED:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def llama2(folder: Path) -> Path:
    """LLaMA-2's kind of tokenizer.json, its tokens within words: SentencePiece's notation, byte fallback, a space
    before every stretch."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False)
    )
    description = json.loads(tokenizer.to_str())
    vocab = description["model"]["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(description | {"pre_tokenizer": None}))
    return folder


def model_folder(folder: Path, context: int = 4096, seed: int = 3) -> Path:
    """A converted model with weights, drawn by transformers, and the tokenizer of LLaMA-3's kind; its original is in
    the folder `hf` beside it."""
    hf = folder.with_name("hf")
    config = transformers.LlamaConfig(
        vocab_size=420,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=4,
    )
    transformers.set_seed(seed)
    transformers.LlamaForCausalLM(config).save_pretrained(hf)
    llama3(hf)
    from_hf(hf, folder)
    return folder
