"""One step in float32, which a ring and one device take alike. The study adds the model, the data and the devices."""

from ringformer import base_config


def get_config():
    config = base_config("tiny")  # init_from supplies the sizes
    config.batch_size = 1
    config.steps = 1
    config.model.compute_dtype = "float32"
    config.optimizer.warmup_steps = 0
    config.eval_every = 0
    config.checkpoint_every = 0
    return config
