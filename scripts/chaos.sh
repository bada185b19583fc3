#!/usr/bin/env bash
# Break a small run on purpose, some minutes of it: kill it, signal it, flip bits of its checkpoints and of its token store.
# Prints a table; exit code 1 if anything was lost or went wrong in silence. Options are those of scripts/chaos.py.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${RINGFORMER_PYTHON:-}" ]; then
    bash scripts/setup_venv.sh test
fi
JAX_PLATFORMS=cpu exec "${RINGFORMER_PYTHON:-.venv/bin/python}" scripts/chaos.py "$@"
