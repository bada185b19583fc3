"""Compilers that are said to be installed, and are not called."""

import pytest

from ringformer.estimate.workloads import targets
from ringformer.paper import attempts


@pytest.fixture
def installed(monkeypatch):
    """Every compiler is installed; its name is a formula."""
    monkeypatch.setattr(targets, "find_spec", lambda name: "there")
    monkeypatch.setattr(attempts, "compiled_by", lambda target: "a formula")
