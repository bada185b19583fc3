#!/usr/bin/env bash
# From a fresh clone to a trained model: make .venv, install, train on a ring of eight simulated CPU devices, show that
# ring, blockwise and vanilla attention agree, and what the model says. Writes runs/quickstart/.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup_venv.sh
exec .venv/bin/python scripts/quickstart.py "$@"
