"""A clone to launch from."""

import shutil

import pytest

from tests.scripts.launching import A100, H200, ROOT, V5E


@pytest.fixture
def clone(tmp_path):
    """The launch scripts and a config, without a .venv."""
    folder = tmp_path / "a clone"
    (folder / "configs").mkdir(parents=True)
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    for config in (A100, H200, V5E):
        shutil.copy(ROOT / config.partition("=")[2], folder / "configs")
    shutil.copy(ROOT / "setup.py", folder)
    return folder
