# Developer commands: `just` lists them (.venv/bin/just after `bash scripts/setup_venv.sh dev`).

python := ".venv/bin/python"

[private]
default:
    @just --list --unsorted

# .venv with everything that a developer uses, and the commit hooks
setup:
    bash scripts/setup_venv.sh dev
    .venv/bin/pre-commit install

# format, lint, types and the suite, as CI does; arguments go to pytest
test *arguments:
    bash scripts/test.sh {{ arguments }}

# the long proofs too
slow *arguments:
    bash scripts/test.sh --slow {{ arguments }}

# mypy over the package
types:
    {{ python }} -m mypy

# ruff, what it can mend mended
format:
    {{ python }} -m ruff check --fix .
    {{ python }} -m ruff format .

# the site, in build/site
docs:
    bash scripts/docs.sh

# both ends of the support range, wheel and sdist in a clean environment, the site, schemas
check-all:
    bash scripts/check_all.sh

# from nothing to a trained model
quickstart:
    bash scripts/quickstart.sh

# requirements/*.txt anew; --upgrade moves the versions
lock *arguments:
    UV=.venv/bin/uv bash scripts/lock.sh {{ arguments }}
