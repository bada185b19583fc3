"""Write counts, the status of the hardware and the shares of its peaks into the pages, and the config keys into the
help of train, each from its one source.

    python scripts/page_facts.py [--check]

Counts are those of the parsers, the registry and the limits that tests hold; hardware is measured if a file of results/
names it. With --check, nothing is written: the exit code is 1 if a page is not as it would be written.
"""

import argparse
import json
import os.path
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ringformer.cli.command_line import make_parsers
from ringformer.cli.dataclass_flags import describe_fields
from ringformer.cli.verbs import VERBS
from ringformer.hardware import CHIPS, chip_of
from ringformer.hardware.shares import SHARES
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.registry import FAMILIES
from ringformer.ops.tokenwise.rope import RopeScaling
from ringformer.runs.config import PARTS, Config
from ringformer.train.commands import CONFIG_KEYS

ROOT = Path(__file__).resolve().parents[1]
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


class Sentence(NamedTuple):
    """A sentence with counts."""

    page: str
    text: str
    """Its text with names of `COUNTS` in braces. A space also matches the end of a line."""


SENTENCES = (
    Sentence("docs/decisions.md", "`ringformer` has {verbs} verbs and {options} options."),
    Sentence("docs/index.md", "[LLaMA and {other families} other families](models.md)"),
    Sentence("docs/not-here.md", "a dense model of the {families} [families](models.md)"),
    Sentence("CONTRIBUTING.md", "A test may take {seconds of a test} CPU-seconds there,"),
)
"""Every sentence of a page that counts parts of the repository."""


STATUS_PAGES = ("README.md", "docs/index.md", "docs/support.md", "docs/evidence.md", "docs/performance.md")
"""Pages with the paragraph that says which hardware has been measured."""

BEGIN, END = "<!-- hardware: written by scripts/page_facts.py -->", "<!-- end of hardware -->"
"""Marks around that paragraph."""

SHARES_PAGE = "docs/estimating.md"
BEGIN_SHARES = "<!-- shares of the peaks: written by scripts/page_facts.py -->"
END_SHARES = "<!-- end of shares -->"


def count_options() -> int:
    """Return the number of options of all verbs, --help apart."""
    total = 0
    for verb in VERBS:
        parser = make_parsers(verb)[1]
        options = [action for action in parser._actions if action.option_strings and action.dest != "help"]
        total += len(options)
    return total


def count_families() -> int:
    """Return the number of families that Hugging Face's checkpoints can have."""
    return len([family for family in FAMILIES.values() if family.hugging_face])


def limit_in(path: str, pattern: str) -> int:
    """Return the number that a test holds as a limit. Raises ValueError unless exactly one line has the pattern."""
    numbers = re.findall(pattern, (ROOT / path).read_text())
    if len(numbers) != 1:
        raise ValueError(f"{path} has {len(numbers)} lines like {pattern}: adapt the pattern in scripts/page_facts.py")
    return int(numbers[0])


COUNTS: dict[str, Callable[[], int]] = {
    "verbs": lambda: len(VERBS),
    "options": count_options,
    "families": count_families,
    "other families": lambda: count_families() - 1,
    "seconds of a test": lambda: limit_in("tests/usual_suite.py", r"(?m)^MOST_SECONDS = (\d+)\.0$"),
}
"""Functions that take the counts."""

IN_WORDS = ("families", "other families")
"""Counts that pages write as words."""


def written_count(name: str) -> str:
    number = COUNTS[name]()
    if name in IN_WORDS and number < len(WORDS):
        return WORDS[number]
    return f"{number:,}"


def with_counts(text: str, sentence: Sentence) -> str:
    """Return a page's text with the counts of a sentence. Raises ValueError unless the page has the sentence once."""
    parts = re.split(r"\{(.+?)\}", sentence.text)
    fixed, names = parts[::2], parts[1::2]
    escaped = [re.escape(part).replace(r"\ ", r"\s+") for part in fixed]
    pattern = r"([\w,]+)".join(f"({part})" for part in escaped)
    matches = list(re.finditer(pattern, text))
    if len(matches) != 1:
        raise ValueError(
            f"{sentence.page} has the sentence {sentence.text!r} {len(matches)} times, not once: "
            "change the page, or SENTENCES in scripts/page_facts.py"
        )
    match = matches[0]
    pieces = list(match.groups())
    for i, name in enumerate(names):
        pieces[2 * i + 1] = written_count(name)
    return text[: match.start()] + "".join(pieces) + text[match.end() :]


class Measurement(NamedTuple):
    """A file of results/ that was measured on accelerators."""

    path: Path
    chip: str
    """Name of the chip in the documentation, e.g. H200."""
    kind: str
    """tpu or gpu."""
    devices: int
    """Number of devices that computed together."""


def measurements(folder: Path = ROOT / "results") -> list[Measurement]:
    """Return the files of a folder whose `device` is an accelerator; `device_count` is 1 if a file lacks it."""
    measured = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        if not isinstance(record, dict):
            continue
        chip = chip_of(record.get("device", ""))
        if chip is not None:
            (name,) = [name for name, sheet in CHIPS.items() if sheet is chip]
            measured.append(Measurement(path, name, chip.kind, record.get("device_count", 1)))
    return measured


REST = "Our other numbers of accelerators are compiled or modelled."


def hardware_status(measured: list[Measurement], page: str) -> str:
    """Return the sentences of a page that say which hardware has been measured, and which has not."""
    if not measured:
        return f"Nothing has run on an accelerator. {REST}"
    chips, files = [], []
    for measurement in measured:
        link = os.path.relpath(measurement.path, ROOT / Path(page).parent)
        number = WORDS[measurement.devices] if measurement.devices < len(WORDS) else str(measurement.devices)
        chips.append(f"**{number} {measurement.chip}**")
        files.append(f"[results/{measurement.path.name}]({link})")
    names = list(dict.fromkeys(chips))
    is_one = len(names) == 1 and measured[0].devices == 1
    text = f"Of accelerators, {' and '.join(names)} {'has' if is_one else 'have'} been measured ({', '.join(files)})."
    absent = []
    if not any(measurement.kind == "tpu" for measurement in measured):
        absent.append("on a TPU")
    if not any(measurement.kind == "gpu" for measurement in measured):
        absent.append("on a GPU")
    elif not any(measurement.kind == "gpu" and measurement.devices > 1 for measurement in measured):
        absent.append("on several GPUs")
    if absent:
        text += f" Nothing has run {' or '.join(absent)}."
    return f"{text} {REST}"


def between(begin: str, end: str, written: str, text: str, page: str) -> str:
    """Return a page's text with `written` between two marks. Raises ValueError if the page lacks a mark."""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page} lacks a mark: {begin} and {end}")
    return f"{before}{begin}\n\n{written}\n\n{end}{after}"


def shares_table() -> str:
    """Return the shares of each chip's peaks in markdown."""
    lines = [
        "| chip | attention by XLA | by cuDNN, forward, backward (heads of 128) | other products | memory | source |",
        "|---|---|---|---|---|---|",
    ]
    for name, shares in SHARES.items():
        of_cudnn = "–"
        if shares.cudnn_forward:
            forward, backward = shares.cudnn(128)
            of_cudnn = f"{forward:.0%}, {backward:.0%}"
        lines.append(
            f"| {name} | {shares.attention:.0%} | {of_cudnn} | {shares.products:.0%} | {shares.memory:.0%} "
            f"| **{shares.kind}**: {shares.source} |"
        )
    return "\n".join(lines)


def pages() -> dict[str, str]:
    """Return the files as they should be: pages with counts or the status of the hardware, and the config keys."""
    names = {*STATUS_PAGES, SHARES_PAGE, *(sentence.page for sentence in SENTENCES)}
    texts = {name: (ROOT / name).read_text() for name in sorted(names)}
    for sentence in SENTENCES:
        texts[sentence.page] = with_counts(texts[sentence.page], sentence)
    measured = measurements()
    for page in STATUS_PAGES:
        texts[page] = between(BEGIN, END, hardware_status(measured, page), texts[page], page)
    texts[SHARES_PAGE] = between(BEGIN_SHARES, END_SHARES, shares_table(), texts[SHARES_PAGE], SHARES_PAGE)
    texts[f"ringformer/train/{CONFIG_KEYS}"] = config_keys()
    return texts


def config_keys() -> str:
    """Describe the keys of a config, each with its default; those of the model are LLaMA's."""
    parts: dict[str, type] = {"": Config}
    for name, cls in PARTS.items():
        parts[f"{name}."] = cls
    parts |= {"model.": DecoderConfig, "model.rope_scaling.": RopeScaling}
    nested = ("model", *PARTS, "rope_scaling")
    keys = [describe_fields(cls, f"--config.{part}", but=nested) for part, cls in parts.items()]
    return "\n".join(keys) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page differs")
    arguments = parser.parse_args()
    changed = [name for name, text in pages().items() if text != (ROOT / name).read_text()]
    if arguments.check:
        for name in changed:
            print(f"{name} is not up to date: python scripts/page_facts.py", file=sys.stderr)
        return 1 if changed else 0
    texts = pages()
    for name in changed:
        (ROOT / name).write_text(texts[name])
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
