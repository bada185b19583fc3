"""LLaMA-3.1 8B Instruct to 1M tokens on 64xH100, in one step with YaRN: UltraLong's continued pretraining.

Reproduces: UltraLong's continued pretraining at 1M (Xu et al., arXiv:2504.06214): LLaMA-3.1 8B Instruct in a single
step from 128K on 1B tokens, at a learning rate of 3e-5. YaRN has a factor of 128 over 8,192 tokens, with alpha 1 and
beta 4. Documents are joined by the characters `<s>` in place of the end token, and tokens attend across them. Hardware:
64 H100 (80 GB), eight nodes with 1 TB of memory. Expected: 1.01B tokens (120 steps with 8,388,608 tokens); the held-out
loss is lower at the end than at the start. Nobody has run this config yet. docs/finetuning.md has its estimated memory
and days.

Documents: UltraLong takes fewer documents below 4K tokens and more above 8K, in each domain. Provide such documents
(`data.source`). UltraLong's instruction tuning, on short data, is not part of this config.

Our choice: 8 sequences per step, which have as many tokens as the 2 of UltraLong's run at 4M; a constant learning rate
after a warm-up; YaRN's usual factor for attention; and the mesh, which `ringformer plan` chose: each node is a ring
with one sequence.

    ringformer plan --model=llama3.1_8b --target=64xH100 --seq_len=1048576 --batch_size=8
    ringformer estimate --config=configs/ultralong_8b_1m.py --target=64xH100
    ringformer data prepare --store=/share/long --source='jsonl:/share/long/*.jsonl' \\
        --tokenizer=/share/llama3.1-8b-instruct/tokenizer.json --held_out=0.01 --separator='<s>' --begin=false
    sbatch --nodes=8 scripts/slurm.sh --target=64xH100 --config=configs/ultralong_8b_1m.py \\
        --init_from=/share/llama3.1-8b-instruct --store=/share/long \\
        --tokenizer=/share/llama3.1-8b-instruct/tokenizer.json --run_dir=/share/runs/ultralong-8b-1m
"""

from ringformer import base_config


def get_config():
    config = base_config("llama3.1_8b")
    config.model.rope_scaling.kind = "yarn"
    config.model.rope_scaling.factor = 128.0
    config.model.rope_scaling.original_max_position = 2**13
    config.model.rope_scaling.beta_slow = 1.0
    config.model.rope_scaling.beta_fast = 4.0
    config.run_dir = "runs/ultralong_8b_1m"
    config.data.store = "data/long"
    config.data.source = "jsonl:data/long/*.jsonl"
    config.data.tokenizer = "models/llama3.1-8b-instruct/tokenizer.json"
    config.data.held_out = 0.01
    config.data.separator = "<s>"  # ordinary text to this tokenizer
    config.data.begin = "false"  # the separator alone joins documents, as in the paper
    config.data.packed_attention = "sequence"
    config.mesh_dim = "1,8,1,8"
    config.model.remat = "attention"
    config.model.offload = True
    config.seq_len = 2**20
    config.batch_size = 8
    config.steps = 120
    config.optimizer.learning_rate = 3e-5
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_steps = 5
    config.eval_every = 20
    config.eval_batches = 1  # 1% of the tokens is one batch
    config.checkpoint_every = 10
    return config
