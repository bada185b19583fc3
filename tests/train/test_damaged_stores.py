"""A run whose store is not what was built: refused at its start or, of a large store, before a save of what it read."""

import dataclasses
import os
import re
import threading
from pathlib import Path

import pytest

from ringformer.checkpoints.saved_model import latest_step
from ringformer.data.stores import integrity
from ringformer.data.stores.checked_array import CheckedArray
from ringformer.train import evaluation, loop
from ringformer.train.loop import train
from ringformer.train.prepare import prepare


@pytest.fixture
def built(config):
    """A config whose stores are there."""
    prepare(config)
    return dataclasses.replace(config, steps=60, checkpoint_every=30)


def flip(path: Path):
    """Turn a bit where it stands: who reads meanwhile meets no file that is cut."""
    middle = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 16]))


@pytest.mark.parametrize("file", ["train/tokens.bin", "eval/tokens.bin", "train/offsets.npy", "train/store.json"])
def test_a_small_store_is_refused_at_the_start(built, file):
    flip(Path(built.data.store, file))
    with pytest.raises(ValueError, match=f"{file}.* (is|was) (not|damaged|edited)"):
        prepare(built)


@pytest.mark.slow
def test_a_run_that_goes_on_names_the_description_that_is_damaged(built):
    """To who only compares fingerprints it is another store: `--allow=data.store` must not be the advice."""
    short = dataclasses.replace(built, steps=2)
    train(prepare(short))
    path = Path(built.data.store, "train", "store.json")
    text = path.read_text()
    for key in ("fingerprint", "checksum", "tokens.bin"):
        at = re.search(rf'"{re.escape(key)}"[^"]*"([0-9a-f])', text).start(1)
        path.write_text(text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :])
        with pytest.raises(ValueError, match=r"train/store\.json was edited or damaged"):
            prepare(short)


@pytest.fixture
def verdict(monkeypatch):
    """Stores are large, and their hashes known when this is set."""
    known, real = threading.Event(), CheckedArray.whole_hash
    monkeypatch.setattr(integrity, "AT_ONCE", 0)
    monkeypatch.setattr(CheckedArray, "whole_hash", lambda array: known.wait(60) and real(array))
    return known


@pytest.mark.parametrize("store", ["train", "eval"])
def test_a_large_store_ends_the_run_at_the_next_step(built, steps, verdict, store):
    flip(Path(built.data.store, store, "tokens.bin"))
    run, done = prepare(built), []

    def third(state, metrics):
        verdict.set()
        for each in run.stores:
            each.check._thread.join()
        return state, metrics

    steps.at = {n: lambda *it, n=n: (done.append(n), it)[1] for n in range(1, 61)} | {3: third}
    with pytest.raises(ValueError, match=rf"{store}/tokens\.bin is not what was written"):
        train(run)
    # Of the eval store nothing is read in between: it is asked for before the save.
    assert done == ([1, 2] if store == "train" else [1, 2, *range(4, 31)])
    assert latest_step(built.run_dir) is None


def test_no_step_is_saved_before_the_verdict(built, steps, verdict, monkeypatch, capfd):
    """The save of step 30 waits for it, and says so."""
    flip(Path(built.data.store, "train", "tokens.bin"))
    wait = integrity.ContentCheck.wait

    def until_said(self, say=None):
        wait(self, lambda text: (say(text), verdict.set()))

    monkeypatch.setattr(integrity.ContentCheck, "wait", until_said)
    saved = []
    monkeypatch.setattr(loop.Checkpoints, "save", lambda self, state, about: saved.append(int(state.step)))
    with pytest.raises(ValueError, match=r"train/tokens\.bin is not what was written"):
        train(prepare(built))
    assert not saved and latest_step(built.run_dir) is None
    assert f"waiting until the contents of {built.data.store}/train are verified" in capfd.readouterr().err


def test_a_whole_large_store_trains_as_a_small_one(built, steps, verdict):
    threading.Timer(0.5, verdict.set).start()
    assert int(train(prepare(built)).step) == latest_step(built.run_dir) == 60


def test_ids_beyond_the_models_vocabulary_are_refused(built, monkeypatch):
    """Whatever the tokenizer says of its vocabulary."""
    store = Path(built.data.store)
    monkeypatch.setattr("ringformer.train.prepare.check_vocabulary", lambda *_: None)
    small = dataclasses.replace(built, model=dataclasses.replace(built.model, vocab_size=200))
    with pytest.raises(ValueError, match=rf"{store}/train has the token id 256, beyond the model's vocabulary of 200;"):
        prepare(small)


def overwrite(path: Path):
    """In place, as a preparation into the wrong folder does: the tokens are other ones, as many as before."""
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


CHANGES = {
    "overwritten": (overwrite, "has changed since it was opened, between bytes 0 and"),
    "cut": (lambda path: os.truncate(path, 100), "has changed since it was opened: it ends after"),
    "a bit": (flip, "has changed since it was opened, between bytes"),
}


@pytest.mark.usual("overwritten-True")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_store_that_changes_under_a_run_ends_it_with_a_save(built, steps, change, background, monkeypatch):
    """Nothing of what it became is trained on: the saved parameters are those of as many steps as were made."""
    monkeypatch.setattr(integrity, "AT_ONCE", 0 if background else 2**30)
    run, (damage, message) = prepare(built), CHANGES[change]
    path = Path(built.data.store, "train", "tokens.bin")
    whole = path.read_bytes()
    steps.at = {40: lambda *done: (damage(path), done)[1]}
    with pytest.raises(ValueError, match=rf"train/tokens\.bin {message}.*No step up to (\d+) was") as caught:
        train(run)
    last = int(re.search(r"No step up to (\d+) was trained on it, step (\d+) would be the first", str(caught.value))[1])
    assert 40 <= last < 60 and latest_step(built.run_dir) == last
    assert f"resumes from step {last}, which is saved in {built.run_dir}" in str(caught.value)
    monkeypatch.setattr(integrity, "AT_ONCE", 2**30)
    with pytest.raises(ValueError, match=r"train/tokens\.bin (has 100 bytes|is not what was written)"):
        prepare(built)  # started again it does not go on
    path.write_bytes(whole)
    assert int(train(prepare(built)).step) == 60


def test_of_a_store_that_changes_before_the_verdict_nothing_is_saved(built, steps, verdict):
    path = Path(built.data.store, "train", "tokens.bin")
    run = prepare(built)
    steps.at = {5: lambda *done: (overwrite(path), verdict.set(), done)[2]}
    with pytest.raises(ValueError, match=r"tokens\.bin .*\. Steps from 1 on may be trained on it, and none of them is"):
        train(run)
    assert latest_step(built.run_dir) is None


@pytest.mark.slow
def test_held_out_data_that_change_end_a_run_with_a_save(built, monkeypatch):
    path, real = Path(built.data.store, "eval", "tokens.bin"), evaluation.evaluate
    run = prepare(dataclasses.replace(built, steps=6, eval_every=2, checkpoint_every=0))

    made: list[int] = []

    def changing(*arguments, stop, likelihood):
        made.append(1)
        if len(made) == 3:  # at steps 0, 2, 4
            overwrite(path)
        return real(*arguments, stop=stop)

    monkeypatch.setattr(evaluation, "evaluate", changing)
    with pytest.raises(ValueError, match=r"eval/tokens\.bin has changed .* No step up to 4 was trained on it"):
        train(run)
    assert latest_step(built.run_dir) == 4
