"""Released models, tokenizers and chat templates: `bash scripts/fetch_released.sh` gets their archives."""
