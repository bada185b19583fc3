"""A converted model of which a file was damaged is an error that names a file of it, or is exported as it was."""

import shutil

import numpy as np
import pytest

from ringformer.checkpoints.array_folder import WRITTEN_LAST
from ringformer.cli import main
from ringformer.convert import from_hf, to_hf
from ringformer.inference.generator import load_model
from tests.convert.models import save_model
from tests.damage import WAYS, delete, files, flip, places


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    save_model(folder / "theirs", "llama_3")
    (folder / "theirs" / "chat_template.jinja").write_text("{{ messages }}\n")
    from_hf(folder / "theirs", folder / "ours")
    return folder / "ours"


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in files(folder)}


@pytest.fixture
def export(ours, tmp_path):
    """Export a damaged copy: "named", or "unharmed" if what comes is, to the byte, what the whole one gives."""
    to_hf(ours, tmp_path / "true")
    truth = contents(tmp_path / "true")
    model = shutil.copytree(ours, tmp_path / "model")

    def exported(damage, file):
        before = (model / file).read_bytes()
        damage(model / file)
        try:
            to_hf(model, tmp_path / "back")
        except (OSError, ValueError) as error:
            assert str(model) in str(error) and not (tmp_path / "back").exists()
            return "named"
        else:
            assert contents(tmp_path / "back") == truth, f"{file} was damaged, and what was exported is another model"
            shutil.rmtree(tmp_path / "back")
            return "unharmed"
        finally:
            (model / file).write_bytes(before)

    return exported


def test_every_file_damaged_in_every_way_is_named_or_does_no_harm(ours, export):
    results = {
        (path.name, damage.__name__): export(damage, path.relative_to(ours)) for path in files(ours) for damage in WAYS
    }
    unharmed = {name for name, result in results.items() if result == "unharmed"}
    written_last = {(name, damage.__name__) for name in WRITTEN_LAST for damage in WAYS}
    assert unharmed - written_last <= {("manifest.json", "delete"), ("manifest.json", "truncate")}
    assert len(results) > 30


def test_no_flipped_bit_is_silent(ours, export):
    rng = np.random.default_rng(1)
    small = [path for path in files(ours) if path.parent == ours] * 6  # a disk would hardly hit them
    results = [
        export(lambda path: flip(path, rng), path.relative_to(ours)) for path in [*places(ours, 60, rng), *small]
    ]
    assert results.count("named") > 0.9 * len(results)


def test_the_command_says_it_in_one_line(ours, tmp_path, capsys):
    model = shutil.copytree(ours, tmp_path / "a#b%20[/b]")
    assert main(["convert", "to-hf", str(model), str(tmp_path / "a?b")]) == 0
    delete(model / "checkpoints" / "0" / "default" / "params.embed" / "0.0")
    capsys.readouterr()
    assert main(["convert", "to-hf", str(model), str(tmp_path / "back")]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "params.embed/0.0 is missing" in err and not (tmp_path / "back").exists()
    assert main(["checkpoint", "verify", str(model)]) == 1
    assert main(["checkpoint", "verify", str(ours)]) == 0


def test_who_generates_reads_no_damaged_model(ours, tmp_path):
    model = shutil.copytree(ours, tmp_path / "model")
    flip(model / "config.json", np.random.default_rng(0))
    with pytest.raises((OSError, ValueError), match=r"config\.json"):
        load_model(model)
