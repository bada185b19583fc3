"""LLaMA-3.1 8B to 512K tokens on one node of 8xH100, by adapters (LoRA) and a larger rope theta.

Reproduces: no published run. It is the 524K stage of configs/llama3_8b_512k_8xh100.py, with Gradient AI's theta of
1.06B in place of LLaMA-3.1's scaling, but only adapters of rank 16 train (Hu et al., arXiv:2106.09685). Hardware: one
host with eight H100 (80 GB). Expected: 419M tokens (200 steps with 2,097,152 tokens); the held-out loss is lower at the
end than at the start. Nobody has run this config yet. docs/finetuning.md has its estimated memory and days.

LongLoRA (arXiv:2309.12307) found that adapters alone extend a context less well than full training, unless embeddings
and norms train, too. These stay frozen here. Compare the held-out losses with those of the full config before you rely
on adapters for the extension.

Our choice: adapters of all seven projections, frozen weights in bfloat16, and a single run at 512K, so that the
adapters belong to the checkpoint that you converted. A step has half the tokens of the full config's, at ten times the
learning rate, because adapters want a higher rate and smaller batches (Schulman et al., LoRA Without Regret, 2025). All
eight GPUs form one ring, and the sequences of a batch are microbatches.

    ringformer estimate --config=configs/llama3_8b_512k_lora_8xh100.py --target=8xH100
    ringformer data prepare --store=/data/long --source='jsonl:/data/long/*.jsonl' \\
        --tokenizer=/data/llama3.1-8b/tokenizer.json --held_out=0.01
    bash scripts/gpu_node.sh --target=8xH100 --config=configs/llama3_8b_512k_lora_8xh100.py \\
        --init_from=/data/llama3.1-8b --store=/data/long --tokenizer=/data/llama3.1-8b/tokenizer.json \\
        --run_dir=/data/runs/llama3.1-8b-512k-lora
    ringformer convert to-peft /data/runs/llama3.1-8b-512k-lora /data/llama3.1-8b-512k-adapters
"""

from ringformer import base_config


def get_config():
    config = base_config("llama3.1_8b")
    config.init_from = "models/llama3.1-8b"
    config.lora.rank = 16
    config.lora.base_dtype = "bfloat16"
    config.model.rope_scaling.kind = "none"
    config.model.rope_theta = 1.06e9
    config.run_dir = "runs/llama3_8b_512k_lora_8xh100"
    config.data.store = "data/long"
    config.data.source = "jsonl:data/long/*.jsonl"
    config.data.tokenizer = "models/llama3.1-8b/tokenizer.json"
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
