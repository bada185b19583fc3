"""Line retrieval learned from scratch: a LLaMA of 0.2M parameters, then extended on the ring to 4K and 8K tokens.

Reproduces: the form of the paper's Figure 3 (accuracy of line retrieval over the context), not its numbers. Hardware:
none, simulated devices. One store has the records of all stages, and a stage takes those of its lengths: first
few lines at 1K tokens, then as many as fit, then 4K and 8K tokens with a larger rope theta. Loss on the answers alone.

    bash scripts/retrieval.sh --short       # makes the records, and ends with the evaluation; between them:
    ringformer train --config=configs/retrieval.py
"""

from ringformer.train.config import base_config

SHORT_RECORDS = 200
"""Tokens that a record of few lines has at most."""


def get_config():
    config = base_config("tiny")
    config.model.vocab_size = 1408
    config.model.hidden_size = 64
    config.model.intermediate_size = 128
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
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
    config.stages = (
        # The match is found with few lines; with many from the start it is not.
        {"seq_len": 1024, "batch_size": 2, "mesh_dim": "-1,1,1,1", "steps": 3000, "model.q_chunk": 64,
         "model.k_chunk": 64, "data.max_length": SHORT_RECORDS},
        {"seq_len": 1024, "batch_size": 4, "mesh_dim": "-1,1,1,1", "steps": 1000,
         "data.min_length": SHORT_RECORDS + 1, "data.max_length": 1024},
        {"seq_len": 4096, "batch_size": 2, "mesh_dim": "1,1,1,-1", "steps": 100, "model.rope_theta": 4e6,
         "data.min_length": 1025, "data.max_length": 4096},
        {"seq_len": 8192, "batch_size": 1, "mesh_dim": "1,1,1,-1", "steps": 60, "model.rope_theta": 1.6e7,
         "data.min_length": 4097},
    )  # fmt: skip
    return config
