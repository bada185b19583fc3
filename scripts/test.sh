#!/usr/bin/env bash
# Make .venv if it does not exist, install the test extra, check format and types, build the site, and run the suite. --slow
# also runs the slow tests, --measure prints the CPU-seconds of all tests and the dearest twenty. Other arguments, and
# --measure, go to pytest; the site is not built then: bash scripts/test.sh tests/ops -k zigzag
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup_venv.sh test
marker="not slow and not gpu"
if [ "${1:-}" = "--slow" ]; then
    marker="not gpu"
    shift
fi
[ $# -eq 0 ] || marker="$marker and not results" # committed results belong to the site's pages
.venv/bin/python -m ruff format --check --quiet . || { echo "not formatted: .venv/bin/python -m ruff format ." >&2 && exit 1; }
.venv/bin/python -m ruff check .
.venv/bin/python -m mypy & # beside the site: each uses one core
types=$!
[ $# -gt 0 ] || bash scripts/docs.sh --site
wait "$types" # exits with the code of mypy
bash scripts/fetch_released.sh || echo "tests/released will fail: it reads these archives" >&2
# Most of the time is compilation, which uses one core per process, so two processes run. Each begins with half of the
# files, so that a file's fixtures are made once, and takes tests of the other when it has none left.
exec .venv/bin/python -m pytest -n 2 --dist worksteal -m "$marker" "$@"
