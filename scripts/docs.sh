#!/usr/bin/env bash
# Build the documentation site into build/site; warnings are errors. Makes .venv-docs from requirements/docs.txt, whose
# versions and hashes are locked. Open build/site/index.html: the pages need no server and no network.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv-docs/bin/python
lock=requirements/docs.txt
if [ ! -e .venv-docs/.installed ] || [ "$lock" -nt .venv-docs/.installed ]; then
    "${PYTHON:-python3}" -m venv .venv-docs
    "$python" -m pip --disable-pip-version-check install --quiet --require-hashes --no-deps --requirement "$lock"
    touch .venv-docs/.installed
fi
# The theme's own advertisement is no warning of ours.
NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --strict
