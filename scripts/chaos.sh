#!/usr/bin/env bash
# Break a small run on purpose for about a quarter of an hour: kill it, signal it, have its host fail, and flip bits of its
# checkpoints and token store. Also kill commands that answer prompts or convert a model.
# Prints a table; the exit code is 1 if anything was lost or went wrong silently. Takes the options of scripts/chaos.py.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${RINGFORMER_PYTHON:-}" ]; then
    bash scripts/setup_venv.sh test
fi
JAX_PLATFORMS=cpu exec "${RINGFORMER_PYTHON:-.venv/bin/python}" scripts/chaos.py "$@"
