"""Qwen3 8B to 512K tokens on one node of 8xH100, by adapters (LoRA) and YaRN.

Reproduces: no published run. It is configs/qwen3_8b_512k_8xh100.py, with YaRN's factor of 16 over 32,768 tokens, but
only adapters of rank 16 train (Hu et al., arXiv:2106.09685). Hardware: one host with eight H100 (80 GB). Expected: 419M
tokens (200 steps with 2,097,152 tokens); the held-out loss is lower at the end than at the start. Nobody has run this
config yet. docs/finetuning.md has its estimated memory and days.

LongLoRA (arXiv:2309.12307) found that adapters alone extend a context less well than full training, unless embeddings
and norms train, too. These stay frozen here. Compare the held-out losses with those of the full config before you rely
on adapters for the extension.

Our choice: adapters, dtype, tokens and learning rate are those of configs/llama3_8b_512k_lora_8xh100.py. All eight GPUs
form one ring, and the sequences of a batch are microbatches.

    ringformer estimate --config=configs/qwen3_8b_512k_lora_8xh100.py --target=8xH100
    ringformer data prepare --store=/data/long --source='jsonl:/data/long/*.jsonl' \\
        --tokenizer=/data/qwen3-8b/tokenizer.json --held_out=0.01
    bash scripts/gpu_node.sh --target=8xH100 --config=configs/qwen3_8b_512k_lora_8xh100.py --init_from=/data/qwen3-8b \\
        --store=/data/long --tokenizer=/data/qwen3-8b/tokenizer.json --run_dir=/data/runs/qwen3-8b-512k-lora
    ringformer convert to-peft /data/runs/qwen3-8b-512k-lora /data/qwen3-8b-512k-adapters
"""

from ringformer import base_config


def get_config():
    config = base_config("qwen3_8b")
    config.init_from = "models/qwen3-8b"
    config.lora.rank = 16
    config.lora.base_dtype = "bfloat16"
    config.model.rope_scaling.kind = "yarn"
    config.model.rope_scaling.factor = 16.0
    config.model.rope_scaling.original_max_position = 2**15
    config.run_dir = "runs/qwen3_8b_512k_lora_8xh100"
    config.data.store = "data/long"
    config.data.source = "jsonl:data/long/*.jsonl"
    config.data.tokenizer = "models/qwen3-8b/tokenizer.json"
    config.data.held_out = 0.01
    config.mesh_dim = "1,1,1,8"
    config.model.remat = "attention"
    config.seq_len = 2**19
    config.batch_size = 4
    config.accumulate = 4
    config.steps = 200
    config.optimizer.learning_rate = 2e-4
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_steps = 5
    config.eval_every = 50
    config.checkpoint_every = 10
    return config
