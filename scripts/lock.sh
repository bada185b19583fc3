#!/usr/bin/env bash
# Write requirements/*.txt, the versions and hashes that scripts/setup_venv.sh installs, each for Python 3.11 (the oldest
# JAX) and 3.12 and newer (the newest one). What is pinned stays; bash scripts/lock.sh --upgrade moves it.
# Needs uv: pip install uv, or UV=/path/to/uv.
set -euo pipefail
cd "$(dirname "$0")/.."

# Left out, since the machine decides which build it gets, and the usual one has gigabytes: torch, by a marker that is
# never true. What it needs besides comes with it.
unlocked="torch ; sys_platform == 'none'"

# lock NAME EXTRA...: requirements/NAME.txt
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

# The site's tools alone: its pages are made from sources, nothing of ringformer is imported.
only_docs() {
    echo "requirements/docs.txt" >&2
    python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' |
        "${UV:-uv}" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
            --custom-compile-command "bash scripts/lock.sh" --constraints requirements/dev.txt \
            --output-file requirements/docs.txt -
}

upgrade=("$@")
hidden=()
for package in torch sympy mpmath networkx; do # with that marker
    hidden+=("--no-emit-package=$package")
done
mkdir -p requirements
lock dev dev # first: the others take its versions
upgrade=()
lock test test
only_docs
lock train train plot
