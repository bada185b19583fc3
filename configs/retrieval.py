"""Line retrieval, learned from scratch and extended on the ring: 1K to 4K to 8K tokens."""

from ringformer.train.config import base_config


def get_config():
    config = base_config("tiny")
    config.model.vocab_size = 1408
    config.model.hidden_size = 64
    config.model.intermediate_size = 128
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.head_dim = 32
    config.model.tie_embeddings = True
    config.model.init_std = 0.125  # 1/sqrt(D)
    config.model.compute_dtype = "float32"
    config.model.remat = "none"
    config.run_dir = "runs/retrieval/run"
    config.data.store = "runs/retrieval/store"
    config.data.tokenizer = "runs/retrieval/tokenizer"
    config.data.format = "messages"
    config.data.template = "tokenizer"
    config.data.clean = ""
    config.data.held_out = 0.01
    config.data.packing = "whole"
    config.eval_batches = 2
    config.optimizer.b2 = 0.98
    config.optimizer.learning_rate = 2e-3
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_steps = 50
    return config
