#!/usr/bin/env bash
# Make .venv if there is none and install ringformer into it: scripts/setup_venv.sh [EXTRA]. Sourced by the others.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra=${1:-}
python=${PYTHON:-python3}
if [ ! -x .venv/bin/python ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "ringformer needs Python 3.11 or newer, $python is $("$python" --version); set PYTHON=/path/to/python3.12" >&2
        exit 1
    }
    "$python" -m venv .venv
fi
# Installed already, with this extra and from this setup.py? Then there is nothing to do.
stamp=".venv/.ringformer-${extra:-core}"
if [ ! -e "$stamp" ] || [ setup.py -nt "$stamp" ]; then
    echo "installing ringformer into .venv (a minute or two)" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".${extra:+[$extra]}"
    touch "$stamp"
fi
