"""Tiny fine-tuning of scripts/demo_finetune.sh: a LLaMA-3.1-style model from 256 to 1024 tokens, on chats.

Reproduces: the steps of a real fine-tuning, but no published numbers. Hardware: none, eight simulated devices.
Expected: the held-out loss of answers falls from the start of the first stage to the end of the last stage
(`tests/test_demo.py` tests a short form). The model's shape and rope scaling match the checkpoint that the script
makes.

    bash scripts/demo_finetune.sh       # runs: ringformer train --config=configs/demo_finetune.py
"""

from ringformer import base_config


def get_config():
    config = base_config("tiny")
    config.model.vocab_size = 1024
    config.model.norm_eps = 1e-5
    config.model.compute_dtype = "float32"
    config.model.remat = "attention"
    config.model.rope_scaling.kind = "llama3"
    config.model.rope_scaling.factor = 4.0
    config.model.rope_scaling.original_max_position = 64
    config.run_dir = "runs/demo_finetune/run"
    config.init_from = "runs/demo_finetune/converted"
    config.data.store = "runs/demo_finetune/store"
    config.data.source = "json:runs/demo_finetune/sharegpt.json"
    config.data.tokenizer = "runs/demo_finetune/converted"
    config.data.format = "sharegpt"
    config.data.template = "llama3"
    config.data.chat_length = 1024
    config.data.held_out = 0.1
    config.data.packing = "whole"
    config.cpu_devices = 8
    config.steps = 60
    config.eval_batches = 6
    config.checkpoint_every = 20
    config.optimizer.warmup_steps = 5
    config.optimizer.learning_rate = 3e-3
    config.stages = (
        {"seq_len": 256, "batch_size": 16, "mesh_dim": "1,8,1,1"},
        {"seq_len": 512, "batch_size": 8, "mesh_dim": "1,2,1,4", "model.rope_scaling.factor": 8.0},
        {"seq_len": 1024, "batch_size": 4, "mesh_dim": "1,1,1,8", "model.rope_scaling.factor": 16.0},
    )
    return config
