"""The table of docs/models.md is that of its file, and windows save what they should."""

import json
from pathlib import Path

import pytest

from benchmarks import experts
from benchmarks.models import (
    BEGIN,
    COMPILE_BEGIN,
    GPU,
    PRESETS,
    TPU,
    compile_table,
    counted,
    longest,
    schedule_table,
    table,
)
from ringformer.models.registry import FAMILIES, family_of

ROOT = Path(__file__).parents[2]
SAVED = json.loads((ROOT / "results" / "models.json").read_text())
ENTRIES = SAVED["presets"]


def test_the_page_has_the_table():
    assert table(ENTRIES) in (ROOT / "docs" / "models.md").read_text().partition(BEGIN)[2]
    families = {family_of(name).config for name in ENTRIES if "," not in name}
    assert families == {family.config for family in FAMILIES.values() if family.hugging_face} and list(ENTRIES) == list(
        PRESETS
    )


def test_the_pages_have_the_tables_of_compile_times_and_experts():
    page = (ROOT / "docs" / "models.md").read_text().partition(COMPILE_BEGIN)[2]
    assert compile_table(SAVED["compile_times"]["ratios"]) in page
    seconds = SAVED["schedule_times"]["seconds"]
    assert schedule_table(seconds) in page
    both = seconds["gemma3_12b, windows alone"] + seconds["gemma3_12b, full attention"]
    assert 0.8 * both <= seconds["gemma3_12b"] <= 1.1 * both  # each kind is compiled once
    page = (ROOT / "docs" / "decisions.md").read_text().partition(experts.BEGIN)[2]
    assert experts.table(json.loads((ROOT / "results" / "experts.json").read_text())) in page


@pytest.mark.parametrize("name", ["qwen3_8b", "gemma3_12b"])
def test_closed_forms_are_todays(name):
    entry = ENTRIES[name]
    assert longest(name, GPU) == entry["longest_closed_form"][GPU]
    now = counted(name, entry[GPU]["seq_len"])
    assert now["step_seconds_model"] == pytest.approx(entry[GPU]["step_seconds_model"], rel=1e-6)


def test_windows_take_a_quarter_of_full_attention():
    """Gemma 3 12B, five of six layers in windows of 1024, one sequence of a million tokens on v5e-256, compiled."""
    windowed, full = (ENTRIES[name][TPU] for name in ("gemma3_12b", "gemma3_12b, full attention"))
    assert windowed["seq_len"] == full["seq_len"] == 2**20
    assert windowed["step_seconds_model"] <= full["step_seconds_model"] / 4
