# Developer commands: `just` lists them (.venv/bin/just after `bash scripts/setup_venv.sh dev`).

python := ".venv/bin/python"

[private]
default:
    @just --list --unsorted

# make .venv with all developer tools, and install the commit hooks
setup:
    bash scripts/setup_venv.sh dev
    .venv/bin/pre-commit install

# check format, lint and types, and run the suite, as in CI; arguments go to pytest
test *arguments:
    bash scripts/test.sh {{ arguments }}

# also run the slow tests
slow *arguments:
    bash scripts/test.sh --slow {{ arguments }}

# check types with mypy
types:
    {{ python }} -m mypy

# format with ruff, and fix lint where ruff can
format:
    {{ python }} -m ruff check --fix .
    {{ python }} -m ruff format .

# build the site in build/site
docs:
    bash scripts/docs.sh

# test both ends of the support range, a release, the site, and schemas, as CI does every night
check-all:
    bash scripts/check_all.sh

# build a release from a clone of the last commit, and test it in empty environments
release *arguments:
    bash scripts/release.sh {{ arguments }}

# train a small model from a fresh clone
quickstart:
    bash scripts/quickstart.sh

# write requirements/*.txt; --upgrade updates the versions
lock *arguments:
    UV=.venv/bin/uv bash scripts/lock.sh {{ arguments }}
