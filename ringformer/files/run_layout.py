"""Names of what lies in the folder of a run, or of a converted model."""

CONFIG = "config.json"
"""The config of a run as it was resolved; of a converted model its architecture alone."""
METRICS = "metrics.jsonl"
"""The metrics of a run, one line per step; a folder without it is not a run."""
CHECKPOINTS = "checkpoints"
IDENTITY = "identity.json"
"""The record of what defines a run (`runs/record.py`)."""
CHANGES = "changes.jsonl"
STAGES = "stages.json"
"""The record of all stages, in the folder of a run in stages."""

HF_CONFIG = "hf_config.json"
"""Beside a model that came from Hugging Face: its config.json there."""
CARRIED = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files of a Hugging Face checkpoint that stay beside the model, so that it can be exported as it came."""
