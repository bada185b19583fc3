"""SmolLM2-135M-Instruct to 512 tokens in two stages: the form of `configs/llama3_8b_512k_8xh100.py`, for a CPU."""

from ringformer import base_config


def get_config():
    config = base_config("tiny")
    config.init_from = "models/smol"
    config.run_dir = "runs/ours"
    config.data.store = "stores/documents"
    config.data.tokenizer = "models/smol/tokenizer.json"
    config.cpu_devices = 4
    config.mesh_dim = "1,1,1,-1"
    config.batch_size = 2
    config.eval_batches = 1
    config.checkpoint_every = 1
    config.keep_checkpoints = 1
    config.model.compute_dtype = "float32"
    config.model.remat = "attention"
    config.optimizer.learning_rate = 1e-4
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_steps = 1
    config.stages = (
        {"seq_len": 256, "steps": 2, "checkpoint_every": 0, "model.rope_theta": 2e5},
        {"seq_len": 512, "steps": 3, "model.rope_theta": 4e5},
    )
    return config
