"""`long_config.py` at the size of a CPU: one or two steps at 256 and at 512 tokens."""

from experiments.extension.long_config import get_config as of_gpu


def get_config():
    config = of_gpu()
    config.data.min_length = 512
    config.model.compute_dtype = "float32"
    config.optimizer.warmup_steps = 1
    config.stages = (
        {"seq_len": 256, "batch_size": 2, "accumulate": 2, "steps": 2},
        {"seq_len": 512, "batch_size": 1, "accumulate": 1, "steps": 2},
    )
    return config
