"""Training on one H100 or H200: steps of 131,072 tokens at 16K, 32K and 64K. The study adds the model and the data."""

from ringformer import base_config

TOKENS = 2**17
"""Tokens of a step."""


def get_config():
    config = base_config("tiny")  # init_from supplies the sizes
    config.mesh_dim = "1,1,1,1"
    config.data.min_length = 2**14
    config.model.remat = "attention"
    config.optimizer.learning_rate = 1e-4
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_steps = 4
    config.optimizer.weight_decay = 0.0
    config.keep_checkpoints = 1
    config.stages = tuple(
        {"seq_len": seq_len, "batch_size": TOKENS // seq_len, "accumulate": TOKENS // seq_len, "steps": steps}
        for seq_len, steps in ((2**14, 16), (2**15, 8), (2**16, 10))
    )
    return config
