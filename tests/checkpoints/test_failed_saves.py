"""What a save does that the disk refuses: it ends with its cause in one line, and older ones are intact.

On small file systems of their own, which only root may mount."""

import dataclasses
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from orbax.checkpoint.checkpoint_managers import PreservationContext

from ringformer.checkpoints import sharded_arrays as checkpoint_arrays
from ringformer.checkpoints.array_folder import read_about
from ringformer.checkpoints.retention import Keep
from ringformer.checkpoints.verify import checkpoint_faults, saved_steps, tree_folder
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from tests.damage import flip
from tests.train.states import assert_same_bits, laid_out, logical_state, opened, setup

STATE = logical_state()


def at(step):
    return STATE._replace(step=np.asarray(step, np.int32))


def save(checkpoints, step):
    mesh, shardings = setup("1,1,1,1")
    checkpoints.save(laid_out(at(step), shardings, mesh))


def bytes_of(folder):
    """What it takes on a file system with pages of 4 KiB."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


def test_a_full_disk_is_told_at_the_next_step_and_older_saves_are_intact(tmp_path, mounted, capfd):
    checkpoints = opened(tmp_path / "measured")
    save(checkpoints, 1)
    checkpoints.close()
    run = mounted(2 * bytes_of(tmp_path / "measured") * 4 // 5) / "run"
    checkpoints = opened(run)
    save(checkpoints, 1)
    checkpoints._finish()
    save(checkpoints, 2)
    with pytest.raises(OSError, match=r"step 2 cannot be saved in .* \(No space left on device: .* from step 1$"):
        for _ in range(1000):
            checkpoints.check()
            time.sleep(0.01)
    checkpoints.close()  # says it no second time
    assert capfd.readouterr().err == "", "no stacks"
    restarted = opened(run)  # what was not finished is removed
    step, state, said = restarted.restore_newest()
    assert (step, said) == (1, [])
    assert_same_bits(state, at(1))
    restarted.close()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["1"]


def test_a_disk_that_becomes_read_only(mounted, capfd):
    run = mounted(2**24) / "run"
    checkpoints = opened(run)
    save(checkpoints, 1)
    checkpoints._finish()
    subprocess.run(["mount", "-o", "remount,ro", run.parent], check=True)
    with pytest.raises(OSError, match=r"step 2 cannot be saved in .*Read-only file system.*can go on from step 1$"):
        save(checkpoints, 2)
        checkpoints.close()
    checkpoints.close()
    assert capfd.readouterr().err == ""
    assert saved_steps(run) == [1] and checkpoint_faults(run, 1) == []


@pytest.mark.slow
def test_a_run_on_a_full_disk_ends_in_one_line_and_goes_on_to_the_same_state(config, steps, mounted, tmp_path, capfd):
    """Ended by the disk in its third save; moved to a larger one it ends as a run that was not."""
    config = dataclasses.replace(config, steps=4, checkpoint_every=1, keep_checkpoints=9)
    whole = train(prepare(config))
    one = bytes_of(Path(config.run_dir, "checkpoints", "1"))
    small = mounted(int(2.6 * one)) / "run"
    capfd.readouterr()
    with pytest.raises(
        OSError, match=r"^the checkpoint of step 3 cannot be saved .* \(No space left on device: .* step 2$"
    ):
        train(prepare(dataclasses.replace(config, run_dir=str(small))))
    assert "Traceback" not in capfd.readouterr().err
    assert saved_steps(small) == [1, 2] and checkpoint_faults(small, 2) == []
    shutil.copytree(small, tmp_path / "moved")
    resumed = train(prepare(dataclasses.replace(config, run_dir=str(tmp_path / "moved"))))
    for x, y in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_run_whose_newest_checkpoint_was_damaged_goes_back_and_says_so(config, steps, capfd):
    config = dataclasses.replace(config, steps=4, checkpoint_every=1, keep_checkpoints=9)
    whole = train(prepare(config))
    about = read_about(tree_folder(config.run_dir, 4))
    assert about["step"] == 4 and about["skipped_steps"] == [] and len(about["run"]) == 32 and about["data.store"]
    flip(tree_folder(config.run_dir, 4) / "params.embed" / "0.0", np.random.default_rng(0))
    capfd.readouterr()
    resumed = train(prepare(config))
    said = capfd.readouterr().err
    assert "step 4 is damaged (" in said and "params.embed/0.0 is not what was written" in said
    assert "the run goes on from step 3" in said and "from step 3 to 4" in said
    for x, y in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(x, y)
    assert saved_steps(config.run_dir) == [1, 2, 3, 4] and checkpoint_faults(config.run_dir, 4) == []


def test_a_read_only_run_dir_is_said_in_one_line(config, steps, mounted):
    folder = mounted(2**24)
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    with pytest.raises(ValueError, match=r"/mounted/run: the folder .*/mounted cannot be written to"):
        train(prepare(dataclasses.replace(config, run_dir=f"{folder}/run")))


def test_a_failed_close_is_raised_once(tmp_path, monkeypatch, capfd):
    async def broken(leaves):
        raise OSError("the disk does not return what was written to it")

    checkpoints = opened(tmp_path)
    save(checkpoints, 1)
    checkpoints._finish()
    monkeypatch.setattr(checkpoint_arrays, "_write", broken)
    save(checkpoints, 2)
    with pytest.raises(OSError, match=r"step 2 cannot be saved .*\(the disk does not return .*\); .* from step 1$"):
        checkpoints.close()
    checkpoints.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (Keep(), [*range(1, 10)]),
        (Keep(2), [8, 9]),
        (Keep(1, every=3), [3, 6, 9]),
        (Keep(1, best=2), [2, 5, 9]),
        (Keep(2, 4, 1), [4, 5, 8, 9]),
    ],
)
def test_which_checkpoints_stay(keep, left):
    """Steps 2, 5 and 8 are evaluated after they are saved; 5 is the best, and 2 the next."""
    keep = dataclasses.replace(keep, losses={})
    policy, there = keep, []
    for step in range(1, 10):
        there.append(SimpleNamespace(step=step, metrics=None))
        stays = policy.should_preserve(there, context=PreservationContext())
        there = [info for info, stay in zip(there, stays, strict=True) if stay]
        keep.losses |= {2: {2: 2.0}, 5: {5: 1.0}, 8: {8: 3.0}}.get(step, {})
    assert [info.step for info in there] == left


def test_the_others_are_removed(tmp_path):
    checkpoints = opened(tmp_path, keep=Keep(1, every=2, best=1, losses={1: 0.5}))
    for step in range(1, 5):
        save(checkpoints, step)
    checkpoints.close()
    assert saved_steps(tmp_path) == [1, 2, 4]
