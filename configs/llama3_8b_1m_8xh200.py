"""LLaMA-3.1 8B to 1M tokens on one node of 8xH200, by raising the rope theta.

Reproduces: the last three stages of Gradient AI's extension of LLaMA-3 8B, which changes only theta (262K, 524K and
1048K: theta 207.1M, 1.06B and 2.80B; 101M, 419M and 839M tokens; learning rate 2e-5). Hardware: one host with eight
H200 (141 GB) and 1 TB of memory. Expected: in each stage, the held-out loss at the stage's context is lower at the end
than at the start. Nobody has run this config yet. docs/finetuning.md has the estimated memory and days of each stage.

Differs: it starts with LLaMA-3.1, whose context is already 128K, so there is no stage at 64K. The theta replaces the
frequency scaling of LLaMA-3.1, so the preset is the one without scaling. In every stage, all eight GPUs form one ring,
and the sequences of a batch are microbatches. A step has 4,194,304 tokens.

    ringformer estimate --config=configs/llama3_8b_1m_8xh200.py --target=8xH200
    bash scripts/gpu_node.sh --target=8xH200 --config=configs/llama3_8b_1m_8xh200.py --init_from=/data/llama3.1-8b \\
        --store=/data/long --tokenizer=/data/llama3.1-8b/tokenizer.json --run_dir=/data/runs/llama3.1-8b-1m
"""

from ringformer import base_config


def get_config():
    config = base_config("llama3_8b")
    config.model.rope_scaling.kind = "none"  # even if the checkpoint has a scaling
    config.run_dir = "runs/llama3_8b_1m_8xh200"
    config.data.store = "data/long"
    config.data.source = "jsonl:data/long/*.jsonl"
    config.data.tokenizer = "models/llama3.1-8b/tokenizer.json"
    config.data.held_out = 0.01
    config.mesh_dim = "1,1,1,8"
    config.model.remat = "attention"
    config.optimizer.learning_rate = 2e-5
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_steps = 5
    config.eval_every = 25
    config.checkpoint_every = 5
    config.stages = (
        stage(2**18, 24, 207.1e6),
        stage(2**19, 100, 1.06e9),
        stage(2**20, 200, 2.80e9),
    )
    return config


def stage(seq_len, steps, theta):
    sequences = 2**22 // seq_len
    return {
        "seq_len": seq_len,
        "batch_size": sequences,
        "accumulate": sequences,
        "steps": steps,
        "model.rope_theta": theta,
    }
