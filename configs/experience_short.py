"""Control of configs/experience.py: the same model, trained on as many tokens, on chains of four episodes alone.

Reproduces: nothing of the paper; it shows whether long training is needed, or only a long prompt. Hardware: none.

    bash scripts/experience.sh --controls
    ringformer train --config=configs/experience_short.py
"""

from experience import get_config as get_recipe


def get_config():
    config = get_recipe()
    config.run_dir = "runs/experience/short"
    tokens = sum(stage["steps"] * stage["batch_size"] * stage["seq_len"] for stage in config.stages)
    short = dict(config.stages[0])
    config.stages = (short | {"steps": tokens // (short["batch_size"] * short["seq_len"])},)
    return config
