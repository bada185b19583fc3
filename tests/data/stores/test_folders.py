"""Folders of files as people have them: text in several encodings, Markdown, pages, code and pictures side by side."""

import gzip
import json
import shutil

import pytest

from ringformer.cli import main
from ringformer.data import load_tokenizer, open_or_build
from ringformer.data.stores.folder import open_one
from ringformer.data.stores.options import StoreOptions
from tests.data.chat_samples import sentencepiece

JAPANESE = "日本語のテキストです。これは文です。"
GERMAN = "Der Käse ist für die Größe überall schöner als früher."
FRENCH = "Les élèves étaient déjà à côté de l'hôtel, où ça sentait le café."
PAGE = (
    "<!doctype html><html><head><title>The ring</title><script>var x = 1;</script></head>"
    "<body><p>Keys &amp; <b>values</b></p></body></html>"
)
FILES = {
    "a.txt": "plain é".encode(),
    "b.md": b"# Title\n\n<b>bold</b>",
    "c.py": b"print('ring')\n",
    "d/e.html": PAGE.encode(),
    "d/page": PAGE.encode(),
    "d/f.htm.gz": gzip.compress(b"<p>one</p><p>two</p>"),
    "picture.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    "paper.pdf": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n",
    "d/.hidden": b"hidden",
    ".git/config": b"hidden",
}
TEXTS = {
    "a.txt": "plain é",
    "b.md": "# Title\n\n<b>bold</b>",
    "c.py": "print('ring')\n",
    "d/e.html": "# The ring\n\nKeys & **values**",
    "d/f.htm.gz": "one\n\ntwo",
    "d/page": "# The ring\n\nKeys & **values**",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(sentencepiece(tmp_path_factory.mktemp("tokenizer"))))


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "docs"


def texts(store, tokenizer):
    """Texts of a store's documents by the paths that it has for them."""
    pairs = zip(store.offsets[:-1], store.offsets[1:], strict=True)
    decoded = [tokenizer.decode(store.tokens[a:b]) for a, b in pairs]
    return dict(zip(store.names(), decoded, strict=True))


def report(folder):
    return json.loads((folder / "report.json").read_text())


def test_every_file_is_a_document_with_its_path(tmp_path, folder, tokenizer):
    for clean, pages in (("html", TEXTS["d/e.html"]), ("usual", PAGE)):
        options = StoreOptions(f"text:{folder}", held_out=0.0, clean=clean)
        store, _ = open_or_build(tmp_path / clean, options, tokenizer)
        found = texts(store, tokenizer)
        assert list(found) == [f"{folder}/{name}" for name in TEXTS]
        assert found[f"{folder}/d/e.html"] == found[f"{folder}/d/page"] == pages
        if clean == "html":
            assert found == {f"{folder}/{name}": text for name, text in TEXTS.items()}
        assert report(tmp_path / clean)["left_out"] == {"files skipped: binary": 2}
        assert report(tmp_path / clean)["files_left_out"] == {
            "binary": [f"{folder}/paper.pdf", f"{folder}/picture.png"]
        }
    with pytest.raises(ValueError, match="clean is 'html', not ''"):
        open_or_build(tmp_path / "html", options, tokenizer)


def test_files_of_both_parts_keep_their_paths(tmp_path, folder, tokenizer):
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"number {i}")
    stores = open_or_build(tmp_path / "s", StoreOptions(f"text:{folder}", held_out=0.3), tokenizer)
    found = [texts(store, tokenizer) for store in stores]
    assert all(found) and not found[0].keys() & found[1].keys()
    both = found[0] | found[1]
    assert [both[f"{folder}/{i}.txt"] for i in range(40)] == [f"number {i}" for i in range(40)]
    (tmp_path / "s" / "train" / "names.jsonl").write_text("x" * (tmp_path / "s/train/names.jsonl").stat().st_size)
    with pytest.raises(ValueError, match=r"names\.jsonl is not what was written"):
        open_one(tmp_path / "s", ("train",))


def test_the_same_files_elsewhere_are_the_same_store(tmp_path, folder, tokenizer):
    """A run that knows it by its contents goes on with it."""
    shutil.copytree(folder, tmp_path / "elsewhere")
    stores = []
    for name in ("docs", "elsewhere"):
        options = StoreOptions(f"text:{tmp_path}/{name}", held_out=0.0)
        stores.append(open_or_build(tmp_path / f"store of {name}", options, tokenizer)[0])
    first, second = ([store.meta["fingerprint"], store.meta["files"]] for store in stores)
    assert first == second and stores[0].names() != stores[1].names()


def test_stores_without_files_have_no_paths(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    store, _ = open_or_build(
        tmp_path / "s", StoreOptions(f"jsonl:{tmp_path}/a.jsonl", held_out=0.0), load_tokenizer("bytes")
    )
    assert store.names() == [] and not (store.path / "names.jsonl").exists()


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_a_folder_of_records_is_the_files_of_its_kind(tmp_path, kind):
    (tmp_path / "deep").mkdir()
    for name in ("a.jsonl", "deep/b.jsonl.gz", "c.json", "notes.txt"):
        record = json.dumps({"text": name})
        content = (f"[{record}]" if name == "c.json" else record).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    store, _ = open_or_build(tmp_path / "s", StoreOptions(f"{kind}:{tmp_path}", held_out=0.0), load_tokenizer("bytes"))
    assert (
        bytes(i for i in store.tokens[:].tolist() if i < 256)
        == {"jsonl": b"a.jsonldeep/b.jsonl.gz", "json": b"c.json"}[kind]
    )


def test_all_files_that_cannot_be_decoded_are_named_at_once(tmp_path, folder, tokenizer):
    (folder / "1.txt").write_bytes(GERMAN.encode("latin-1"))
    (folder / "2.txt").write_bytes(f"{'a' * 5000} {FRENCH}".encode("cp1252"))
    (folder / "3.txt").write_bytes(GERMAN.encode("utf-16"))
    (folder / "4.html").write_bytes(b'<meta charset="iso-8859-2"><p>\xb1\xb6')
    source = f"text:{folder}"
    with pytest.raises(ValueError) as caught:
        open_or_build(tmp_path / "s", StoreOptions(source), tokenizer)
    message = str(caught.value)
    for name, place, likely, text in (
        ("1.txt", "0xe4 at 5", "cp1252", "Der Käse"),
        ("2.txt", "0xe9 at 5,005", "cp1252", "Les élèves"),
        ("3.txt", "0xff at 0", "utf-16", "Der Käse"),
        ("4.html", "0xb1 at 30", "iso-8859-2", "ąś"),
    ):
        assert f"{folder}/{name}: byte {place} is not utf-8; likely {likely}: " in message
        assert text in message
    assert message.startswith("4 of the 12 files still to be read cannot be decoded:\n")
    assert "cp1252 and iso-8859-2 decode each other's files: convert those of all but one to UTF-8" in message
    assert "in this order: --encoding=utf-8,utf-16,cp1252 (for a run: " in message and "--skip_malformed" in message

    options = StoreOptions(source, held_out=0.0, encoding="utf-8,utf-16,cp1252")
    found = texts(open_or_build(tmp_path / "s", options, tokenizer)[0], tokenizer)
    assert [found[f"{folder}/{i}.txt"] for i in (1, 2, 3)] == [GERMAN, f"{'a' * 5000} {FRENCH}", GERMAN]
    assert found[f"{folder}/a.txt"] == "plain é"
    with pytest.raises(ValueError, match="encoding is 'utf-8,utf-16,cp1252', not ''"):
        open_or_build(tmp_path / "s", StoreOptions(source, held_out=0.0), tokenizer)

    options = StoreOptions(source, held_out=0.0, skip_malformed=True)
    store, _ = open_or_build(tmp_path / "t", options, tokenizer)
    assert store.names() == [f"{folder}/{name}" for name in TEXTS]
    assert report(tmp_path / "t")["files_left_out"]["not utf-8"] == [
        f"{folder}/{name}" for name in ("1.txt", "2.txt", "3.txt", "4.html")
    ]


def test_the_advised_encodings_read_each_file_as_the_error_showed_it(tmp_path, tokenizer):
    written = {"a.txt": (JAPANESE, "cp932"), "b.txt": (GERMAN, "utf-16-le"), "c.txt": (GERMAN, "utf-16")}
    (tmp_path / "docs").mkdir()
    for name, (text, encoding) in written.items():
        (tmp_path / "docs" / name).write_bytes(text.encode(encoding))
    source = f"text:{tmp_path}/docs"
    with pytest.raises(ValueError) as caught:
        open_or_build(tmp_path / "s", StoreOptions(source), tokenizer)
    advised = str(caught.value).split("--encoding=")[1].split(" ")[0]
    store, _ = open_or_build(tmp_path / "s", StoreOptions(source, held_out=0.0, encoding=advised), tokenizer)
    found = texts(store, tokenizer)
    assert {name: found[f"{tmp_path}/docs/{name}"] for name in written} == {n: text for n, (text, _) in written.items()}


@pytest.mark.parametrize("kind", ["jsonl", "json"])
@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "utf-16", "utf-16-le"])
def test_records_have_the_encoding_of_their_file(tmp_path, kind, encoding):
    records = [{"text": GERMAN}, {"text": FRENCH}]
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    whole = json.dumps(records, ensure_ascii=False) if kind == "json" else lines
    (tmp_path / "a.x").write_bytes(whole.encode(encoding))
    (tmp_path / "b.x").write_text(whole)
    source, tokenizer = f"{kind}:{tmp_path}/*.x", load_tokenizer("bytes")
    if encoding != "utf-8":
        with pytest.raises(ValueError, match=r"a\.x: byte .* is not utf-8; likely .*\n.*--encoding=utf-8,"):
            open_or_build(tmp_path / "s", StoreOptions(source), tokenizer)
    options = StoreOptions(source, held_out=0.0, encoding=f"utf-8,{encoding}")
    if encoding == "utf-16-le":  # it decodes other files too, so it comes first only where all have it
        (tmp_path / "b.x").unlink()
        options = StoreOptions(source, held_out=0.0, encoding=encoding)
    store, _ = open_or_build(tmp_path / "s", options, tokenizer)
    text = tokenizer.decode(store.tokens[:])
    assert text == (GERMAN + FRENCH) * (1 if encoding == "utf-16-le" else 2)


def test_a_pattern_is_read_byte_for_byte_by_bytes_and_a_folder_is_not(tmp_path, folder):
    (folder / "x.png").write_bytes(b"a\0\xff")
    (folder / "l.txt").write_bytes(b"\xe4")
    tokenizer = load_tokenizer("bytes")
    store, _ = open_or_build(tmp_path / "s", StoreOptions(f"text:{folder}/[lx].*", held_out=0.0), tokenizer)
    assert store.tokens[:].tolist() == [0xE4, 256, ord("a"), 0, 0xFF, 256]
    with pytest.raises(ValueError, match=r"l\.txt: byte 0xe4 at 0 is not utf-8"):
        open_or_build(tmp_path / "t", StoreOptions(f"text:{folder}", held_out=0.0), tokenizer)


def test_pages_in_records_lose_their_tags(tmp_path, tokenizer):
    records = [PAGE, "<p>one</p>", "# Title\n\n<b>bold</b>", "<html>" + "<div>" * 3000]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in records))
    options = {"source": f"jsonl:{tmp_path}/a.jsonl", "held_out": 0.0, "clean": "html"}
    with pytest.raises(ValueError, match=r"a\.jsonl:4: its HTML is nested too deeply.*--skip_malformed"):
        open_or_build(tmp_path / "s", StoreOptions(**options), tokenizer)
    store, _ = open_or_build(tmp_path / "s", StoreOptions(**options, skip_malformed=True), tokenizer)
    pairs = zip(store.offsets[:-1], store.offsets[1:], strict=True)
    decoded = [tokenizer.decode(store.tokens[a:b]) for a, b in pairs]
    assert decoded == [TEXTS["d/e.html"], "one", records[2]]


def test_the_command_names_what_it_left_out_and_inspect_the_files(tmp_path, folder, capsys):
    (folder / "l.txt").write_bytes(GERMAN.encode("latin-1"))
    command = ["data", "prepare", f"--store={tmp_path}/s", f"--source=text:{folder}", "--held_out=0", "--clean=html"]
    assert main([*command, "--skip_malformed"]) == 0
    out = capsys.readouterr().out
    assert "2 files skipped: binary" in out and f"binary: {folder}/paper.pdf, {folder}/picture.png" in out
    assert f"not utf-8: {folder}/l.txt" in out
    assert main(["data", "inspect", f"{tmp_path}/s", "--samples=99"]) == 0
    assert f"─{folder}/b.md# Title" in capsys.readouterr().out.replace("\n", "")
    shutil.rmtree(tmp_path / "s")
    assert main(command) == 2
    assert f"{folder}/l.txt: byte 0xe4" in capsys.readouterr().err


def test_links_in_a_circle_end(tmp_path, folder, tokenizer):
    (folder / "d" / "up").symlink_to(folder)
    store, _ = open_or_build(tmp_path / "s", StoreOptions(f"text:{folder}", held_out=0.0), tokenizer)
    assert store.meta["documents"] == len(TEXTS)
