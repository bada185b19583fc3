"""Without the packages of the extra `data`: the rooms import, bytes are tokenized, and what needs more says so."""

import importlib.util
import json
import subprocess
import sys

import pytest

from ringformer.data import load_tokenizer, read_documents
from ringformer.data.chats.cleaning import to_markdown
from ringformer.data.chats.templates import load_template
from tests.data.chat_samples import llama3, sentencepiece

PACKAGES = ("datasets", "pyarrow", "sentencepiece", "tokenizers", "jinja2", "bs4", "markdownify")

PROGRAM = """
import importlib, pkgutil, sys
sys.modules |= dict.fromkeys({packages})  # importing them fails
import ringformer.data
assert "numpy" not in sys.modules
for module in pkgutil.walk_packages(ringformer.data.__path__, "ringformer.data."):
    if not module.name.endswith(".table_worker"):  # a program that reads tables
        importlib.import_module(module.name)
for name in ringformer.data.__all__:
    getattr(ringformer.data, name)
from ringformer.data.stores.options import StoreOptions
options = StoreOptions("text:{folder}/*.txt", held_out=0)
train, _ = ringformer.data.open_or_build("{folder}/store", options, ringformer.data.load_tokenizer("bytes"))
print(train.tokens[:].tolist())
"""


def test_bytes_need_none_of_them(tmp_path):
    assert all(importlib.util.find_spec(package) for package in PACKAGES), "renamed?"
    (tmp_path / "a.txt").write_text("ring")
    program = PROGRAM.format(packages=PACKAGES, folder=tmp_path)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [*b"ring", 256]


def rows(kind, folder):
    (folder / "rows").touch()
    return list(read_documents(f"{kind}:{folder}/rows"))


USES = [
    ("sentencepiece", "a SentencePiece model", lambda folder: load_tokenizer(str(folder / "tokenizer.model"))),
    ("tokenizers", "a tokenizer.json", lambda folder: load_tokenizer(str(folder / "tokenizer.json"))),
    ("pyarrow", "a parquet: source", lambda folder: rows("parquet", folder)),
    ("datasets", "a datasets: source", lambda folder: list(read_documents(f"datasets:{folder}"))),
    ("bs4", "the cleaning rule html", lambda folder: to_markdown("<p>a</p>")),
    ("jinja2", "the template tokenizer", lambda folder: load_template("tokenizer", load_tokenizer("bytes"))),
]


@pytest.mark.parametrize(("package", "purpose", "use"), USES, ids=[use[0] for use in USES])
def test_what_needs_one_says_how_to_install_it(tmp_path, monkeypatch, package, purpose, use):
    sentencepiece(tmp_path)
    llama3(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"^{purpose} needs the package {package}: pip install 'ringformer\[data\]'$"
    with pytest.raises(ValueError, match=message):
        use(tmp_path)
