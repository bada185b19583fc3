"""LLaMA-13B to 512K tokens on 32 A100: the paper's own fine-tuning (Ring Attention, section 5.3) with a schedule.

Reproduces: LLaMA-13B fine-tuned on ShareGPT at a context of 512K on 32 A100 with 80 GB. The paper gives no schedule.
The optimizer settings are those of Vicuna-13B: AdamW, learning rate 2e-5 with a cosine, 3% warm-up and no weight decay.
The three stages and their rope theta follow Large World Model. Hardware: 4 nodes of 8xA100-80. Expected: in each stage,
the held-out loss at the stage's context is lower at the end than at the start. Nobody has run this config yet.
docs/finetuning.md has the estimated memory and days of each stage.

ShareGPT's chats have a few thousand tokens, so a context holds hundreds of chats. Tokens attend across the whole packed
sequence (`data.packed_attention`); otherwise no RoPE position beyond the longest chat would be trained. This does not
teach the model to use distant text, which needs long documents.

Differs from the paper: a step has 2,097,152 tokens (Vicuna's 128 conversations of 2048 tokens are only 262,144, half a
sequence here), and computation is in bfloat16 with float32 weights. The ring is at most the eight GPUs of a node, whose
links hide its hops at these lengths; only the state is sharded across nodes. The steps are for 100M tokens at 32K and
at 128K, and for three epochs of a ShareGPT of 170M tokens, about 500M in total. If your data have a different number of
tokens, set steps = 3 x tokens / 2,097,152.

    ringformer estimate --config=configs/llama_13b_512k_32xa100.py --target=32xA100-80
    sbatch --nodes=4 scripts/slurm.sh --target=32xA100-80 --config=configs/llama_13b_512k_32xa100.py \\
        --init_from=/share/llama-13b --store=/share/sharegpt --tokenizer=/share/llama-13b/tokenizer.model \\
        --run_dir=/share/runs/llama-13b-512k
"""

from ringformer import base_config


def get_config():
    config = base_config("llama_13b")
    config.run_dir = "runs/llama_13b_512k_32xa100"
    config.data.store = "data/sharegpt"
    config.data.source = "jsonl:data/sharegpt.jsonl"
    config.data.tokenizer = "models/llama-13b/tokenizer.model"
    config.data.held_out = 0.02
    config.data.format = "sharegpt"
    config.data.template = "vicuna"
    config.data.packing = "whole"
    config.data.packed_attention = "sequence"  # chats have a few thousand tokens, far fewer than the context
    config.model.remat = "attention"
    config.model.offload = True  # on the device, the attention's outputs would not fit
    config.optimizer.learning_rate = 2e-5
    config.optimizer.final_fraction = 0.0
    config.optimizer.weight_decay = 0.0
    config.eval_every = 50
    config.checkpoint_every = 10
    config.stages = (
        stage(2**15, 48, 1e6, "1,16,1,2"),
        stage(2**17, 48, 1e7, "1,8,1,4"),
        stage(2**19, 240, 2.5e7, "1,4,1,8"),
    )
    return config


def stage(seq_len, steps, theta, mesh_dim):
    return {
        "seq_len": seq_len,
        "batch_size": 2**21 // seq_len,
        "steps": steps,
        "mesh_dim": mesh_dim,
        "model.rope_theta": theta,
        "optimizer.warmup_steps": round(0.03 * steps),
    }
