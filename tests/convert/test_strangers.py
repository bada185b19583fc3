"""A stranger's checkpoint reads and copies its own files alone, and what is wrong in it is told in our words."""

import json
import shutil
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ringformer.cli import main
from ringformer.convert import from_hf, to_hf
from ringformer.convert.hf_config import from_hf_config
from ringformer.convert.safetensors_files import TensorFolder
from ringformer.files.run_layout import CARRIED
from tests.convert.models import save_model, tensors
from tests.convert.test_import_hf import HF
from tests.files.hub_stub import hash_on_hub

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model"), "llama_1", max_shard_size="150KB")
    assert len(list(folder.glob("*.safetensors"))) == 3
    return folder


@pytest.fixture(scope="module")
def ours(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted") / "ours"
    from_hf(model, folder)
    return folder


@pytest.fixture
def theirs(model, tmp_path):
    """In shards; the folder beside it is not theirs."""
    shutil.copytree(model, tmp_path / "theirs")
    (tmp_path / "outside").mkdir()
    return tmp_path / "theirs"


def assert_nothing_was_written(tmp_path):
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside", "theirs"]


@pytest.mark.parametrize("where", ["../outside/", "/", "deep/"])
def test_an_index_names_files_of_its_folder(theirs, tmp_path, where):
    index = json.loads((theirs / INDEX).read_text())
    shard = index["weight_map"]["model.norm.weight"]
    named = f"{tmp_path}/outside/{shard}" if where == "/" else where + shard
    (theirs / "deep").mkdir()
    for folder in (theirs / "deep", tmp_path / "outside"):
        shutil.copyfile(theirs / shard, folder / shard)
    index["weight_map"] = {name: named if file == shard else file for name, file in index["weight_map"].items()}
    (theirs / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is no plain file name"):
        from_hf(theirs, tmp_path / "ours")
    assert_nothing_was_written(tmp_path)


@pytest.mark.parametrize("name", ["config.json", INDEX, "model-00001-of-00003.safetensors", *CARRIED])
def test_links_out_of_a_checkpoint_are_refused(theirs, tmp_path, name, capsys):
    """Even where what they lead to is of the right kind; before anything is written."""
    target = tmp_path / "outside" / "file"
    if (theirs / name).exists():
        (theirs / name).rename(target)
    else:
        target.write_text('{"password": "hunter2"}')
    (theirs / name).symlink_to("../outside/file")
    assert main(["convert", "from-hf", str(theirs), str(tmp_path / "ours")]) == 2
    assert f"{name} is a link to ../outside/file, outside its folder" in capsys.readouterr().err
    assert_nothing_was_written(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "hf_config.json", *CARRIED])
def test_links_out_of_a_converted_model_are_refused(ours, tmp_path, name):
    shutil.copytree(ours, tmp_path / "ours")
    (tmp_path / "ours" / name).unlink(missing_ok=True)
    (tmp_path / "file").write_text("{}")
    (tmp_path / "ours" / name).symlink_to("../file")
    with pytest.raises(ValueError, match="is a link to"):
        to_hf(tmp_path / "ours", tmp_path / "back")
    assert not list(tmp_path.glob("back*"))


def test_a_snapshot_of_the_hugging_face_cache_is_converted(theirs, tmp_path):
    """Its files are links to blobs, named by their hashes."""
    repository = tmp_path / "hub" / "models--a--b"
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (theirs / "tokenizer.model").write_text("a tokenizer")
    for path in theirs.iterdir():
        blob = hash_on_hub(path.name, path.read_bytes())
        shutil.copyfile(path, repository / "blobs" / blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob}")
    from_hf(snapshot, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.model").read_text() == "a tokenizer"
    assert tensors(tmp_path / "back") == tensors(theirs)
    assert not any(path.is_symlink() for path in (tmp_path / "ours").rglob("*"))


def _file(header, data=bytes(8), length=None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _one(**changes):
    return {"a": dict(dtype="F32", shape=[2], data_offsets=[0, 8]) | changes}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\2",
        _file(b""),
        _file(_one(), length=2**63),
        _file(_one(), length=2**64 - 1),
        _file(_one(), length=99_999_999),
        _file(b"{{{"),
        _file(b"\xff\xfe"),
        _file([1]),
        _file(b"[" * 10**5),
        _file(b'{"a":' * 10**5),
        _file(_one(data_offsets=[-8, 0])),
        _file(_one(data_offsets=[8, 0])),
        _file(_one(data_offsets=[0, 2**40])),
        _file(_one(data_offsets=[2**64 - 8, 2**64 - 1])),
        _file(_one(shape=[2**33, 2**33])),
        _file(_one(shape=[-2])),
        _file(_one(shape=[3])),
        _file(_one(dtype="Q9")),
        _file(_one(), bytes(80)),
        _file(_one() | {"b": _one()["a"]}),
        _file({"__metadata__": 3} | _one()),
    ],
    ids=lambda content: repr(content[:50]),
)
def test_malformed_headers(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file \(Error while dese"):
        TensorFolder(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("<html>", "is not JSON"),
        (b"\xff\xfe{", "is not JSON"),
        ("[" * 10**5, "is not JSON"),
        ("[]", "holds a JSON list, not an object"),
        ("{}", "lacks the weight_map"),
        ('{"weight_map": ["x"]}', "lacks the weight_map"),
        ('{"weight_map": {}}', "lacks the weight_map"),
        ('{"weight_map": {"a": 3, "b": "x"}}', "names a file 3, which is no plain file name"),
        ('{"weight_map": {"a": {"x": 1}}}', "is no plain file name"),
        (r'{"weight_map": {"a": "x\u0000"}}', "is no plain file name"),
    ],
)
def test_malformed_indices(tmp_path, content, message):
    (tmp_path / INDEX).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        TensorFolder(tmp_path)


def test_a_tensor_that_two_files_hold(theirs, tmp_path):
    """Which of them it is depends on who reads: the order of the files is nobody's word."""
    shard = theirs / "model-00002-of-00003.safetensors"
    save_file(load_file(shard) | {"model.embed_tokens.weight": np.zeros((257, 48), np.float32)}, shard)
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight is in model-00001-.* and in model-00002-"):
        from_hf(theirs, tmp_path / "ours")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(hidden_size="4096"), "hidden_size='4096', must be a whole number of at least 1"),
        (dict(num_attention_heads=0), "num_attention_heads=0, must be a whole number"),
        (dict(num_hidden_layers=-1), "num_hidden_layers=-1, must be"),
        (dict(vocab_size=True), "vocab_size=True, must be"),
        (dict(head_dim=1.5), "head_dim=1.5, must be"),
        (dict(num_key_value_heads=[8]), r"num_key_value_heads=\[8\], must be"),
        (dict(rms_norm_eps="small"), "rms_norm_eps='small', must be a number"),
        (dict(rms_norm_eps=float("nan")), "rms_norm_eps=nan, must be a number"),
        (dict(initializer_range=None), "initializer_range=None, must be a number"),
        (dict(max_position_embeddings="long"), "max_position_embeddings='long', must be a whole number"),
        (dict(rope_theta={}), "rope_theta={'a': 1}, must be a number"),
        (dict(rope_theta="1e4"), "rope_theta='1e4', must be a number"),
        (dict(rope_scaling=["linear"]), r"rope_scaling=\['linear'\], must be an object"),
        (dict(rope_scaling={"type": "linear", "factor": "2"}), "factor='2', must be a number"),
        (dict(rope_scaling={"type": ["linear"]}), r"rope type \['linear'\]"),
        (dict(architectures="LlamaForCausalLM"), "the model is a 'LlamaForCausalLM'"),
        (dict(architectures=[3]), "the model is a 3"),
        (dict(architectures=["A", "B"], text_config=HF), "the model is a A, B: ringformer has no such family"),
        (dict(model_type=["llama"]), "model_type"),
    ],
    ids=str,
)
def test_a_config_of_other_types(change, message):
    change = {key: {"a": 1} if value == {} else value for key, value in change.items()}
    with pytest.raises(ValueError, match=message):
        from_hf_config(HF | change)


def test_a_config_with_more_layers_than_there_are_tensors(theirs, tmp_path):
    """Told without a name for each of a billion of them."""
    config = json.loads((theirs / "config.json").read_text()) | {"num_hidden_layers": 10**9}
    (theirs / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json has 1000000000 layers, but the files have \d+ tensors"):
        from_hf(theirs, tmp_path / "ours")
