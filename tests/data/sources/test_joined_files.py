"""Files become long documents, by folder or by package, in the order of their paths."""

import pytest

from ringformer.data import read_documents
from ringformer.data.stores.options import StoreOptions

FILES = {
    "top.py": "top\n",
    "a-b/x.py": "other package\n",
    "a/__init__.py": "",
    "a/c/deep.py": "deep",
    "a/one.py": "one\n",
    "a/two.py": "two\r\n",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return tmp_path / "source"


def texts(folder, source: str, join: str) -> dict[str, str]:
    documents = read_documents(source, join=join)
    return {document.name.removeprefix(f"{folder}").lstrip("/"): document.text for document in documents}


@pytest.mark.parametrize("pattern", ["", "/**/*.py"])
def test_a_package_has_all_folders_in_it(folder, pattern):
    assert texts(folder, f"text:{folder}{pattern}", "package") == {
        "a-b": "other package\n",
        "a": "deep\none\n\ntwo\r\n",
        "top.py": "top\n",
    }


def test_a_folder_has_its_own_files(folder):
    assert texts(folder, f"text:{folder}", "folder") == {
        "a-b": "other package\n",
        "a": "one\n\ntwo\r\n",
        "a/c": "deep",
        "": "top\n",
    }


def test_a_document_without_text_is_named(folder):
    (folder / "empty").mkdir()
    (folder / "empty" / "__init__.py").touch()
    with pytest.raises(ValueError, match="empty is an empty document; --skip_empty"):
        list(read_documents(f"text:{folder}", join="package"))
    assert len(list(read_documents(f"text:{folder}", join="package", skip_empty=True))) == 3


def test_the_limit_is_of_the_joined_document(folder):
    assert len(list(read_documents(f"text:{folder}", join="package", max_bytes=20))) == 3
    with pytest.raises(ValueError, match="source/a has more than max_document_bytes=9 bytes"):
        list(read_documents(f"text:{folder}/a/*.py", join="folder", max_bytes=9, skip_empty=True))


def test_web_pages_are_extracted_before_they_are_joined(folder):
    from ringformer.data.chats.web_pages import extracted

    page = "<html><body><p>A page with enough words to be kept as the text of it.</p></body></html>"
    (folder / "a" / "page.html").write_text(page)
    documents = read_documents(f"text:{folder}", join="package", change=extracted)
    assert "A page with enough words" in next(d.text for d in documents if d.name.endswith("/a"))
    assert not any("<p>" in d.text for d in read_documents(f"text:{folder}", join="package", change=extracted))


def test_packages_of_the_standard_library():
    """Also of those that are installed, whose names say where they are."""
    library = {document.name: document.text for document in read_documents("stdlib", join="package")}
    assert "class JSONDecoder" in library["json"] and "class JSONEncoder" in library["json"]
    assert "ast.py" in library


@pytest.mark.slow
def test_installed_packages():
    installed = {document.name: len(document.text) for document in read_documents("installed", join="package")}
    assert installed["stdlib/json"] > 10_000
    assert installed["site-packages/jax"] > 1_000_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "text:a", "join": "file"}, "unknown join 'file'; known: folder, package"),
        (
            {"source": "jsonl:a", "join": "folder"},
            "join='folder' needs a source of files, text, stdlib, installed, not",
        ),
        ({"source": "text:a", "join": "folder", "format": "tokens"}, "join='folder' needs format='documents'"),
    ],
)
def test_joins_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        StoreOptions(**options)
