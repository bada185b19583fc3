#!/usr/bin/env bash
# Write requirements/*.txt: the versions and hashes that scripts/setup_venv.sh installs. Each file is for Python 3.11 (with
# the oldest JAX) and for 3.12 and newer (with the newest JAX). Pinned versions stay; bash scripts/lock.sh --upgrade
# updates them. Needs uv: pip install uv, or UV=/path/to/uv.
set -euo pipefail
cd "$(dirname "$0")/.."

# torch is not locked, because its build depends on the machine and the usual build has gigabytes. A marker that is never
# true leaves it out. Its dependencies are installed together with it.
unlocked="torch ; sys_platform == 'none'"

# lock NAME EXTRA...: write requirements/NAME.txt
lock() {
    local name=$1 extra options=()
    shift
    for extra in "$@"; do
        options+=("--extra=$extra")
    done
    [ "$name" = dev ] || options+=(--constraints requirements/dev.txt)
    echo "requirements/$name.txt" >&2
    "${UV:-uv}" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
        --custom-compile-command "bash scripts/lock.sh" --group build "${options[@]}" "${upgrade[@]}" \
        --override <(echo "$unlocked") "${hidden[@]}" --output-file "requirements/$name.txt" pyproject.toml
}

# Lock only the site's tools: its pages are generated from source files, without importing ringformer.
only_docs() {
    echo "requirements/docs.txt" >&2
    python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' |
        "${UV:-uv}" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
            --custom-compile-command "bash scripts/lock.sh" --constraints requirements/dev.txt \
            --output-file requirements/docs.txt -
}

upgrade=("$@")
hidden=()
for package in torch sympy mpmath networkx; do # packages with that marker
    hidden+=("--no-emit-package=$package")
done
mkdir -p requirements
lock dev dev # first, because the other files use its versions
upgrade=()
lock test test
only_docs
lock train train plot
lock cuda train plot cuda
