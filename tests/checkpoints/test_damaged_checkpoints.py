"""A damaged checkpoint is an error that names the file, or the run says that it goes on from an older one.

Silent is a state that is not, to the bit, the one that was saved, without an error or a word."""

import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from ringformer.checkpoints.array_folder import WRITTEN_LAST
from ringformer.checkpoints.saved_model import restore_params
from ringformer.checkpoints.verify import checkpoint_faults, saved_steps, tree_folder
from ringformer.cli import main
from ringformer.files.manifest import MANIFEST, DamagedFiles
from tests.checkpoints.formats import to_zarr2, without_hashes
from tests.commit import generator_of_this_commit
from tests.damage import WAYS, delete, files, flip, places
from tests.train.states import MESHES, assert_same_bits, laid_out, logical_state, opened, save, setup

STATES = {step: logical_state(seed=step)._replace(step=np.asarray(step, np.int32)) for step in (10, 20)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save(folder, "1,1,1,1", *STATES.values())
    return folder


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def go_on(run, file):
    """What a run makes of its checkpoints after `file`, of step 20, was damaged: "named" or "unharmed". What it sets
    aside is brought back."""
    step, state, said = opened(run).restore_newest()
    if said:
        named = str(
            file.parent if file.name == MANIFEST else file
        )  # a wrong hash is blamed on the file that has it not
        assert step == 10 and len(said) == 1 and named in said[0] and "goes on from step 10" in said[0]
        assert saved_steps(run) == [10]
        (run / "damaged" / "20").rename(run / "checkpoints" / "20")
        return "named"
    assert step == 20
    assert_same_bits(state, STATES[20])
    return "unharmed"


def newest(run):
    """The step that a run goes on from, and what it says; the state is the one that was saved."""
    step, state, said = opened(run).restore_newest()
    assert_same_bits(state, STATES[step])
    return step, said


def verified(run, file) -> str:
    """Tell whether a verification names the file."""
    faults = checkpoint_faults(run, 20) or []
    return "named" if any(str(file) in fault or str(file.parent) in fault for fault in faults) else "unharmed"


@pytest.mark.parametrize("restores", [1, pytest.param(None, marks=pytest.mark.slow)])
def test_every_file_damaged_in_every_way_is_named_or_does_no_harm(run, restores):
    """Verified each time; and restored for each file (None), or for this many that the commit draws: a restore takes a
    hundred times as long."""
    assert newest(run) == (20, [])
    unharmed = set()
    damaged = files(run / "checkpoints" / "20")
    numbers = range(len(damaged))
    if restores is not None:
        numbers = generator_of_this_commit().choice(len(damaged), restores, replace=False)
    for number, file in enumerate(damaged):
        content = file.read_bytes()
        for way, damage in enumerate(WAYS):
            damage(file)
            restored = number in numbers and number % len(WAYS) == way
            if (go_on(run, file) if restored else verified(run, file)) == "unharmed":
                unharmed.add((file.name, damage.__name__))
            file.write_bytes(content)
    every_way = {(name, damage.__name__) for name in WRITTEN_LAST for damage in WAYS}
    assert unharmed == every_way | {(MANIFEST, "truncate")}, "what Orbax writes afterwards, and an end of line"
    assert_same_bits(opened(run).restore(10), STATES[10])


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_no_flipped_bit_is_silent(run, count):
    rng = generator_of_this_commit()
    results = []
    for file in places(run / "checkpoints" / "20", count, rng):
        content = file.read_bytes()
        flip(file, rng)
        results.append(go_on(run, file))
        file.write_bytes(content)
    assert results.count("named") >= 0.9 * count and len(results) == count


def test_files_that_are_added_or_change_places_are_noticed(run):
    folder = tree_folder(run, 20)
    one, other = (folder / f"{kind}.layers.attention.wq" / "0.0.0.0" for kind in ("params", "opt_state.0.mu"))
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    assert go_on(run, one) == "named"
    one.write_bytes(contents[0])
    strange = folder / "params.embed" / "0.1"
    strange.write_bytes(contents[0])
    assert go_on(run, strange) == "named"
    strange.unlink()
    older = tree_folder(run, 10) / "params.embed"
    shutil.rmtree(folder / "params.embed")
    shutil.copytree(older, folder / "params.embed")
    assert go_on(run, folder / "params.embed" / "0.0") == "named"


def test_a_whole_folder_under_another_step_is_noticed(run):
    shutil.copytree(run / "checkpoints" / "10", run / "checkpoints" / "30")
    assert main(["checkpoint", "verify", str(run)]) == 1
    with pytest.raises(DamagedFiles, match="checkpoints/30 holds step 10, under another name"):
        opened(run).restore(30)
    mesh, shardings = setup("1,1,1,1")
    with pytest.raises(DamagedFiles, match=r"holds step 10, .*: move .*/30 away to take that of step 20"):
        restore_params(run, shardings.params, mesh)
    step, (said,) = newest(run)
    assert step == 20 and "step 30 is damaged" in said


def test_the_newest_whole_one_is_taken_and_the_others_are_kept_aside(run):
    shutil.copytree(run / "checkpoints" / "20", run / "checkpoints" / "30")
    for step in (20, 30):
        flip(tree_folder(run, step) / "params.embed" / "0.0", np.random.default_rng(0))
    checkpoints = opened(run)
    step, state, said = checkpoints.restore_newest()
    assert step == 10 and saved_steps(run) == [10]
    assert [f"step {n} is damaged" in line for n, line in zip((30, 20), said, strict=True)] == [True, True]
    assert_same_bits(state, STATES[10])
    assert sorted(path.name for path in (run / "damaged").iterdir()) == ["20", "30"]
    mesh, shardings = setup("1,1,1,1")
    checkpoints.save(laid_out(STATES[20], shardings, mesh))  # anew, under the same name
    checkpoints.close()
    flip(tree_folder(run, 20) / "params.embed" / "0.0", np.random.default_rng(0))
    assert newest(run)[0] == 10
    assert sorted(path.name for path in (run / "damaged").iterdir()) == ["20", "20-2", "30"]


def test_without_a_whole_one_nothing_is_moved_and_nothing_begins_anew(run):
    for step in (10, 20):
        delete(tree_folder(run, step) / "step" / "0")
    with pytest.raises(DamagedFiles, match=r"no checkpoint is whole \(step 20: .*/step/0 is missing; step 10: "):
        opened(run).restore_newest()
    assert saved_steps(run) == [10, 20] and not (run / "damaged").exists()


def test_readers_of_parameters_compare_the_files_that_they_read(run):
    mesh, shardings = setup("1,1,1,2")
    flip(tree_folder(run, 20) / "opt_state.0.mu.embed" / "0.0", np.random.default_rng(0))
    assert_same_bits(restore_params(run, shardings.params, mesh), STATES[20].params)
    flip(tree_folder(run, 20) / "params.embed" / "0.0", np.random.default_rng(0))
    with pytest.raises(DamagedFiles, match=r"step 20 is damaged \(.*params.embed/0.0 .*: move .*/20 away .* step 10"):
        restore_params(run, shardings.params, mesh)


def test_checkpoints_of_before_are_restored_with_a_word(run, capsys):
    to_zarr2(tree_folder(run, 20))
    without_hashes(tree_folder(run, 20))
    step, said = newest(run)
    assert step == 20 and len(said) == 1 and "cannot be verified" in said[0]
    mesh, shardings = setup("1,1,1,1")
    assert_same_bits(restore_params(run, shardings.params, mesh), STATES[20].params)
    assert "cannot be verified" in capsys.readouterr().err
    (tree_folder(run, 20) / "params.embed" / "0.0").unlink()
    with pytest.raises(DamagedFiles, match=r"params.embed cannot be read: .* missing\): move .*/20 away to take .* 10"):
        opened(run).restore(20)
    assert newest(run)[0] == 10


def test_checkpoints_that_orbax_wrote_itself_are_restored_with_a_word(tmp_path):
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        manager.save(20, args=ocp.args.StandardSave(jax.tree.map(jax.numpy.asarray, STATES[20]._asdict())))
    step, said = newest(tmp_path)
    assert step == 20 and "cannot be verified" in said[0]


@pytest.mark.parametrize("name", ["a#b", "a?b", "a%20b", "a b", "[/b]"])
def test_odd_paths(saved, tmp_path, name):
    shutil.copytree(saved, tmp_path / name)
    assert newest(tmp_path / name) == (20, [])
    assert_same_bits(opened(tmp_path / name, MESHES[0]).restore(20), STATES[20])


def test_the_command(run, capsys):
    def said(*words):
        code = main(["checkpoint", *words])
        return code, *capsys.readouterr()

    code, out, _ = said("list", str(run))
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == ["step", "10", "20"]
    code, out, _ = said("inspect", str(run), "--step=10")
    assert code == 0 and '"step": 10' in out and "params.embed " in out and "float32 [61, 36], 1 chunks" in out
    assert len([line for line in out.splitlines() if "chunks" in line]) == len(jax.tree.leaves(STATES[10]))
    code, out, _ = said("verify", str(run))
    assert code == 0 and "step 10 is whole" in out and "step 20 is whole" in out
    damaged = tree_folder(run, 20) / "params.embed" / "0.0"
    flip(damaged, np.random.default_rng(0))
    code, out, _ = said("verify", str(run))
    assert code == 1 and f"step 20 is damaged:\n  {damaged} is not what was written" in out
    assert said("verify", str(run), "--step=10")[0] == 0
    without_hashes(tree_folder(run, 10))
    code, out, _ = said("verify", str(run), "--step=10")
    assert code == 1 and "cannot be verified" in out
    assert said("list", str(run / "none"))[0] == 2
    code, _, err = said("inspect", str(run), "--step=5")
    assert code == 2 and "has no checkpoint of step 5: it has 10, 20" in err
