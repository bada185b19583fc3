#!/usr/bin/env bash
# Make .venv if it does not exist, and install ringformer into it: scripts/setup_venv.sh [EXTRA]. EXTRA is an extra of
# pyproject.toml (train, test, docs, dev, cuda, tpu, ...; default: train). Other scripts use this script.
# Versions and hashes come from requirements/test.txt, dev.txt or cuda.txt for these extras, and from train.txt for the others
# (scripts/lock.sh writes these files). pip adds packages whose build depends on the machine: TPU libraries, torch.
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
    test | dev | cuda) lock=requirements/$extra.txt ;;
    *) lock=requirements/train.txt ;;
esac
# Do nothing if this extra was already installed from the current files.
stamp=.venv/.ringformer-$extra
if [ ! -e "$stamp" ] || [ setup.py -nt "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ "$lock" -nt "$stamp" ]; then
    echo "installing ringformer[$extra] into .venv (a minute or two)" >&2
    pip=(.venv/bin/python -m pip --disable-pip-version-check install --quiet)
    "${pip[@]}" --require-hashes --no-deps --requirement "$lock"
    case "$extra" in
        train) "${pip[@]}" --no-build-isolation --no-deps --editable . ;;
        *) "${pip[@]}" --no-build-isolation --editable ".[train,$extra]" ;; # with packages whose build depends on the machine
    esac
    touch "$stamp"
fi
