#!/usr/bin/env bash
# Break a small run on purpose for a few minutes: kill it, signal it, and flip bits of its checkpoints and token store.
# Prints a table; the exit code is 1 if anything was lost or went wrong silently. Takes the options of scripts/chaos.py.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${RINGFORMER_PYTHON:-}" ]; then
    bash scripts/setup_venv.sh test
fi
JAX_PLATFORMS=cpu exec "${RINGFORMER_PYTHON:-.venv/bin/python}" scripts/chaos.py "$@"
