"""LLaMA-2 7B to 1M tokens: the text stages of Large World Model (Liu, Yan, Zaharia, Abbeel, arXiv:2402.08268).

Reproduces: LWM's five stages with their rope theta, steps and warm-up, four million tokens per step, and a constant
learning rate of 4e-5. Hardware: TPU v4-512 (256 chips with 32 GiB). Expected: in each stage, the held-out loss at the
stage's context is lower at the end than at the start; the needle is retrieved at 1M. Nobody has run this config yet.
docs/finetuning.md has the estimated memory and days of each stage.

Differs from LWM: LWM's meshes use 4 to 16 chips for tensor parallelism and up to 4 for the ring. Ours use no tensor
parallelism and 2 to 64 chips for the ring. Each chip has 16,384 tokens of a sequence, which is enough to hide a hop.
Tokens are steps times 4,194,304, so the first stage has 5.0B tokens, which LWM rounds to 4.8B.

Documents: LWM filters Books3 by length for each stage. Provide your own documents (`data.source`); each stage selects
them by length.

    ringformer estimate --config=configs/lwm_7b_1m.py --target=v4-512
    bash scripts/tpu_pod.sh --name=lwm --zone=us-central2-b --accelerator=v4-512 --nfs=10.0.0.2:/share \\
        --config=configs/lwm_7b_1m.py --init_from=/mnt/share/llama2-7b --store=/mnt/share/books \\
        --tokenizer=/mnt/share/llama2-7b/tokenizer.model --run_dir=/mnt/share/runs/lwm-7b
"""

from ringformer import base_config


def get_config():
    config = base_config("llama2_7b")
    config.run_dir = "runs/lwm_7b_1m"
    config.data.store = "data/books"
    config.data.source = "jsonl:data/books/*.jsonl"
    config.data.tokenizer = "models/llama2-7b/tokenizer.model"
    config.data.held_out = 0.01
    config.model.remat = "attention"
    config.optimizer.learning_rate = 4e-5
    config.optimizer.schedule = "constant"
    config.eval_every = 100
    config.checkpoint_every = 50
    config.stages = (
        stage(2**15, 1200, 100, 1e6, "1,128,1,2", 10_000, 100_000),
        stage(2**17, 3000, 200, 1e7, "1,32,1,8", 100_000, 200_000),
        stage(2**18, 3000, 200, 1e7, "1,16,1,16", 200_000, 500_000),
        stage(2**19, 720, 50, 2.5e7, "1,8,1,32", 500_000, 1_000_000),
        stage(2**20, 450, 25, 5e7, "1,4,1,64", 1_000_000, 0),
    )
    return config


def stage(seq_len, steps, warmup, theta, mesh_dim, shortest, longest):
    """`shortest`, `longest`: tokens of the documents that it reads."""
    return {
        "seq_len": seq_len,
        "batch_size": 2**22 // seq_len,
        "steps": steps,
        "mesh_dim": mesh_dim,
        "model.rope_theta": theta,
        "optimizer.warmup_steps": warmup,
        "data.min_length": shortest,
        "data.max_length": longest,
    }
