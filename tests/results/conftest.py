"""Tests of committed results, which check results and pages, not code: `bash scripts/docs.sh` runs them alone, and
`bash scripts/test.sh` with the whole suite."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "results" in item.path.parent.name:
            item.add_marker(pytest.mark.results)
