"""What a stranger's folder may name: its own files, and the blobs of a Hugging Face cache. Nothing else is read."""

import json
import shutil

import pytest

from ringformer.data import load_tokenizer
from ringformer.files.atomic import write_object
from ringformer.files.untrusted import contained, read_object
from tests.data.chat_samples import llama3


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret.json"
    path.write_text(json.dumps({"chat_template": "the password"}))
    return path


@pytest.fixture
def cache(tmp_path):
    """A snapshot as huggingface_hub makes it, files and folders of links into the blobs of the same repository."""
    snapshot = tmp_path / "hub" / "models--meta--llama" / "snapshots" / "0f3a"
    blobs = snapshot.parent.parent / "blobs"
    for folder in (snapshot / "original", blobs):
        folder.mkdir(parents=True)
    (blobs / "5f0e").write_text("config")
    (snapshot / "config.json").symlink_to("../../blobs/5f0e")
    (snapshot / "original" / "config.json").symlink_to("../../../blobs/5f0e")
    return snapshot


def test_a_folder_s_own_files(tmp_path):
    (tmp_path / "a.json").write_text("a")
    (tmp_path / "link.json").symlink_to("a.json")
    (tmp_path / "dangling.json").symlink_to("gone.json")
    for name in ("a.json", "link.json", "absent.json", "dangling.json", "..a", "a..b"):
        assert contained(tmp_path, name) == tmp_path / name


@pytest.mark.parametrize("name", ["../secret.json", "/etc/passwd", "sub/a", "..", ".", "", "a\\b", "a\0b", 7, None])
def test_only_plain_names(tmp_path, name):
    with pytest.raises(ValueError, match="is no plain file name"):
        contained(tmp_path, name)


def test_links_out_of_the_folder_are_refused(tmp_path, secret):
    folder = tmp_path / "stranger"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "config").write_text("https://user:token@host")
    (folder / "chain.json").symlink_to("second.json")
    (folder / "second.json").symlink_to(secret)
    (folder / "relative.json").symlink_to("../secret.json")
    (folder / "absent.json").symlink_to("/nowhere/at/all")  # it may be there on the next day
    (folder / "git.json").symlink_to(".git/config")
    (folder / "loop.json").symlink_to("loop.json")
    for name in ("chain", "second", "relative", "absent", "git", "loop"):
        with pytest.raises(ValueError, match=rf"{name}\.json is a link to .*cp -rL"):
            contained(folder, f"{name}.json")


def test_a_folder_that_is_itself_a_link_was_named_by_the_user(tmp_path, cache):
    (tmp_path / "mine").symlink_to(cache)
    assert contained(tmp_path / "mine", "config.json").read_text() == "config"


def test_a_hugging_face_cache_works_and_nothing_beside_its_blobs(tmp_path, cache, secret):
    assert contained(cache, "config.json").read_text() == "config"
    assert contained(cache / "original", "config.json").read_text() == "config"
    repository = cache.parent.parent
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0f3a")
    (repository.parent / "models--other").mkdir()
    shutil.copytree(repository / "blobs", repository.parent / "models--other" / "blobs")
    for i, target in enumerate(("../../refs/main", "../../../models--other/blobs/5f0e", str(secret))):
        (cache / f"{i}.json").symlink_to(target)
        with pytest.raises(ValueError, match="is a link to"):
            contained(cache, f"{i}.json")
    shutil.rmtree(repository / "blobs")  # a stranger's idea of blobs
    (repository / "blobs").symlink_to(tmp_path)
    (cache / "secret.json").symlink_to("../../blobs/secret.json")
    with pytest.raises(ValueError, match="is a link to"):
        contained(cache, "secret.json")


def test_snapshots_that_are_no_cache(tmp_path):
    """Only a repository's folder of the cache has blobs: a folder of this name elsewhere is anybody's."""
    folder = tmp_path / "snapshots" / "x"
    folder.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "mine").write_text("mine")
    (folder / "config.json").symlink_to("../../blobs/mine")
    with pytest.raises(ValueError, match="is a link to"):
        contained(folder, "config.json")


@pytest.mark.parametrize(
    ("named", "name"),
    [
        ("", "tokenizer.json"),
        ("", "tokenizer_config.json"),
        ("tokenizer.json", "tokenizer_config.json"),
        ("tokenizer.json", "chat_template.jinja"),
    ],
)
def test_a_tokenizer_s_files_are_its_folder_s(tmp_path, secret, named, name):
    """But a file that the user names may be a link: it is the user's word, and must be a tokenizer."""
    folder = llama3(tmp_path / "t")
    (tmp_path / "mine.json").symlink_to(folder / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    assert load_tokenizer(str(tmp_path / "mine.json")).name == load_tokenizer(str(folder)).name
    target = (folder / name).rename(tmp_path / f"moved-{name}") if (folder / name).exists() else secret
    (folder / name).symlink_to(target)
    with pytest.raises(ValueError, match=f"{name} is a link to .*{target.name}"):
        load_tokenizer(str(folder / named))


def test_an_object_with_its_checksum(tmp_path):
    """Every bit of the file: what is read is what was written, or an error."""
    values = {"b": [1, 2.5e-05, None, float("inf")], "a": {"x": (True,), "y": "ü"}}
    path = tmp_path / "values.json"
    write_object(path, values)
    expected = {"b": [1, 2.5e-05, None, float("inf")], "a": {"x": [True], "y": "ü"}}
    assert read_object(tmp_path, path.name) == expected
    whole, outcomes = path.read_bytes(), []
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            # In the name of the checksum itself nothing of the values changes.
            found = {key: value for key, value in read_object(tmp_path, path.name).items() if key in expected}
            outcomes.append(found == expected)
        except ValueError:
            continue
    assert all(outcomes)
    path.write_text(json.dumps(expected | {"a": 1}))
    assert read_object(tmp_path, path.name)["a"] == 1  # without one
