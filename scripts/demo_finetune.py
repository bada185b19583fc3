"""Helpers of scripts/demo_finetune.sh: make a checkpoint and chats at the start, and generate text at the end.

python scripts/demo_finetune.py make HF_FOLDER CHATS_JSON [--chats=1500]
python scripts/demo_finetune.py generate HF_FOLDER RUN_DIR
"""

import argparse
import inspect
import json
import random
import sys
from importlib import import_module
from pathlib import Path

VOCABULARY = 1024
SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MODULES = (
    "collections",
    "datetime",
    "functools",
    "heapq",
    "itertools",
    "json",
    "logging",
    "math",
    "os",
    "pathlib",
    "random",
    "re",
    "shutil",
    "statistics",
    "string",
    "subprocess",
    "textwrap",
    "threading",
    "time",
    "zipfile",
)


def make(folder: Path, chats: Path, count: int) -> None:
    folder.mkdir(parents=True)
    questions = _questions()
    _write_chats(chats, questions, count)
    _write_tokenizer(folder, [answer for _, answer in questions])
    _write_model(folder)
    print(f"{folder}: a random LLaMA of {VOCABULARY} tokens; {chats}: {count} conversations")


def _questions() -> list[tuple[str, str]]:
    """Return questions about the standard library, with its docstrings as answers."""
    found = []
    for name in MODULES:
        module = import_module(name)
        for member, value in inspect.getmembers(module):
            text = inspect.getdoc(value) if callable(value) and not member.startswith("_") else None
            if text and len(text) > 40:
                found.append((f"What does {name}.{member} do?", text))
    return found


def _write_chats(path: Path, questions: list[tuple[str, str]], count: int) -> None:
    """Write conversations of two to six turns. As in the raw ShareGPT dump, some have HTML, and a few begin with an
    answer."""
    rng = random.Random(0)
    conversations = []
    for i in range(count):
        turns = []
        for question, answer in rng.sample(questions, rng.randint(2, 6)):
            html = rng.random() < 0.2
            turns.append({"from": "human", "value": question})
            turns.append({"from": "gpt", "value": f"<p>{answer}</p>" if html and "<" not in answer else answer})
        if i % 50 == 0:
            turns.insert(0, {"from": "gpt", "value": "How can I help?"})
        conversations.append({"id": f"demo-{i}", "conversations": turns})
    path.write_text(json.dumps(conversations))


def _write_tokenizer(folder: Path, texts: list[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(SPECIAL),
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content, indent=1))


def _write_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        rms_norm_eps=1e-5,
        initializer_range=0.09,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=4,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def generate(folder: Path, run_dir: Path) -> None:
    """Print 64 greedy tokens that transformers and ringformer generate after a question; exit with 1 if they differ."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    from ringformer.inference.generator import Generator

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What does json.dumps do?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = torch.tensor([prompt])
    out = theirs.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=4,
    )
    theirs = out[0, len(prompt) :].tolist()
    model = Generator.load(run_dir, max_length=len(prompt) + 64, compute_dtype="float32")
    (ours,) = model.generate([prompt], max_new_tokens=64)
    print(tokenizer.decode(theirs))
    if theirs != ours:
        sys.exit(f"transformers and ringformer continue differently: {theirs} and {ours}")
    print("the same 64 tokens from transformers and from ringformer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("make")
    verb.add_argument("hf", type=Path)
    verb.add_argument("chats_json", type=Path)
    verb.add_argument("--chats", type=int, default=1500)
    verb = verbs.add_parser("generate")
    verb.add_argument("hf", type=Path)
    verb.add_argument("run_dir", type=Path)
    args = parser.parse_args()
    if args.verb == "make":
        make(args.hf, args.chats_json, args.chats)
    else:
        generate(args.hf, args.run_dir)


if __name__ == "__main__":
    main()
