"""Counts and claims about hardware on the pages: each has one source, and no page contradicts it."""

import ast
import json
import re
from pathlib import Path

import pytest

from scripts import page_facts
from scripts.page_facts import BEGIN, END, SENTENCES, Measurement, Sentence, hardware_status, measurements

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "results" / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
CONFIGS = sorted(ROOT.glob("configs/*.py"))
NAMES = {path: str(path.relative_to(ROOT)) for path in (*PAGES, *CONFIGS)}
GPU = json.loads((ROOT / "results" / "gpu.json").read_text())
INDEX = (ROOT / "results" / "README.md").read_text()


def test_the_pages_are_up_to_date():
    stale = [name for name, text in page_facts.pages().items() if text != (ROOT / name).read_text()]
    assert not stale, "run `python scripts/page_facts.py`, and commit the pages that it writes"


def test_a_stale_count_is_replaced():
    sentence = Sentence("a page", "`ringformer` has {verbs} verbs and {options} options.")
    text = page_facts.with_counts("Here: `ringformer` has 22\nverbs and 180 options. More.", sentence)
    assert (
        text == f"Here: `ringformer` has {len(page_facts.VERBS)}\nverbs and {page_facts.count_options()} options. More."
    )


@pytest.mark.parametrize("text", ["", "it has 2 verbs. Again: it has 3 verbs."])
def test_a_sentence_that_a_page_has_not_once_is_an_error(text):
    with pytest.raises(ValueError, match="not once"):
        page_facts.with_counts(text, Sentence("a page", "it has {verbs} verbs."))


COUNTED = re.compile(
    r"\b(?:\d[\d,]*|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fourteen|twenty|thirty)\+?\s+(?:other\s+)?"
    r"(?:verbs|options|\[?families|presets|rooms|mutations|ways to break|modules|functions|layouts|tokens of code)\b"
)
OTHER_COUNTS = {
    "three verbs": "verbs that one sentence lists",
    "fourteen modules": "the day of a decision",
    "four options": "options of a mount",
}
"""Counts of a part of what there is, which do not grow with the repository."""


def uncovered_counts(text: str) -> list[str]:
    """The counts of a text that no sentence of `SENTENCES` writes."""
    for sentence in SENTENCES:
        parts = [re.escape(part).replace(r"\ ", r"\s+") for part in re.split(r"\{.+?\}", sentence.text)]
        text = re.sub(r"[\w,]+".join(parts), "", text)
    found = [" ".join(match.split()) for match in COUNTED.findall(text)]
    return [count for count in found if count not in OTHER_COUNTS]


@pytest.mark.parametrize("page", PAGES, ids=NAMES.__getitem__)
def test_every_count_of_a_page_is_written_from_its_source(page):
    counts = uncovered_counts(page.read_text())
    assert not counts, "add the sentence to SENTENCES of scripts/page_facts.py, or write it without a count"


def test_a_count_by_hand_is_found():
    assert uncovered_counts("It has 22 verbs, and 198,000 tokens of code.") == ["22 verbs", "198,000 tokens of code"]
    assert uncovered_counts("`ringformer` has 5 verbs and 9 options. All three verbs convert.") == []


H200 = Measurement(ROOT / "results" / "gpu.json", "H200", "gpu", 1)
NODE = Measurement(ROOT / "results" / "node.json", "H100", "gpu", 8)
POD = Measurement(ROOT / "results" / "pod.json", "v5e", "tpu", 256)


def test_the_status_follows_the_results():
    assert "Nothing has run on an accelerator." in hardware_status([], "README.md")
    one = hardware_status([H200], "docs/index.md")
    assert "**one H200** has been measured ([results/gpu.json](../results/gpu.json))" in one
    assert "Nothing has run on a TPU or on several GPUs." in one
    three = hardware_status([H200, NODE, POD], "README.md")
    assert "**one H200** and **eight H100** and **256 v5e** have been measured" in three
    assert "[results/pod.json](results/pod.json)" in three and "Nothing has run" not in three
    assert "Nothing has run on a GPU." in hardware_status([POD], "README.md")


def test_results_name_the_device_that_measured_them(tmp_path):
    (tmp_path / "a.json").write_text('{"device": "NVIDIA H100 80GB HBM3", "device_count": 8}')
    (tmp_path / "b.json").write_text('{"device": "TPU v5 lite"}')
    (tmp_path / "c.json").write_text('{"device": "cpu"}')
    (tmp_path / "d.json").write_text("[]")
    assert [found[1:] for found in measurements(tmp_path)] == [("H100", "gpu", 8), ("v5e", "tpu", 1)]


def test_the_list_of_results_names_the_measured_hardware():
    """In its column "how"; a row that is measured elsewhere says by whom, or that it was a CPU."""
    rows = re.findall(r"^\| `(\w+\.json)` \|.*\| (measured[^|]*) \| [^|]*\|$", INDEX, re.MULTILINE)
    expected = {found.path.name: found.chip for found in measurements()}
    assert len(rows) > 5 and expected
    for name, how in rows:
        if name in expected:
            assert expected[name] in how, f"results/README.md: {name} was measured on {expected[name]}"
        else:
            assert how.startswith(("measured, CPU", "measured, by")), f"{name} lacks the key `device` of an accelerator"


def test_the_page_of_supported_chips_calls_these_measured():
    page = (ROOT / "docs" / "support.md").read_text()
    rows = re.findall(r"^\| (?:TPU ?)?(\w\S*) \| ((?:compiled|no committed).*) \|$", page, re.MULTILINE)
    measured = {chip for chip, row in rows if "measured" in row}
    assert len(rows) == 10 and measured == {found.chip for found in measurements()}


HARDWARE = re.compile(
    r"\b(?:accelerators?|TPUs?|GPUs?|hardware|devices?|chips?|kernels?|configs?|image|H\d00|A100|v5e|vllm)\b", re.I
)
RUN = re.compile(
    r"\b(?:(?:nothing|nobody|none|never|not|no \w+|only|few)\b.{0,70}\b(?:run|ran|measured|tried|executed)"
    r"|(?:has|have) (?:only )?(?:been )?(?:run|measured|compiled and)|untested)\b",
    re.I | re.S,
)


def no_result(word: str) -> bool:
    """Return True if the list of results does not name something."""
    return word not in INDEX


CLAIMS = {
    "The TPU kernels have only been compiled and emulated": lambda: not [m for m in measurements() if m.kind == "tpu"],
    "Kernels have run on few chips": lambda: len({m.chip for m in measurements()}) < 4,
    "Attention at 4,096 tokens is not measured yet": lambda: 4096 not in {row["T"] for row in GPU["attention"]},
    "Two and three query heads were not measured": lambda: (
        not {2, 3} & {row["queries_per_key_head"] for row in GPU["token_attention"]}
    ),
    "and few were [compared with one]": lambda: len({m.chip for m in measurements()}) == 1,
    "Nobody has run them yet": lambda: no_result("configs/"),
    "Nobody has run this config yet": lambda: no_result("configs/"),
    "Nobody has run these configs yet": lambda: no_result("configs/"),
    "The GPU image has not run on a GPU": lambda: no_result("docker"),
    "We have not run the `vllm` commands on this page": lambda: no_result("vllm"),
    "produced them, and nothing was run": lambda: "*compiled*" in INDEX,
}
"""What a text says about runs on hardware, and whether the committed results agree."""


def claims(text: str) -> list[str]:
    """The sentences of a text about runs on hardware, outside of tables and of the written paragraph."""
    text = re.sub(rf"{re.escape(BEGIN)}.*?{re.escape(END)}", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```$|^\|.*$|^#.*$", "\n\n", text, flags=re.MULTILINE | re.DOTALL)
    sentences = [" ".join(part.split()) for part in re.split(r"(?<=[.:;])\s|\n\s*\n|^- ", text, flags=re.MULTILINE)]
    return [sentence for sentence in sentences if HARDWARE.search(sentence) and RUN.search(sentence)]


TEXTS = [*PAGES, *CONFIGS]


@pytest.mark.parametrize("path", TEXTS, ids=NAMES.__getitem__)
def test_a_text_claims_nothing_about_hardware_that_results_refute(path):
    text = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    unknown = [sentence for sentence in claims(text) if not any(claim in sentence for claim in CLAIMS)]
    assert not unknown, (
        "say this in the paragraph that scripts/page_facts.py writes, or add the claim and its check to CLAIMS: "
        f"{unknown}"
    )


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_is_made_and_agrees_with_the_results(claim):
    texts = [" ".join(path.read_text().split()) for path in TEXTS]
    assert any(claim in text for text in texts), "no text has this claim: delete it from CLAIMS"
    assert CLAIMS[claim](), "a file of results/ refutes this claim: correct the texts that make it"


@pytest.mark.parametrize(
    "text",
    [
        "All numbers are compiled or modelled:\nnothing has run on an accelerator.",
        "None of these numbers was measured on an accelerator.",
        "No kernel has run on our hardware yet, so a kernel proves itself.",
        "It has run on one H200 (below), not yet on several GPUs.",
        "The kernels have only\nbeen compiled and emulated, though.",
        "TPU pods are untested.",
    ],
)
def test_a_claim_by_hand_is_found(text):
    (sentence,) = claims(text)
    assert not any(claim in sentence for claim in CLAIMS)
