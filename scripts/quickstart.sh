#!/usr/bin/env bash
# Get from a fresh clone to a trained model: make .venv, install ringformer, train on a ring of eight simulated CPU
# devices, show that ring, blockwise and vanilla attention agree, and generate text. Writes runs/quickstart/.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup_venv.sh
exec .venv/bin/python scripts/quickstart.py "$@"
