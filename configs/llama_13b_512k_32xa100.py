"""LLaMA-13B to 512K tokens on 32 A100: the paper's own finetuning (Ring Attention, section 5.3) with a schedule.

Reproduces: LLaMA-13B finetuned on ShareGPT at a context of 512K on 32 A100 with 80 GB. The paper gives no schedule:
AdamW, learning rate 2e-5 with a cosine, 3% warm-up and no weight decay are Vicuna-13B's; the way there in three stages,
with their rope theta, is Large World Model's. Hardware: 4 nodes of 8xA100-80. Expected: at each stage's end a held-out
loss at its context below the one at its start. Nobody has run it with this code yet: memory and days of every stage are
in docs/finetuning.md.

ShareGPT's chats have some thousand tokens, so a context is hundreds of them: tokens attend across the whole packed
sequence (`data.packed_attention`), or no RoPE position beyond the longest chat would be trained. What that cannot
teach is to use the far context: only long documents do.

Differs from the paper: 2,097,152 tokens a step (Vicuna's 128 conversations of 2048 tokens are 262,144: half a sequence
here), bfloat16 computation over float32 weights; a ring is the eight GPUs of a node, whose links hide its hops at these
lengths, and nodes share the state alone. The steps are for 100M tokens at 32K and at 128K and for three epochs
of a ShareGPT of 170M tokens, about 500M; yours has other tokens: steps = 3 x tokens / 2,097,152.

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
    config.data.packed_attention = "sequence"  # a chat has some thousand tokens: alone it would never see the context
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
