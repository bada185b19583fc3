"""Names of the files and folders in the folder of a run, or of a converted model."""

CONFIG = "config.json"
"""The resolved config of a run, or the architecture of a converted model."""
BEGINS = "texts_begin"
"""Key of a run's config.json: true if its texts begin with the tokenizer's BOS token, null if its stores are of an
earlier version, which did not record it."""
METRICS = "metrics.jsonl"
"""The metrics of a run, one line per step; a folder without it is not a run."""
CHECKPOINTS = "checkpoints"
IDENTITY = "identity.json"
"""The record of what defines a run (`runs/record.py`)."""
CHANGES = "changes.jsonl"
HOST_FAILURE = "host_failure.json"
"""The failure of the host that ended the run last: its step, its error and the traceback (`train/host_failure.py`)."""
EVALS = "evals"
CASES = "cases.jsonl"
"""The cases of an evaluation, in its folder in EVALS (`evals/case_file.py`)."""
RESULTS = "results.json"
"""The results of lm-evaluation-harness, in its folder in EVALS."""
REPORT = "report"
"""The folder in EVALS with the table of all evaluations."""
STAGES = "stages.json"
"""The record of all stages, in the folder of a run in stages."""

HF_CONFIG = "hf_config.json"
"""The config.json of a model that was converted from Hugging Face, kept beside it."""
CARD = "README.md"
BASE_CARD = "base_model_card.md"
"""The card of a model that was converted from Hugging Face, kept beside it and beside its exports."""
LICENCES = BASE_CARD, "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "USE_POLICY.md"
"""Files of a model that bind whoever passes it on."""
CARRIED = (
    *LICENCES,
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files of a Hugging Face checkpoint that are kept beside the model, so that an export returns them unchanged."""
