"""A session on disk: what is restored goes on as what was saved, bit for bit; what differs or is damaged is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from ringformer.checkpoints import zarr_files
from ringformer.checkpoints.array_folder import WRITTEN_LAST
from ringformer.files.manifest import DamagedFiles
from ringformer.inference import generator as generators
from ringformer.inference.generator import Generator
from ringformer.inference.sampling import Sampling
from ringformer.inference.session_files import read_session
from tests.damage import WAYS, files, flip, truncate
from tests.inference.models import CONFIG, generator
from tests.inference.runs import model_folder
from tests.inference.test_session_forks import DOCUMENT, QUESTIONS, check

ROWS, TURN = [DOCUMENT, DOCUMENT[:4]], [[8, 1, 30], [17]]
CASES = {
    "one device": ("1,1,1,1", {}, {}),
    "one device, int8": ("1,1,1,1", {}, {"cache_dtype": "int8"}),
    "ring and heads": ("1,1,2,4", {}, {}),
    "ring and heads, int8, in chunks": ("1,1,2,4", {}, {"cache_dtype": "int8", "prefill_chunk": 16}),
    "all but dp, striped": ("1,2,2,2", {"layout": "striped"}, {"prefill_chunk": 8}),
    "dp, bfloat16": ("2,1,1,4", {"compute_dtype": "bfloat16"}, {}),
    "windows": ("1,1,1,4", {"window": 9}, {"prefill_chunk": 8}),
}
SLOW = "one device", "all but dp, striped", "windows"


def assert_same(restored, session):
    """Every array on the devices, with its sharding, but for slots that hold nothing; the host's account of slots."""
    held = (session._slots.positions >= 0).any(axis=0)
    for found, expected in zip(jax.tree.leaves(restored._state), jax.tree.leaves(session._state), strict=True):
        assert (found.dtype, found.sharding) == (expected.dtype, expected.sharding)
        where = np.s_[:, :, :, held] if found.ndim > 3 else ...
        np.testing.assert_array_equal(np.asarray(found)[where], np.asarray(expected)[where])
    for name in ("positions", "lengths", "_taken", "capacity"):
        np.testing.assert_array_equal(getattr(restored._slots, name), getattr(session._slots, name))
    assert restored.lengths == session.lengths


@pytest.mark.usual("ring and heads")
@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] if c in SLOW else []) for c in CASES])
def test_a_restored_session_goes_on_as_the_saved_one(case, tmp_path):
    """Logit for logit: decoded and drawn, with turns, scores, forgotten tokens and marks. In float32, its logits are
    also those of whole forward passes."""
    mesh_dim, changes, options = CASES[case]
    config = replace(CONFIG, **changes)
    model = generator(config, mesh_dim, **options)
    session = model.session(2)
    session.append(ROWS)
    new = np.array([*session.decode(max_new_tokens=3)]).T
    before = [[*row, *tokens] for row, tokens in zip(ROWS, new.tolist(), strict=True)]
    session.truncate([length - 1 for length in session.lengths])
    session.append(TURN)  # slots of forgotten tokens are taken again, and others are empty
    session.save(tmp_path / "saved", {"name": case})
    restored = model.restore_session(tmp_path / "saved")
    assert read_session(tmp_path / "saved")["about"] == {"name": case}
    assert_same(restored, session)
    drawn = Sampling(0.9, top_k=20, seed=3)
    both = session, restored
    for act in (
        lambda x: [*x.decode(max_new_tokens=3)],
        lambda x: [*x.decode(max_new_tokens=3, sampling=drawn)],
        lambda x: x.append([[3], [9, 9]]),
        lambda x: [score.losses.tolist() for score in x.score([[5, 6], [7]])],
        lambda x: x.truncate([length - 2 for length in x.lengths]),
        lambda x: x.append([[1], [2]]),
        lambda x: [mark := x.mark(), *x.decode(max_new_tokens=2), x.rewind(mark)][1:],
        lambda x: [*x.decode(max_new_tokens=2)],
    ):
        found, expected = act(restored), act(session)
        assert found == expected
        assert_same(*both[::-1])
    if config.compute_dtype == "float32" and "cache_dtype" not in options:
        again = model.restore_session(tmp_path / "saved")
        texts = [[*text[:-1], *turn] for text, turn in zip(before, TURN, strict=True)]
        check(again, texts, config)


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["compute", "int8"])
def test_a_restored_text_is_forked(cache_dtype, tmp_path):
    """As the one that was saved, which may have forks meanwhile; and by another generator of the same weights."""
    model = generator(CONFIG, "1,1,2,4", cache_dtype=cache_dtype)
    session = model.session(1)
    session.append([DOCUMENT])
    fork = session.fork(3, max_new=24)
    session.save(tmp_path / "saved")
    other = generator.__wrapped__(CONFIG, "1,1,2,4", cache_dtype=cache_dtype)
    again = other.restore_session(tmp_path / "saved").fork(3, max_new=24)
    for rows in (fork, again):
        rows.append(QUESTIONS)
    np.testing.assert_array_equal(np.asarray(again.logits), np.asarray(fork.logits))
    assert [*again.decode(max_new_tokens=4)] == [*fork.decode(max_new_tokens=4)]


def test_only_slots_in_use_are_written(tmp_path):
    """Of a cache for 4096 tokens that holds 21, as much as of one for 64; each device's share in files of its own."""
    sizes = {}
    for length in (64, 4096):
        session = generator(CONFIG, "1,1,1,4", max_length=length).session(1)
        session.append([DOCUMENT])
        session.save(tmp_path / str(length))
        sizes[length] = {
            path.name: path.stat().st_size for path in (tmp_path / str(length) / "keys").iterdir() if path.suffix
        }
        shape = json.loads((tmp_path / str(length) / "keys" / "zarr.json").read_text())["shape"]
        assert shape == [2, 1, 2, 4 * session._slots.top, 8] and session._slots.top < 9
    assert sorted(name for name in sizes[64] if name != "zarr.json") == [f"0.0.0.{rank}.0" for rank in range(4)]
    assert sum(sizes[4096].values()) < 1.5 * sum(sizes[64].values())


def test_no_more_than_a_chunk_is_copied_to_the_host_at_once(tmp_path, monkeypatch):
    """Blocks are made while others are written, not before."""
    made, written, write = [], [], zarr_files.write_arrays

    async def counted(leaves, *, create):
        def blocks(leaf):
            for place, block in leaf.blocks:
                made.append(block.nbytes)
                written.append(block.base is None or block.base.nbytes == block.nbytes)
                yield place, block

        return await write([leaf._replace(blocks=blocks(leaf)) for leaf in leaves], create=create)

    monkeypatch.setattr("ringformer.checkpoints.sharded_arrays.write_arrays", counted)
    monkeypatch.setattr("ringformer.checkpoints.sharded_arrays.CHUNK_BYTES", 1000)
    session = generator(CONFIG, "1,1,1,2").session(1)
    session.append([DOCUMENT])
    session.save(tmp_path / "saved")
    assert all(written) and max(made) <= 1000, "views of larger copies"
    assert len(made) > 8


OTHERS = [
    ("checkpoint=of seed 0 (here of seed 1)", {}, {"checkpoint": "of seed 1"}),
    ("mesh_dim=1,1,1,2 (here 1,1,1,4)", {}, {"mesh_dim": "1,1,1,4"}),
    ("mesh_dim=1,1,1,2 (here 1,2,1,2)", {}, {"mesh_dim": "1,2,1,2"}),
    ("compute_dtype=float32 (here bfloat16)", {"compute_dtype": "bfloat16"}, {}),
    ("cache_dtype=compute (here int8)", {}, {"cache_dtype": "int8"}),
    ("max_length=64 (here 32)", {}, {"max_length": 32}),
    ("prefill_chunk=None (here 8)", {}, {"prefill_chunk": 8}),
    ("layout=zigzag (here striped)", {"layout": "striped"}, {}),
    ("architecture=", {"rope_theta": 5e5}, {}),
    ("architecture=", {"window": 3}, {}),
    ("max_length=64 (here 32), prefill_chunk=None (here 8)", {}, {"max_length": 32, "prefill_chunk": 8}),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    session = generator(CONFIG, "1,1,1,2").session(1)
    session.append([DOCUMENT])
    session.save(folder := tmp_path_factory.mktemp("sessions") / "saved")
    return folder


@pytest.mark.usual(
    "architecture=-changes8-options8",
    "max_length=64 (here 32), prefill_chunk=None (here 8)-changes10-options10",
    "mesh_dim=1,1,1,2 (here 1,1,1,4)-changes1-options1",
)
@pytest.mark.parametrize(("named", "changes", "options"), OTHERS)
def test_another_model_mesh_or_size_is_refused_by_name(saved, named, changes, options):
    with pytest.raises(ValueError, match="load the model as it was then, or read the text again") as refused:
        generator(replace(CONFIG, **changes), **{"mesh_dim": "1,1,1,2"} | options).restore_session(saved)
    assert named in str(refused.value) and "\n" not in str(refused.value)
    others = {"architecture"} - {named.split("=")[0]}
    assert not [name for name in others if name in str(refused.value)]


def swap_keys_and_values(folder):
    one, other = (folder / name / "0.0.0.0.0" for name in ("keys", "values"))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def test_no_damage_is_silent(saved, tmp_path):
    """A bit of each file, each file cut, emptied, lost or zeroed, and chunks that changed places."""
    model, rng, tried = generator(CONFIG, "1,1,1,2"), np.random.default_rng(0), 0
    names = [path.relative_to(saved) for path in files(saved) if path.name not in WRITTEN_LAST]
    trials = [(name, way) for name in names for way in (lambda file: flip(file, rng), *WAYS)]
    trials = [trial for trial in trials if trial != (Path("manifest.json"), truncate)]  # by a newline
    for name, damage in [*trials, (None, swap_keys_and_values)]:
        copy = shutil.copytree(saved, tmp_path / str(tried))
        damage(copy / name if name else copy)
        with pytest.raises(DamagedFiles, match="read its text again") as refused:
            model.restore_session(copy)
        assert str(copy) in str(refused.value) and "\n" not in str(refused.value)
        assert name is None or str(name) in str(refused.value) or name.name == "manifest.json"
        shutil.rmtree(copy)
        tried += 1
    assert tried == 5 * len(names) and len(names) == 13


def test_folders_that_are_no_session(saved, tmp_path):
    model = generator(CONFIG, "1,1,1,2")
    run = model_folder(tmp_path / "model")
    for folder in (tmp_path, run, run / "checkpoints" / "0" / "default"):
        with pytest.raises(ValueError, match=f"{folder} holds no session: name a folder that a session was saved to"):
            model.restore_session(folder)
    for folder in (tmp_path / "none", saved / "manifest.json"):
        with pytest.raises(FileNotFoundError, match=f"there is no session in {folder}"):
            model.restore_session(folder)


def test_what_cannot_be_saved_is_refused(saved, tmp_path):
    session = generator(CONFIG, "1,1,1,2").session(1)
    folder = tmp_path / "saved"
    with pytest.raises(ValueError, match="there is nothing to save: append a prompt first"):
        session.save(folder)
    session.append([DOCUMENT])
    with pytest.raises(ValueError, match=f"{saved} exists: choose another folder for the session, or delete it"):
        session.save(saved)
    with pytest.raises(ValueError, match=r"s3:/bucket/a is no folder"):
        session.save("s3://bucket/a")
    fork = session.fork(2, 8)
    with pytest.raises(ValueError, match="save the session that it was forked from"):
        fork.save(folder)
    del fork
    session.truncate([5])
    with pytest.raises(ValueError, match="row 0 was truncated: append to it first, or rewind to a mark"):
        session.save(folder)
    nameless = generator(CONFIG, "1,1,1,2", checkpoint=None)
    session = nameless.session(1)
    session.append([DOCUMENT])
    with pytest.raises(ValueError, match=r"weights without a checkpoint cannot be recognized again: use Generator\."):
        session.save(folder)
    with pytest.raises(ValueError, match="weights without a checkpoint are those of no saved session"):
        nameless.restore_session(saved)
    assert not folder.exists()


def test_a_full_disk_is_one_line_and_leaves_nothing(mounted, capfd):
    small_disk = mounted(24 * 1024)
    session = generator(CONFIG, "1,1,1,2").session(1)
    session.append([DOCUMENT])
    with pytest.raises(OSError, match=rf"the session cannot be saved in {small_disk}/s \(No space left on device: "):
        session.save(small_disk / "s")
    assert [*small_disk.iterdir()] == [] and capfd.readouterr().err == ""


def test_a_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    """The disk returns other bits than were written; then the process ends before the manifest is there; then all is
    well, and nothing of the failures is left."""
    model = generator(CONFIG, "1,1,1,2")
    session = model.session(1)
    session.append([DOCUMENT])
    real = zarr_files.read_back
    monkeypatch.setattr(zarr_files, "read_back", lambda path: real(path)[:-1] + b"\0")
    with pytest.raises(OSError, match="the session cannot be saved in"):
        session.save(tmp_path / "saved")
    assert [*tmp_path.iterdir()] == []
    monkeypatch.setattr(zarr_files, "read_back", real)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ringformer.checkpoints.array_folder.write_manifest", killed)
        with pytest.raises(KeyboardInterrupt):
            session.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    session.save(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert_same(model.restore_session(tmp_path / "saved"), session)


def test_a_checkpoint_that_is_written_meanwhile_is_noticed(tmp_path, monkeypatch):
    """The weights that were read may be either's, and a session of theirs would name the wrong one."""
    run, restore = model_folder(tmp_path / "model"), generators.restore_params

    def restored(*arguments):
        params = restore(*arguments)
        manifest = run / "checkpoints" / "0" / "default" / "manifest.json"
        manifest.write_text(manifest.read_text() + " ")
        return params

    assert Generator.load(run, max_length=64)._settings is not None
    monkeypatch.setattr(generators, "restore_params", restored)
    with pytest.raises(ValueError, match=f"{run} wrote a checkpoint while it was being read: start again"):
        Generator.load(run, max_length=64)
