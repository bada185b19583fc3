"""Which checkpoints stay when a run diverges: one that later steps have proven does, and the last line names it."""

import dataclasses
import json
import math
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from orbax.checkpoint.checkpoint_managers import PreservationContext

from ringformer.checkpoints.copies import copied_steps
from ringformer.checkpoints.retention import IN_A_ROW, Keep
from ringformer.checkpoints.verify import saved_steps
from ringformer.files.bucket import ObjectStore
from ringformer.processes.stopping import Stopped
from ringformer.runs.config import OptimizerConfig
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from tests.train.runs import MODEL, read_metrics


@pytest.fixture
def long(config):
    return dataclasses.replace(config, steps=33, checkpoint_every=3, keep_checkpoints=2)


def bad_gradient(state, metrics):
    return state, metrics | {"grad_norm": math.nan, "skipped": 1}


def losing(loss):
    return lambda state, metrics: (state, metrics | {"loss": loss})


def stopped(change):
    """As `change` has it, and a signal comes."""

    def changed(state, metrics):
        os.kill(os.getpid(), signal.SIGTERM)
        return change(state, metrics)

    return changed


def explosion():
    """The losses of a run whose learning rate became 3e3 at step 22, and stays diverged."""
    losses = {step: 5.5 - 0.09 * step for step in range(1, 22)} | {22: 3.56, 23: 12_888_272.0}
    return {step: losing(losses.get(step, 5.5)) for step in range(1, 34)}


def move_away(run_dir, said):
    """Do what the last line says."""
    steps = re.search(r"move ([\d, ]+) out of (\S+)/checkpoints", said)
    assert steps and steps[2] == run_dir
    for step in steps[1].split(", "):
        Path(run_dir, "checkpoints", step).rename(Path(run_dir).with_name(f"{Path(run_dir).name}-{step}"))


LOWER = {"optimizer": OptimizerConfig(learning_rate=1e-5)}


@pytest.mark.slow
def test_good_checkpoints_survive_gradients_that_are_nan_for_good(long, steps, tmp_path):
    steps.at = dict.fromkeys(range(22, 34), bad_gradient)
    with pytest.raises(FloatingPointError, match="11 steps in a row are skipped, 22 to 32") as caught:
        train(prepare(long))
    said = str(caught.value)
    assert "The same command resumes the run from the latest checkpoint. The newest checkpoint that is proven" in said
    assert "is step 18: to go back to it, move 21 out of" in said and "--allow=optimizer.learning_rate" in said
    assert saved_steps(long.run_dir) == [18, 21]
    shutil.copytree(long.run_dir, tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "lock")
    steps.at = {}
    other = dataclasses.replace(long, run_dir=str(tmp_path / "other"))
    train(prepare(other))
    assert saved_steps(other.run_dir) == [30, 33], "as it says, from 21"
    move_away(long.run_dir, said)
    train(prepare(dataclasses.replace(long, **LOWER), ["optimizer.learning_rate"]))
    assert saved_steps(long.run_dir) == [30, 33] and '"step": 18,' in Path(long.run_dir, "changes.jsonl").read_text()


@pytest.mark.slow
def test_a_stop_in_a_streak_saves_and_removes_nothing(long, steps, capfd):
    steps.at = dict.fromkeys(range(22, 28), bad_gradient) | {25: stopped(bad_gradient)}
    said = r"at step 25 of 33, .* resumes the run. But the last step was skipped. .* step 18: .* move 21, 25 out of"
    with pytest.raises(Stopped, match=said):
        train(prepare(long))
    assert saved_steps(long.run_dir) == [18, 21, 25]
    steps.at |= {28: stopped(steps.at[27])}
    with pytest.raises(Stopped):
        train(prepare(long))
    assert saved_steps(long.run_dir) == [18, 21, 25, 28]
    steps.at |= {31: stopped(losing(1.0))}
    with pytest.raises(Stopped, match=r"resumes the run$"):
        train(prepare(long))
    assert saved_steps(long.run_dir) == [30, 31]
    assert "sound" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_save_that_is_due_in_a_streak_comes_after_it(long, steps):
    steps.at = dict.fromkeys(range(20, 26), bad_gradient)
    train(prepare(dataclasses.replace(long, steps=27, keep_checkpoints=9)))
    assert saved_steps(long.run_dir) == [3, 6, 9, 12, 15, 18, 26, 27]


@pytest.mark.slow
def test_a_streak_is_counted_over_a_stop(long, steps):
    steps.at = dict.fromkeys(range(22, 34), bad_gradient) | {25: stopped(bad_gradient)}
    with pytest.raises(Stopped):
        train(prepare(long))
    steps.at[25] = bad_gradient
    with pytest.raises(FloatingPointError, match=r"11 steps in a row are skipped, 22 to 32.* move 21, 25 out of"):
        train(prepare(long))
    assert saved_steps(long.run_dir) == [18, 21, 25]


@pytest.mark.slow
def test_a_run_that_ends_in_a_streak_has_its_last_step_and_says_so(long, steps, capfd):
    steps.at = dict.fromkeys(range(22, 25), bad_gradient)
    train(prepare(dataclasses.replace(long, steps=24)))
    assert saved_steps(long.run_dir) == [18, 21, 24]
    last = re.sub(r"\s+", " ", capfd.readouterr().err).rpartition("warning: ")[2]
    assert last.startswith("the last step was skipped. The newest checkpoint") and "move 21, 24 out of" in last


@pytest.mark.slow
@pytest.mark.parametrize("stop", [None, 24])
def test_a_finite_explosion_leaves_what_was_proven_before(stop, long, steps, tmp_path, capfd):
    """However long it goes on; stopped in between, without the rows of metrics.jsonl; in the copies, too."""
    keep = 1 if stop is None else 2
    copies = "" if stop is None else f"file://{tmp_path}/copies"
    long = dataclasses.replace(long, keep_checkpoints=keep, copy_to=copies)
    steps.at = explosion()
    if stop:
        again = steps.at[stop]
        steps.at[stop] = stopped(again)
        with pytest.raises(Stopped, match=r"is step 21: to go back to it, move 24 out of .*, and another copy_to$"):
            train(prepare(long))
        steps.at[stop] = again
        Path(long.run_dir, "metrics.jsonl").write_text("")
    train(prepare(long))
    assert saved_steps(long.run_dir) == [21, *[30, 33][-keep:]]
    assert not copies or copied_steps(ObjectStore(copies)) == [21, 30, 33]
    err = re.sub(r"\s+", " ", capfd.readouterr().err)
    assert "warning: step 30 is saved, but the last step's loss, 5.5, is over" in err
    last = err.rpartition("warning: ")[2]
    assert last.startswith("the last step's loss, 5.5, is over") and "is step 21: to go back to it, move" in last
    move_away(long.run_dir, last)
    steps.at = {step: losing(3.5) for step in range(22, 34)}
    again = dataclasses.replace(long, **LOWER, copy_to=copies and f"{copies}2")
    train(prepare(again, ["optimizer.learning_rate"]))
    assert saved_steps(long.run_dir) == [30, 33], "the last step is proven by none: besides it the newest that is"
    assert "sound" not in capfd.readouterr().err


def test_who_comes_back_keeps_no_more_than_others():
    """Policy alone: what stays of saves at every third step when the losses are out of bounds from 23 to 39."""
    keep, there, kept = Keep(2), [], {}
    for step in range(1, 61):
        keep.see(step, 5.5 if 23 <= step < 40 else 3.5)
        if step % 3 == 0:
            there.append(SimpleNamespace(step=step, metrics=None))
            stays = keep.should_preserve(there, context=PreservationContext())
            there = [info for info, stay in zip(there, stays, strict=True) if stay]
            kept[step] = [info.step for info in there]
    assert kept[21] == [18, 21] and kept[24] == [21, 24] and kept[27] == [21, 24, 27]
    assert kept[45] == [21, 42, 45] and kept[48] == [45, 48] and kept[60] == [57, 60]


@pytest.mark.slow
def test_a_real_explosion(config):
    """Of a model that learned for 21 steps, and goes on at a learning rate of 3000: finite losses, then NaN."""
    config = dataclasses.replace(
        config,
        model=MODEL,
        mesh_dim="2,4,1,1",
        batch_size=8,
        steps=21,
        checkpoint_every=3,
        keep_checkpoints=1,
        data=dataclasses.replace(config.data, held_out=0.0),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1, schedule="constant"),
    )
    train(prepare(config))
    wild = dataclasses.replace(config, steps=45, optimizer=dataclasses.replace(config.optimizer, learning_rate=3e3))
    with pytest.raises(FloatingPointError, match=r"steps in a row are skipped.* is step 21: .* move 24 out of"):
        train(prepare(wild, ["optimizer.learning_rate"]))
    losses = {row["step"]: row["loss"] for row in read_metrics(config.run_dir)}
    assert losses[22] < 2 and losses[23] > 5 and losses[24] > 5 and all(map(math.isfinite, losses.values()))
    assert saved_steps(config.run_dir) == [21, 24]


def seen(losses, keep=None):
    keep = keep or Keep()
    for step, loss in enumerate(losses, 1):
        keep.see(step, loss)
    return keep


def test_when_a_step_is_sound():
    """All of eight losses in a row up to 1.25 times the lowest mean and 0.25; through JSON at any step."""
    rng = np.random.default_rng(0)
    losses = [None if rng.random() < 0.1 else float(x) for x in 1 + rng.exponential(0.3, 300)]
    losses[100:150] = [x and x + 1 for x in losses[100:150]]
    running, sound, lowest, past = Keep(), 0, math.inf, []
    for step, loss in enumerate(losses, 1):
        running.see(step, loss)
        if loss is not None:
            past.append(loss)
            if len(past) >= 8:
                lowest = min(lowest, np.mean(past[-8:]))
                sound = step if max(past[-8:]) <= 1.25 * lowest + 0.25 else sound
        assert running.sound == sound and running.skipping == (loss is None)
        told = json.loads(json.dumps(running.notes()))
        again = Keep()
        again.resume(told, ["optimizer.learning_rate", "steps"])
        assert again.notes() == running.notes()
        running = again
    assert sound > 150


def test_one_lucky_batch_proves_nothing():
    good, bad = [2.0] * 20, [6.0] * 200
    for at in range(1, 200, 7):
        bad[at] = 1.9
    assert seen(good + bad).sound == 20


@pytest.mark.parametrize(("noise", "share", "gap"), [(0.1, 0.85, 30), (0.2, 0.1, 300)])
def test_how_often_noisy_losses_are_sound(noise, share, gap):
    """Of losses that fall from 7 to 2, with so much noise, a standard deviation of the logarithm."""
    losses = (2 + 5 * np.exp(-np.arange(5000) / 300)) * np.random.default_rng(2).lognormal(0, noise, 5000)
    keep, sound = Keep(), [0]
    for step, loss in enumerate(losses.tolist(), 1):
        keep.see(step, loss)
        sound += [step] if keep.sound == step else []
    assert len(sound) > share * 5000 and max(np.diff([*sound, 5001])) < gap


def test_fewer_than_eight_losses_prove_nothing():
    assert seen([2.0] * (IN_A_ROW - 1)).proven([1, 2]) is None and seen([2.0] * IN_A_ROW).proven([1, 2, 8]) == 2


def test_a_change_of_data_has_a_level_of_its_own():
    """That of the learning rate has not: what diverged with the old one stays diverged."""
    told = seen([2.0] * 20).notes()
    for changed, sound in ((["data.store"], 8), (["seq_len", "steps"], 8), (["optimizer.learning_rate"], 20), ([], 20)):
        keep = Keep()
        keep.resume(told, changed)
        assert keep.proven([10, 19, 20]) == 19
        keep.sound = min(keep.sound, 0) if sound == 8 else keep.sound
        assert seen([6.0] * 30, keep).sound == (30 if sound == 8 else 20)


def test_a_batch_without_trained_tokens_is_no_loss(long, steps):
    """Its loss is 0, of nothing: all that come would be far above."""
    steps.at = {step: lambda s, m: (s, m | {"loss": 0.0, "tokens": 0}) for step in (3, 4, 11)}
    train(prepare(dataclasses.replace(long, steps=12, checkpoint_every=0)))
    about = json.loads(Path(long.run_dir, "checkpoints/12/default/_METADATA").read_text())["custom_metadata"]["about"]
    assert (about["sound_step"], about["loss_level"]) == (12, 1.0)
