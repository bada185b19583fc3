"""Training on two cores: steps of one sequence of 2,048 tokens. The study adds the model, the data and the shifts."""

from ringformer import base_config


def get_config():
    config = base_config("tiny")  # init_from supplies the sizes
    config.seq_len = 2048
    config.batch_size = 1
    config.steps = 64
    config.mesh_dim = "1,1,1,1"
    config.data.min_length = 2048
    config.model.compute_dtype = "float32"
    config.optimizer.learning_rate = 1e-4
    config.optimizer.warmup_steps = 8
    config.optimizer.weight_decay = 0.0
    config.eval_every = 32
    config.eval_batches = 8
    config.checkpoint_every = 32
    config.keep_checkpoints = 1
    return config
