"""Byte-level LLaMA of 0.3M parameters on the Python standard library, context 4096, on a ring of eight CPU devices.

This config shows all steps on a laptop. `bash scripts/quickstart.sh` first trains for 240 steps at a context of 512,
because attention learns faster with fewer keys, and then for the 120 steps of this config at 4096. The held-out loss
falls from 8.0 to about 2.7 bits per byte in six minutes on two cores. To train only this config, from random weights:

    ringformer train --config=configs/quickstart.py
    ringformer train --config=configs/quickstart.py --config.mesh_dim=1,2,2,2    # same losses, another mesh
"""

from ringformer import base_config


def get_config():
    config = base_config("tiny")
    config.data.store = "runs/data/stdlib-bytes"
    config.data.source = "stdlib"
    config.cpu_devices = 8
    config.mesh_dim = "1,1,1,8"
    config.seq_len = 4096
    config.batch_size = 2
    config.steps = 120
    config.eval_batches = 6
    config.model.compute_dtype = "float32"
    config.model.remat = "attention"
    config.model.init_std = (
        0.09  # 1/sqrt(D): at this width, with 0.02 the layers contribute nothing for a hundred steps
    )
    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 20
    return config
