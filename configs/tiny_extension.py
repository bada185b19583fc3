"""Context extension end to end on a laptop: a byte-level LLaMA from 256 to 1024 to 2048 tokens, on eight CPU devices.

Reproduces: the form of a context extension, but no published numbers. Each stage has a longer context and a larger rope
theta than the previous stage, and starts with its parameters. Hardware: none, eight simulated devices, with a different
mesh in each stage. Expected: it takes minutes on two cores, and in each stage the held-out loss at the stage's context
is lower at the end than at the start. The table at the end, also in runs/tiny_extension/stages.json, shows both losses.

    ringformer train --config=configs/tiny_extension.py
"""

from ringformer import base_config


def get_config():
    config = base_config("tiny")
    config.run_dir = "runs/tiny_extension"
    config.data.store = "runs/data/stdlib-bytes"
    config.data.source = "stdlib"
    config.cpu_devices = 8
    config.eval_batches = 6
    config.checkpoint_every = 20
    config.model.compute_dtype = "float32"
    config.model.remat = "attention"
    config.model.init_std = (
        0.09  # 1/sqrt(D): at this width, with 0.02 the layers contribute nothing for a hundred steps
    )
    config.optimizer.warmup_steps = 10
    config.optimizer.learning_rate = 3e-3
    config.stages = (
        {"seq_len": 256, "batch_size": 16, "mesh_dim": "1,8,1,1", "steps": 100, "optimizer.learning_rate": 6e-3},
        {"seq_len": 1024, "batch_size": 4, "mesh_dim": "1,2,1,4", "steps": 40, "model.rope_theta": 4e4},
        {"seq_len": 2048, "batch_size": 2, "mesh_dim": "1,1,1,8", "steps": 30, "model.rope_theta": 8e4},
    )
    return config
