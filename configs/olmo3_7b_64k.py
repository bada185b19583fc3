"""OLMo 3 7B from 8K to 64K tokens on TPU v5p-128: the long-context stage of OLMo 3, with its mixture.

Reproduces: the last stage of OLMo 3 7B's pretraining (arXiv:2512.13961), with the values of Ai2's script in OLMo-core
(src/scripts/official/OLMo3/OLMo-3-1025-7B-long-context.py): 50B tokens at 65,536, 4,194,304 per step, a peak learning
rate of 2.0712e-4 after 200 steps of warm-up, falling to 0; YaRN with a factor of 8 over 8,192 tokens in the layers with
full attention, and none in those with a window; 34% of long and 66% of short documents by tokens, packed by best fit,
each attending to itself alone. With 66% of long documents, short tasks lost 2.5 points, and with 34% 0.8. ProLong
(arXiv:2410.02660) also mixes long documents, code and books, with short ones. Hardware: TPU v5p-128 (64 chips with 95
GB). Expected: 50.0B tokens (11,921 steps); the held-out loss at this context is lower at the end than at the start.
Nobody has run this config yet. docs/finetuning.md has its estimated memory and days.

Documents: OLMo 3's long ones are PDFs, without the fifth that gzip compresses most and the fifth that it compresses
least, and with synthetic tasks inside: counts of common words (CWE), and rewritten passages (REX). Its short ones are
those of midtraining. Provide documents like these as two stores. `data prepare` leaves out both fifths
(`--compressibility_tails`) and puts tasks of counting words, like CWE, into documents (`--retrieval_tasks`; two in each
is our choice). It has nothing like REX.

Differs from OLMo 3: the learning rate falls by a cosine instead of linearly, the optimizer starts anew, the embedding
is decayed, there is no z-loss, and computation is in bfloat16 instead of float8. OLMo-core splits a sequence over 8
GPUs. A v5p chip has the memory for a whole sequence, so there is no ring, and documents wait for no hop: `ringformer
plan` chose this mesh. On GPUs, XLA would compute the layers with a window. The estimate counts every sequence as one
document, the most that attention may have to compute.

Start with OLMo 3 7B as it was after midtraining: the script loads step 47,684 of stage 2.

    ringformer plan --model=olmo3_7b --target=v5p-128 --seq_len=65536 --batch_size=64
    ringformer estimate --config=configs/olmo3_7b_64k.py --target=v5p-128
    ringformer data prepare --store=/mnt/share/long --source='jsonl:/mnt/share/pdfs/*.jsonl' \\
        --tokenizer=/mnt/share/olmo3-7b/tokenizer.json --held_out=0.001 --compressibility_tails=0.2 --retrieval_tasks=2
    ringformer data prepare --store=/mnt/share/short --source='jsonl:/mnt/share/midtraining/*.jsonl' \\
        --tokenizer=/mnt/share/olmo3-7b/tokenizer.json --held_out=0.001
    bash scripts/tpu_pod.sh --name=olmo --zone=us-east5-a --accelerator=v5p-128 --nfs=10.0.0.2:/share \\
        --config=configs/olmo3_7b_64k.py --init_from=/mnt/share/olmo3-7b \\
        --config.data.mixture=/mnt/share/long:34,/mnt/share/short:66 \\
        --tokenizer=/mnt/share/olmo3-7b/tokenizer.json --run_dir=/mnt/share/runs/olmo3-7b-64k
"""

from ringformer import base_config


def get_config():
    config = base_config("olmo3_7b")
    config.model.rope_scaling.kind = "yarn"
    config.model.rope_scaling.factor = 8.0
    config.model.rope_scaling.original_max_position = 2**13
    config.run_dir = "runs/olmo3_7b_64k"
    config.data.mixture = "data/long:34,data/short:66"
    config.data.mixture_by = "tokens"
    config.data.packing = "whole"
    config.data.tokenizer = "models/olmo3-7b/tokenizer.json"
    config.data.held_out = 0.001
    config.mesh_dim = "1,64,1,1"
    config.model.remat = "attention"
    config.seq_len = 2**16
    config.batch_size = 64
    config.steps = 11_921
    config.optimizer.learning_rate = 2.0712e-4
    config.optimizer.warmup_steps = 200
    config.optimizer.final_fraction = 0.0
    config.eval_every = 500
    config.checkpoint_every = 100
    return config
