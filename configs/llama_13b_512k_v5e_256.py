"""LLaMA-13B to 512K tokens on TPU v5e-256: the paper's fine-tuning on the hardware of its table's last rows.

Reproduces: LLaMA-13B fine-tuned on ShareGPT at a context of 512K (Ring Attention, section 5.3), with Vicuna-13B's
optimizer and Large World Model's rope theta, like configs/llama_13b_512k_32xa100.py. Hardware: TPU v5e-256 (256 chips
with 16 GB). Expected: in each stage, the held-out loss at the stage's context is lower at the end than at the start.
Nobody has run this config yet. docs/finetuning.md has the estimated memory and days of each stage.

As in that config, tokens attend across the chats of a packed sequence (`data.packed_attention`), because no chat is as
long as the context.

Differs from the paper: a step has 4,194,304 tokens, and computation is in bfloat16 with float32 weights. Each chip has
16,384 tokens of a sequence, which is enough to hide a hop. The numbers of steps give the same tokens as in the A100
config.

    ringformer estimate --config=configs/llama_13b_512k_v5e_256.py --target=v5e-256
    bash scripts/tpu_pod.sh --name=ring --zone=us-west4-a --accelerator=v5litepod-256 --nfs=10.0.0.2:/share \\
        --config=configs/llama_13b_512k_v5e_256.py --init_from=/mnt/share/llama-13b --store=/mnt/share/sharegpt \\
        --tokenizer=/mnt/share/llama-13b/tokenizer.model --run_dir=/mnt/share/runs/llama-13b-512k
"""

from ringformer import base_config


def get_config():
    config = base_config("llama_13b")
    config.run_dir = "runs/llama_13b_512k_v5e_256"
    config.data.store = "data/sharegpt"
    config.data.source = "jsonl:data/sharegpt.jsonl"
    config.data.tokenizer = "models/llama-13b/tokenizer.model"
    config.data.held_out = 0.02
    config.data.format = "sharegpt"
    config.data.template = "vicuna"
    config.data.packing = "whole"
    config.data.packed_attention = "sequence"  # chats have a few thousand tokens, far fewer than the context
    config.model.remat = "attention"  # with offload: a chip has 16 GB
    config.model.offload = True
    config.optimizer.learning_rate = 2e-5
    config.optimizer.final_fraction = 0.0
    config.optimizer.weight_decay = 0.0
    config.eval_every = 20
    config.checkpoint_every = 10
    config.stages = (
        stage(2**15, 24, 1e6, "1,128,1,2"),
        stage(2**17, 24, 1e7, "1,32,1,8"),
        stage(2**19, 120, 2.5e7, "1,8,1,32"),
    )
    return config


def stage(seq_len, steps, theta, mesh_dim):
    return {
        "seq_len": seq_len,
        "batch_size": 2**22 // seq_len,
        "steps": steps,
        "mesh_dim": mesh_dim,
        "model.rope_theta": theta,
        "optimizer.warmup_steps": round(0.03 * steps),
    }
