#!/usr/bin/env bash
# Build a release from a clone of the last commit, and test it: bash scripts/release.sh [vX.Y.Z]
#
# Writes the wheel and the sdist to build/release/dist. Installs each into an empty environment, as a user would, and uses
# it there: version, the README's program, configs, a launch script, training. With a tag, first checks that the package,
# the citation and the changelog name its version. PYTHON names the interpreter (default: python3), README_FILES the
# address of the README's files (setup.py).
set -euo pipefail
cd "$(dirname "$0")/.."
tag=${1:-}
python=${PYTHON:-python3}
work=$PWD/build/release
clone=$work/clone

say() {
    echo
    echo "== $*"
}

# tried NAME FILE: install a wheel or an sdist as a user would, with the locked versions, and use it outside the clone
tried() {
    local folder=$work/$1 file=$2 installed=$work/$1/venv/bin/python
    say "$1: $(basename "$file")"
    rm -rf "$folder"
    mkdir -p "$folder/home"
    "$python" -m venv "$folder/venv"
    sed -n 's/^\([a-z].*\) \\$/\1/p' "$clone/requirements/train.txt" >"$folder/versions.txt" # constraints may not have hashes
    local pip=("$installed" -m pip --disable-pip-version-check install --quiet)
    "${pip[@]}" --constraint "$folder/versions.txt" setuptools
    "${pip[@]}" --constraint "$folder/versions.txt" --no-build-isolation "$file"
    (
        cd "$folder/home"
        JAX_PLATFORMS=cpu PYTHONPATH='' "$installed" -W error "$clone/scripts/checks/installed_package.py" "$clone"
    )
    "${pip[@]}" --require-hashes --no-deps -r "$clone/requirements/train.txt"
    "${pip[@]}" --no-build-isolation "${file}[train,plot]"
    "$installed" -m pip check
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

say "a clone of $(git describe --always)"
rm -rf "$clone" "$work/dist"
mkdir -p "$work"
git clone --quiet . "$clone"
[ -z "$tag" ] || "$python" "$clone/scripts/checks/release_version.py" "$tag" "$clone"
PYTHON=$python bash scripts/setup_venv.sh dev
say "wheel and sdist"
.venv/bin/python -m build --no-isolation --outdir "$work/dist" "$clone" >"$work/build.log" 2>&1 ||
    { cat "$work/build.log" >&2 && exit 1; }
tried wheel "$work"/dist/*.whl
tried sdist "$work"/dist/*.tar.gz
say "the release is in $work/dist"
