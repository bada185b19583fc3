"""No text of a stranger commands the terminal: what is shown, piece by piece; errors of every verb."""

import json
import re

import pytest

from ringformer.cli import main
from ringformer.cli.visible_text import visible

COMMANDS = {
    "clear the screen": ("\x1b[2J", r"\x1b[2J"),
    "the window's title": ("\x1b]0;mine\x07", r"\x1b]0;mine\x07"),
    "the clipboard": ("\x1b]52;c;cm0gLXJm\x1b\\", "\\x1b]52;c;cm0gLXJm\\x1b\\"),
    "CSI of one character": ("\x9b2J", r"\x9b2J"),
    "CSI of one byte": (b"\x9b2J".decode(errors="surrogateescape"), r"\udc9b2J"),
    "OSC of one character": ("\x9d0;mine\x9c", r"\x9d0;mine\x9c"),
    "another line": ("good\rbad\x08\x7f", r"good\x0dbad\x08\x7f"),
    "another direction": ("\u202eevil\u2066\u2069", r"\u202eevil\u2066\u2069"),
    "NUL": ("\0", r"\x00"),
}
ALL = "".join(text for text, _ in COMMANDS.values())
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.mark.parametrize(("text", "shown"), COMMANDS.values(), ids=COMMANDS)
def test_commands_are_seen(text, shown):
    assert CONTROL.search(text)
    assert visible(f"a{text}b") == f"a{shown}b"
    for cut in range(len(text) + 1):
        assert visible(text[:cut]) + visible(text[cut:]) == shown


def test_text_stays_what_it_is():
    text = "naïve\n\tcafé 日本語 🙂 👩\u200d👩 שלום\u200f é \\x1b \u00a0\u2028"
    assert visible(text) == text
    assert not any(CONTROL.search(visible(chr(c))) for c in range(0x110000))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({ALL: 1}, []),
        ({"text": "a"}, ["--field=\x1b[2J"]),
        ({"conversations": [{"from": ALL, "value": "a"}]}, ["--format=sharegpt"]),
        ({ALL: []}, ["--format=sharegpt"]),
        ({"conversations": {ALL: 1}}, ["--format=sharegpt"]),
        ({"conversations": [{"from": "gpt", "value": {ALL: 1}}]}, ["--format=sharegpt"]),
    ],
)
def test_fields_roles_and_paths_in_errors_are_seen(tmp_path, capsys, record, words):
    folder = tmp_path / "a\x1b]0;mine\x07\x9b2Jb"
    folder.mkdir()
    (folder / "x.jsonl").write_text(json.dumps(record) + "\n")
    assert main(["data", "prepare", f"--store={tmp_path}/s", f"--source=jsonl:{folder}/*.jsonl", *words]) == 2
    err = capsys.readouterr().err
    assert r"a\x1b]0;mine\x07\x9b2Jb/x.jsonl:1" in err and not CONTROL.search(err)
