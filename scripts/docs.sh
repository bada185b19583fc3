#!/usr/bin/env bash
# Compare committed results with the pages, list those whose closed form has moved since, and build the documentation site into
# build/site; warnings are errors. --site only builds it: scripts/test.sh compares results beside its other tests. Makes .venv-docs from requirements/docs.txt, whose versions
# and hashes are locked. The pages can be opened from disk (build/site/index.html) and need no network. Their search needs a
# server: python3 -m http.server --directory build/site
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv-docs/bin/python
lock=requirements/docs.txt
if [ ! -e .venv-docs/.installed ] || [ "$lock" -nt .venv-docs/.installed ]; then
    "${PYTHON:-python3}" -m venv .venv-docs
    "$python" -m pip --disable-pip-version-check install --quiet --require-hashes --no-deps --requirement "$lock"
    touch .venv-docs/.installed
fi
if [ "${1:-}" != "--site" ] && [ -e .venv/bin/pytest ]; then
    .venv/bin/python -m pytest -q -m results tests/results
    .venv/bin/python benchmarks/moved_results.py
fi
# The variable turns off an advertisement of the theme, which would count as a warning.
NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --strict
