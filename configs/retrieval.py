"""Line retrieval learned from scratch: a LLaMA of 0.2M parameters, then extended on the ring to 4K and 8K tokens.

Reproduces: the form of the paper's Figure 3 (accuracy of line retrieval over the context), not its numbers. Hardware:
none, simulated devices. One store has the records of all stages, and a stage takes those of its lengths: drills
without which lines are not matched, then few lines, then as many as 1K tokens hold, then 4K and 8K tokens with a larger
rope theta. Loss on the answers alone.

    bash scripts/retrieval.sh --short       # makes the records, and ends with the evaluation; between them:
    ringformer train --config=configs/retrieval.py
"""

from ringformer import base_config


def get_config():
    config = base_config("tiny")
    config.model.vocab_size = 1408
    config.model.hidden_size = 64
    config.model.intermediate_size = 128
    config.model.num_heads = 4  # with two, the match is found from one seed in three
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
    config.data.held_out = 0.03
    config.data.packing = "whole"
    config.cpu_devices = 2  # the script takes eight for the stages on the ring
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
    config.stages = (
        # First the nouns are brought to where they are compared, then they are compared: neither is found otherwise.
        # After more drills the second layer, too, looks at its neighbours alone, and from some seeds for good.
        short | {"steps": 200, "optimizer.learning_rate": 3e-3, "data.max_length": 100},
        short | {"steps": 1600, "data.min_length": 101, "data.max_length": 160},
        short | {"steps": 300, "data.min_length": 161, "data.max_length": 340},
        # Words are shared here, so that adjectives are learned. Lengths are mixed from here on, as many of each order
        # of magnitude: of the longest alone nothing is found, and what was found is lost.
        short | falling | {"steps": 700, "batch_size": 4, "data.min_length": 341, "data.max_length": 1024},
        ring
        | {
            "seq_len": 4096,
            "batch_size": 2,
            "steps": 60,
            "model.rope_theta": 4e6,
            "data.min_length": 1025,
            "data.max_length": 4096,
        },
        ring
        | {
            "seq_len": 8192,
            "batch_size": 1,
            "steps": 60,
            "model.rope_theta": 1.6e7,
            "data.min_length": 4097,
            "data.max_length": 8192,
        },
    )
    return config
