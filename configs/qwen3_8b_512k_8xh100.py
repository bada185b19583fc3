"""Qwen3 8B to 512K tokens on one node of 8xH100, in one step with YaRN.

Reproduces: no published run. Qwen's model card extends Qwen3 8B from 32,768 tokens, at which it was trained, to 131,072
by YaRN with a factor of 4, without training. Here the factor is 16, and the model trains on 1B tokens at 512K, as
UltraLong does from LLaMA-3.1 8B (arXiv:2504.06214), where one step to the longest context was better than two.
Hardware: one host with eight H100 (80 GB) and 1 TB of memory. Expected: 1.01B tokens (240 steps with 4,194,304 tokens);
the held-out loss is lower at the end than at the start. Nobody has run this config yet. docs/finetuning.md has its
estimated memory and days.

Rope: the checkpoint's theta, 1e6, and YaRN over 32,768 tokens, in place of any scaling that the checkpoint has.

Our choice: the learning rate, its schedule and the tokens of a step are those of configs/llama3_8b_512k_8xh100.py. All
eight GPUs form one ring, and the sequences of a batch are microbatches. The kept activations of 36 layers do not fit on
the GPUs, so they are offloaded: `ringformer plan` chose these settings.

    ringformer plan --model=qwen3_8b --target=8xH100 --seq_len=524288 --batch_size=1
    ringformer estimate --config=configs/qwen3_8b_512k_8xh100.py --target=8xH100
    ringformer data prepare --store=/data/long --source='jsonl:/data/long/*.jsonl' \\
        --tokenizer=/data/qwen3-8b/tokenizer.json --held_out=0.01
    bash scripts/gpu_node.sh --target=8xH100 --config=configs/qwen3_8b_512k_8xh100.py --init_from=/data/qwen3-8b \\
        --store=/data/long --tokenizer=/data/qwen3-8b/tokenizer.json --run_dir=/data/runs/qwen3-8b-512k
"""

from ringformer import base_config


def get_config():
    config = base_config("qwen3_8b")
    config.model.rope_scaling.kind = "yarn"
    config.model.rope_scaling.factor = 16.0
    config.model.rope_scaling.original_max_position = 2**15
    config.run_dir = "runs/qwen3_8b_512k_8xh100"
    config.data.store = "data/long"
    config.data.source = "jsonl:data/long/*.jsonl"
    config.data.tokenizer = "models/qwen3-8b/tokenizer.json"
    config.data.held_out = 0.01
    config.mesh_dim = "1,1,1,8"
    config.model.remat = "attention"
    config.model.offload = True
    config.seq_len = 2**19
    config.batch_size = 8
    config.accumulate = 8
    config.steps = 240
    config.optimizer.learning_rate = 2e-5
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_steps = 5
    config.eval_every = 25
    config.checkpoint_every = 5
    return config
