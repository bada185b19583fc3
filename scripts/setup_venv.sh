#!/usr/bin/env bash
# Make .venv if there is none and install ringformer into it: scripts/setup_venv.sh [EXTRA], an extra of pyproject.toml
# (train, test, docs, dev, cuda, tpu, ...; without: what trains, and plots its losses). Used by the others.
# Versions and hashes are those of requirements/test.txt or dev.txt for these two, else train.txt (scripts/lock.sh writes them).
# pip adds what they leave out, since the machine decides its build: libraries for CUDA and TPU, torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra=${1:-train}
python=${PYTHON:-python3}
if [ ! -x .venv/bin/python ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "ringformer needs Python 3.11 or newer, $python is $("$python" --version); set PYTHON=/path/to/python3.12" >&2
        exit 1
    }
    "$python" -m venv .venv
fi
case "$extra" in
    test | dev) lock=requirements/$extra.txt ;;
    *) lock=requirements/train.txt ;;
esac
# Installed already, with this extra and from these files? Then there is nothing to do.
stamp=.venv/.ringformer-$extra
if [ ! -e "$stamp" ] || [ setup.py -nt "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ "$lock" -nt "$stamp" ]; then
    echo "installing ringformer[$extra] into .venv (a minute or two)" >&2
    pip=(.venv/bin/python -m pip --disable-pip-version-check install --quiet)
    "${pip[@]}" --require-hashes --no-deps --requirement "$lock"
    case "$extra" in
        train) "${pip[@]}" --no-build-isolation --no-deps --editable . ;;
        *) "${pip[@]}" --no-build-isolation --editable ".[train,$extra]" ;; # and what the machine decides
    esac
    touch "$stamp"
fi
