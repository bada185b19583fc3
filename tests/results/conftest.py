"""Tests of committed results: `bash scripts/docs.sh` runs them, since they check results and pages, not code."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "results" in item.path.parent.name:
            item.add_marker(pytest.mark.results)
