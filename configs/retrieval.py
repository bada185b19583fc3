"""Line retrieval from scratch: a LLaMA of 0.2M parameters, extended on the ring to 4K, 8K, 16K and 32K tokens.

Reproduces: the form of the paper's Figure 3 (accuracy of line retrieval by context), not its numbers. Hardware: none,
simulated devices. One store has the records of all stages, and each stage selects records by length. The first stage
has drills, without which the model does not learn to match lines. Then come records of a few lines, records that fill
1K tokens, and records of 4K and 8K tokens with a larger rope theta. Only the answers are trained on.

    bash experiments/retrieval.sh --short       # makes the records, trains with the next command, and evaluates
    ringformer train --config=configs/retrieval.py
"""

from ringformer import base_config


def get_config():
    config = base_config("tiny")
    config.model.vocab_size = 1408
    config.model.hidden_size = 64
    config.model.intermediate_size = 128
    config.model.num_heads = 4  # with two heads, one seed in three learns the match
    config.model.num_kv_heads = 4
    config.model.head_dim = 32
    config.model.tie_embeddings = True
    config.model.init_std = 0.125  # 1/sqrt(D): with 0.02 nothing is learned
    config.model.compute_dtype = "float32"
    config.model.remat = "none"
    config.run_dir = "runs/retrieval/run"
    config.data.store = "runs/retrieval/store"
    config.data.source = "jsonl:runs/retrieval/records.jsonl"
    config.data.tokenizer = "runs/retrieval/tokenizer"
    config.data.format = "messages"
    config.data.template = "tokenizer"
    config.data.clean = ""
    config.data.held_out = 0.05
    config.data.packing = "whole"
    config.cpu_devices = 2  # the script uses eight for the stages on the ring
    config.eval_batches = 1
    config.checkpoint_every = 250
    config.optimizer.b2 = 0.98
    config.optimizer.learning_rate = 2e-3
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_steps = 20
    config.model.rope_theta = 1e6
    short = {"seq_len": 1024, "batch_size": 2, "mesh_dim": "-1,1,1,1", "model.q_chunk": 64, "model.k_chunk": 64}
    falling = {"optimizer.schedule": "cosine"}
    ring = falling | {"mesh_dim": "1,1,1,-1", "optimizer.learning_rate": 1e-3}

    def extended(tokens, rope_theta, steps, batch_size=1):
        shortest = 1025 if tokens == 4096 else tokens // 2 + 1
        lengths = {"seq_len": tokens, "data.min_length": shortest, "data.max_length": tokens}
        return ring | lengths | {"model.rope_theta": rope_theta, "steps": steps, "batch_size": batch_size}

    config.stages = (
        # The first stage teaches the model to copy nouns to the positions where the second stage compares them. Without
        # the first stage, the model learns neither. After more drills, the second layer attends only to neighbouring
        # tokens, and for some seeds this does not change.
        short | {"steps": 200, "optimizer.learning_rate": 3e-3, "data.max_length": 100},
        short | {"steps": 1600, "data.min_length": 101, "data.max_length": 160},
        short | {"steps": 300, "data.min_length": 161, "data.max_length": 340},
        # From here on, lines share words, so that adjectives are learned. Lengths are mixed, evenly over orders of
        # magnitude, because with only the longest records the model learns nothing and loses what it has learned.
        short | falling | {"steps": 700, "batch_size": 4, "data.min_length": 341, "data.max_length": 1024},
        # With theta 1e6, five of the 16 frequencies turn less than a radian in 8K tokens, with 1.6e7 seven, with 1e9
        # nine: only these compare words over that distance. With 1.6e7, one answer in ten was wrong at 8K.
        extended(4096, 1e8, 100, batch_size=2),
        extended(8192, 1e9, 80),
        extended(16_384, 1e10, 120),
        extended(32_768, 1e11, 80),
    )
    return config
