"""LLaMA-3.1 8B to 512K tokens on one node of 8xH100, by raising the rope theta.

Reproduces: the 262K and 524K stages of Gradient AI's extension of LLaMA-3 8B, which changes only theta (theta 207.1M
and 1.06B; 101M and 419M tokens; learning rate 2e-5). Hardware: one host with eight H100 (80 GB). Expected: in each
stage, the held-out loss at the stage's context is lower at the end than at the start. Nobody has run this config yet.
docs/finetuning.md has the estimated memory and days of each stage.

Rope: LLaMA-3.1 stretches the low frequencies of its rope eightfold (scaling `llama3`, theta 5e5). It was trained with
this scaling up to 128K, and the scaling is not meant for longer contexts. Here a larger theta replaces the scaling:
`rope_scaling.kind` is "none", even if the checkpoint has a scaling, and the stages set the theta.

Differs: it starts with LLaMA-3.1, whose context is already 128K, so there is no stage at 64K. In both stages, all eight
GPUs form one ring, and the sequences of a batch are microbatches. A step has 4,194,304 tokens.

    ringformer estimate --config=configs/llama3_8b_512k_8xh100.py --target=8xH100
    bash scripts/gpu_node.sh --target=8xH100 --config=configs/llama3_8b_512k_8xh100.py --init_from=/data/llama3.1-8b \\
        --store=/data/long --tokenizer=/data/llama3.1-8b/tokenizer.json --run_dir=/data/runs/llama3.1-8b-512k
"""

from ringformer import base_config


def get_config():
    config = base_config("llama3.1_8b")
    config.model.rope_scaling.kind = "none"
    config.run_dir = "runs/llama3_8b_512k_8xh100"
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
