"""The cache of released archives: complete, or an error that names the command."""

import hashlib
import json
import os
import re
import subprocess
import sys

import pytest

from tests.released import fetch, folders
from tests.released.fetch import Archive


def test_all_archives_are_there():
    absent = [archive.file for archive in fetch.archives() if not archive.is_there]
    assert not absent, f"{fetch.cache()} lacks {', '.join(absent)}: {fetch.COMMAND}"


def test_folders_hold_the_released_things(trl_templates, llama_cpp_templates, mistral_tokenizers, released_tokenizer):
    variants = [name for name in trl_templates if name.endswith("_training")]
    assert (len(trl_templates) - len(variants), len(variants), len(llama_cpp_templates)) == (41, 31, 70)
    assert "HuggingFaceTB-SmolLM3-3B" in llama_cpp_templates
    assert len(list(mistral_tokenizers.iterdir())) == 7
    for name in folders.TOKENIZERS:
        files = {path.name for path in released_tokenizer(name).iterdir()}
        assert files == {"tokenizer.json", "tokenizer_config.json"}
    settings = json.loads((released_tokenizer("gptoss") / "tokenizer_config.json").read_text())
    assert "chat_template" not in settings, "gpt-oss is the released tokenizer without a template"


def test_an_absent_archive_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGFORMER_RELEASED", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=re.escape(fetch.COMMAND)):
        folders.smol()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """An index in files, of one archive; the list of archives has a second, which the index lacks."""
    monkeypatch.setenv("RINGFORMER_RELEASED", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    page = tmp_path / "index" / "thing"
    page.mkdir(parents=True)
    (page / "thing-1.whl").write_bytes(b"content")
    digest = hashlib.sha256(b"content").hexdigest()
    there = Archive("pypi", "thing", "thing-1.whl", 7, digest)
    absent = Archive("pypi", "nothing", "nothing-1.whl", 7, digest)
    monkeypatch.setattr(fetch, "archives", lambda: [there, absent])
    monkeypatch.setattr(fetch, "_open", open_file)
    (page / "index.html").write_text('<a href="thing-0.whl">0</a><a href="thing-1.whl#sha256=0">1</a>')
    return page


def open_file(address, **headers):
    path = address.removeprefix("file://").split("#")[0]
    return open(path + "index.html" if path.endswith("/") else path, "rb")


def test_what_is_absent_is_fetched_and_what_fails_is_named(index, capsys):
    assert fetch.main() == 1
    there, _ = fetch.archives()
    assert there.path.read_bytes() == b"content" and [path.name for path in there.path.parent.iterdir()] == [there.file]
    output = capsys.readouterr()
    assert "14 bytes of released archives" in output.out
    assert "could not fetch nothing-1.whl: FileNotFoundError" in output.err and "PIP_INDEX_URL" in output.err
    assert "thing-1.whl" not in output.err.replace("nothing-1.whl", "")
    assert fetch.main() == 1
    assert "7 bytes of released archives" in capsys.readouterr().out, "the archive that is there is left alone"


def test_an_archive_with_other_bytes_is_refused(index, capsys):
    (index / "thing-1.whl").write_bytes(b"CONTENT")
    assert fetch.main() == 1
    there, _ = fetch.archives()
    assert not list(there.path.parent.iterdir())
    digest = hashlib.sha256(b"CONTENT").hexdigest()
    assert f"could not fetch thing-1.whl: ValueError: 7 bytes of SHA-256 {digest}" in capsys.readouterr().err


def test_the_script_fetches_nothing_if_all_is_there():
    done = subprocess.run(["bash", "scripts/fetch_released.sh"], capture_output=True, text=True, cwd=fetch.ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_fetching_needs_the_standard_library_alone(tmp_path):
    """The script runs before `.venv` exists."""
    environment = os.environ | {"RINGFORMER_RELEASED": str(tmp_path), "PIP_INDEX_URL": "file:///nowhere"}
    environment["NPM_CONFIG_REGISTRY"] = "file:///nowhere"
    command = [sys.executable, "-S", "-I", str(fetch.ROOT / "tests" / "released" / "fetch.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "10 of 10 archives are absent" in done.stderr
