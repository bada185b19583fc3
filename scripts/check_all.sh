#!/usr/bin/env bash
# Run the checks that take too long for CI, about an hour: bash scripts/check_all.sh [PART ...]
#
#   schemas   workflows, issue forms, citation, commit hooks and the justfile are valid for their tools
#   package   wheel and sdist, each installed into an empty environment: version, configs, the README's program, training
#   docs      the site; warnings are errors
#   oldest    format, lint, types and the suite on Python 3.11 with the oldest JAX of the range
#   newest    the suite on Python 3.12 with the newest JAX that the lock file has
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
    .venv/bin/python -m pytest -q tests/test_project_files.py
    .venv/bin/pre-commit validate-config
    .venv/bin/just --summary >/dev/null
}

op_alone=$(
    cat <<'END'
import re
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import ringformer

repository = Path(sys.argv[1])
assert not Path(ringformer.__file__).is_relative_to(repository / "ringformer"), ringformer.__file__
assert f'version = "{version("ringformer")}"' in (repository / "pyproject.toml").read_text()
snippets = re.findall(r"^```python\n(.*?)^```$", (repository / "README.md").read_text(), re.MULTILINE | re.DOTALL)
assert snippets, "the README shows the op"
exec(compile(snippets[0], "README.md", "exec"), {})
import ringformer.models.llama

extra = [name for name in ("datasets", "pyarrow", "matplotlib", "sentencepiece", "torch") if find_spec(name)]
assert not extra, f"the op and the model need no {extra}"
print("the README's op runs, with the base alone")
END
)

# tried NAME FILE: install a wheel or an sdist as a user would, with the locked versions, and use it outside the clone
tried() {
    local folder=$work/$1 file=$2 python=$work/$1/venv/bin/python
    say "$1: $(basename "$file")"
    rm -rf "$folder"
    mkdir -p "$folder/home"
    "$oldest" -m venv "$folder/venv"
    sed -n 's/^\([a-z].*\) \\$/\1/p' requirements/train.txt >"$folder/versions.txt" # constraints may not have hashes
    "$python" -m pip --disable-pip-version-check install --quiet --constraint "$folder/versions.txt" setuptools
    "$python" -m pip --disable-pip-version-check install --quiet --constraint "$folder/versions.txt" \
        --no-build-isolation "$file"
    (cd "$folder/home" && JAX_PLATFORMS=cpu PYTHONPATH='' "$python" -W error - "$repository" <<<"$op_alone")
    "$python" -m pip --disable-pip-version-check install --quiet --require-hashes --no-deps -r requirements/train.txt
    "$python" -m pip --disable-pip-version-check install --quiet --no-build-isolation "${file}[train,plot]"
    "$python" -m pip check
    (
        cd "$folder/home"
        export JAX_PLATFORMS=cpu PATH="$folder/venv/bin:$PATH" PYTHONPATH=
        ringformer --version
        ringformer configs list
        ringformer configs copy quickstart
        ringformer train --config=configs/quickstart.py --config.steps=3 --config.seq_len=256 --config.run_dir=run \
            --config.optimizer.warmup_steps=1 --config.eval_batches=1
        test -s run/metrics.jsonl
        ringformer configs copy gpu_node.sh
        bash scripts/gpu_node.sh --config=configs/quickstart.py --run_dir=run --skip-estimate --dry-run
    )
}

package() {
    say "wheel and sdist"
    bash scripts/setup_venv.sh dev
    rm -rf "$work/dist"
    .venv/bin/python -m build --no-isolation --outdir "$work/dist" . >"$work/build.log" 2>&1 ||
        { cat "$work/build.log" >&2 && return 1; }
    tried wheel "$work"/dist/*.whl
    tried sdist "$work"/dist/*.tar.gz
}

docs() {
    say "the site"
    bash scripts/docs.sh
}

# suite NAME PYTHON: run scripts/test.sh in a copy of the committed files, in an environment with this Python
suite() {
    local folder=$work/$1 version
    say "$1: the suite on $2"
    if [ ! -d "$folder" ]; then
        git clone --quiet "$repository" "$folder"
    fi
    git -C "$folder" fetch --quiet origin HEAD && git -C "$folder" reset --quiet --hard FETCH_HEAD
    (cd "$folder" && PYTHON=$2 bash scripts/setup_venv.sh test)
    version=$("$folder/.venv/bin/python" -c 'import jax, sys; print(*sys.version_info[:2], jax.__version__)')
    echo "Python and JAX: $version"
    bash "$folder/scripts/test.sh"
}

oldest=$(found 3.11 OLDEST "${OLDEST:-}" python3.11 python3)
parts=("$@")
[ $# -gt 0 ] || parts=(schemas package docs oldest newest)
for part in "${parts[@]}"; do
    case "$part" in
        schemas | package | docs) "$part" ;;
        oldest) suite oldest "$oldest" ;;
        newest) suite newest "$(found 3.12 NEWEST "${NEWEST:-}" python3.12 python3)" ;;
        *) echo "check_all.sh: unknown part $part; the parts are schemas, package, docs, oldest and newest" >&2 && exit 2 ;;
    esac
done
say "all is well: ${parts[*]}"
