#!/usr/bin/env bash
# Run the checks that take too long for every push, about an hour: bash scripts/check_all.sh [PART ...]. CI runs them nightly.
#
#   schemas   workflows, issue forms, citation, commit hooks and the justfile are valid for their tools
#   package   a release, built from a clone of the last commit and used in empty environments (scripts/release.sh)
#   docs      the site; warnings are errors
#   oldest    format, lint, types and the suite on Python 3.11 with the oldest JAX of the range
#   newest    the suite on Python 3.12 with the newest JAX that the lock file has; types are those of the oldest
#
# Without a PART, all parts run. The variables OLDEST and NEWEST name the Python interpreters (python3.11, python3.12).
# Environments are made in build/check and reused.
set -euo pipefail
cd "$(dirname "$0")/.."
repository=$PWD
work=$repository/build/check
mkdir -p "$work"

# found VERSION VARIABLE COMMAND...: print the first of the commands that is this version of Python
found() {
    local version=$1 variable=$2 candidate
    shift 2
    for candidate in "$@"; do
        if [ -n "$candidate" ] && [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$version" ]; then
            echo "$candidate"
            return
        fi
    done
    echo "check_all.sh: Python $version not found; set $variable=/path/to/python$version" >&2
    return 1
}

say() {
    echo
    echo "== $*"
}

schemas() {
    say "schemas"
    bash scripts/setup_venv.sh dev
    .venv/bin/python -m pytest tests/test_project_files.py
    .venv/bin/pre-commit validate-config
    .venv/bin/just --summary >/dev/null
}

package() {
    say "wheel and sdist"
    PYTHON=$oldest bash scripts/release.sh
}

docs() {
    say "the site"
    bash scripts/docs.sh
}

# suite NAME PYTHON COMMAND...: run a command in a copy of the committed files, in an environment with this Python
suite() {
    local folder=$work/$1 version command=("${@:3}")
    say "$1: the suite on $2"
    if [ ! -d "$folder" ]; then
        git clone --quiet "$repository" "$folder"
    fi
    git -C "$folder" fetch --quiet origin HEAD && git -C "$folder" reset --quiet --hard FETCH_HEAD
    (cd "$folder" && PYTHON=$2 bash scripts/setup_venv.sh test)
    version=$("$folder/.venv/bin/python" -c 'import jax, sys; print(*sys.version_info[:2], jax.__version__)')
    echo "Python and JAX: $version"
    (cd "$folder" && "${command[@]}")
}

tests=".venv/bin/python -m pytest -n 2 --dist worksteal -m 'not slow and not gpu'"
oldest=$(found 3.11 OLDEST "${OLDEST:-}" python3.11 python3)
parts=("$@")
[ $# -gt 0 ] || parts=(schemas package docs oldest newest)
for part in "${parts[@]}"; do
    case "$part" in
        schemas | package | docs) "$part" ;;
        oldest) suite oldest "$oldest" bash scripts/test.sh ;;
        newest)
            newest=$(found 3.12 NEWEST "${NEWEST:-}" python3.12 python3) # apart, so that it ends the script if there is none
            suite newest "$newest" bash -c "bash scripts/fetch_released.sh && $tests"
            ;;
        *) echo "check_all.sh: unknown part $part; the parts are schemas, package, docs, oldest and newest" >&2 && exit 2 ;;
    esac
done
say "all is well: ${parts[*]}"
