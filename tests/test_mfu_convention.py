"""MFU by two conventions, which differ by almost 2 at long contexts: whoever shows one names its convention."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def unnamed(text: str) -> list[str]:
    """Return the paragraphs and tables that show an MFU and name no convention."""
    found = []
    for block in text.split("\n\n"):
        shows_one = re.search(r"\bMFUs?\b", block) and "%" in block
        if shows_one and not re.search("causal|PaLM", block):
            found.append(block)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_mfu_of_a_page_names_its_convention(page):
    assert unnamed(page.read_text()) == []


def test_an_mfu_without_a_convention_is_found():
    assert unnamed("A step has 57% MFU.\n\n| step | MFU (causal) |\n| 1 s | 29% |") == ["A step has 57% MFU."]


def test_the_keys_of_results_name_it():
    """`ringformer.jsonl` rows, estimates and `results/gpu.json`."""
    keys = re.findall(
        r'"(\w*mfu\w*)":', "".join(path.read_text() for path in sorted((ROOT / "results").glob("*.json")))
    )
    assert "mfu_causal" in keys and "mfu_palm" in keys
    assert all(re.search("causal|palm", key) for key in keys)
