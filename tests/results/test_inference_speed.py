"""Measurements of inference on the CPU: those that the documentation quotes."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def results(name: str) -> dict:
    return json.loads((ROOT / "results" / name).read_text())


def test_many_questions_to_one_document():
    shared, each = results("many_questions.json")["seconds"].values()
    page = " ".join((ROOT / "docs" / "inference.md").read_text().split())
    assert f"take {shared:.2f} s on two CPU cores, and {each:.2f} s if each reads the document" in page
    assert 4.5 < each / shared < 5.5  # "a fifth"


def test_decoding_beside_transformers():
    times = results("decode_speed.json")["times_transformers"]
    page = (ROOT / "docs" / "evidence.md").read_text()
    one, ring = (f"{round(times[mesh] + 1e-9, 1)} times" for mesh in ("one device", "ring of eight"))
    assert f"is {one} as fast on one device" in page and f"eight simulated devices {ring}" in page
