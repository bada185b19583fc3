#!/usr/bin/env bash
# Make .venv if there is none, install with the test extra, check format and types, build the site, run the suite. --slow
# also runs the long proofs. Other arguments go to pytest, and the site is not built: bash scripts/test.sh tests/ops -k zigzag
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup_venv.sh test
marker="not slow and not gpu and not results"
if [ "${1:-}" = "--slow" ]; then
    marker="not gpu and not results"
    shift
fi
.venv/bin/python -m ruff format --check --quiet . || { echo "not formatted: .venv/bin/python -m ruff format ." >&2 && exit 1; }
.venv/bin/python -m ruff check .
.venv/bin/python -m mypy
[ $# -gt 0 ] || bash scripts/docs.sh
# Most of the time is compilation, on one core a process: two processes.
exec .venv/bin/python -m pytest -n 2 -m "$marker" "$@"
