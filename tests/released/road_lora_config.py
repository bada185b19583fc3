"""SmolLM2-135M-Instruct to 512 tokens by adapters: the form of `configs/llama3_8b_512k_lora_8xh100.py`, for a CPU."""

from tests.released.road_config import get_config as all_weights


def get_config():
    config = all_weights()
    config.stages = ()
    config.run_dir = "runs/ours-lora"
    config.lora.rank = 8
    config.lora.base_dtype = "bfloat16"
    config.model.rope_theta = 4e5
    config.seq_len = 512
    config.steps = 2
    config.optimizer.learning_rate = 2e-3
    return config
