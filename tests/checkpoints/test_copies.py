"""Copies of checkpoints in an object store: what comes back is what was saved, to the bit, or there is an error.

The store is Google's by an emulator on loopback, which tensorstore's own client asks."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ringformer.checkpoints import copies as checkpoint_copies
from ringformer.checkpoints.array_folder import WRITTEN_LAST
from ringformer.checkpoints.copies import Copies, copied_steps, receive, send, send_step
from ringformer.checkpoints.retention import Keep
from ringformer.checkpoints.verify import checkpoint_faults, saved_steps
from ringformer.cli import main
from ringformer.files import bucket as object_store
from ringformer.files.bucket import ObjectStore
from ringformer.runs.config import Config, DataConfig, OptimizerConfig, base_config
from ringformer.runs.config_file import parse_stages
from ringformer.runs.folder import nothing_left
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from tests.gcs_emulator import emulated
from tests.train.runs import MODEL, read_metrics, saved_arrays
from tests.train.states import assert_same_bits, laid_out, logical_state, opened, setup

URL = "gs://bucket/runs/mine"
STATES = {step: logical_state(seed=step)._replace(step=np.asarray(step, np.int32)) for step in (10, 20, 30)}


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setattr(object_store, "RETRIES", {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"})
    with emulated() as (emulator, address):
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
        yield emulator


def save(folder, *steps, keep=Keep()):
    """Save states of these steps, with copies; the folder has the files that tell of a run."""
    mesh, shardings = setup("1,1,1,1")
    folder.mkdir(exist_ok=True)
    (folder / "identity.json").write_text(json.dumps({"hash": "of the run", "identity": {}, "saved": None}))
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in steps))
    saving = opened(folder, keep=keep, copies=Copies(folder, URL))
    for step in steps:
        saving.save(laid_out(STATES[step], shardings, mesh))
    saving.close()


def save_alone(folder, *steps):
    """Save states of these steps, without copies."""
    mesh, shardings = setup("1,1,1,1")
    saving = opened(folder)
    for step in steps:
        saving.save(laid_out(STATES[step], shardings, mesh))
    saving.close()
    (folder / "identity.json").write_text(json.dumps({"hash": "of the run", "identity": {}, "saved": None}))


def said(lines):
    return [line for line, _ in lines]


def test_what_was_saved_comes_back_to_the_bit(bucket, tmp_path):
    save(tmp_path / "run", 10, 20)
    assert copied_steps(ObjectStore(URL)) == [10, 20]
    assert said(receive(ObjectStore(URL), tmp_path / "back")) == [
        f"step {step} was copied to {tmp_path / 'back'}" for step in (10, 20)
    ]
    checkpoints = opened(tmp_path / "back")
    assert checkpoints.restore_newest()[::2] == (20, [])
    for step in (10, 20):
        assert_same_bits(checkpoints.restore(step), STATES[step])
        assert saved_arrays(tmp_path / "back", step) == saved_arrays(tmp_path / "run", step)
    for name in ("identity.json", "metrics.jsonl"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    assert not list((tmp_path / "back").glob("*.part"))


def test_the_manifest_comes_last_and_goes_first(bucket, tmp_path):
    """Whoever looks in between finds a checkpoint whole, or none: when it is sent, sent again, and removed."""
    save(tmp_path / "run", 10, 20, 30, keep=Keep(2))
    order = [(method, name) for method, name in bucket.requests if "checkpoints/10/" in name and method != "GET"]
    written = [name for method, name in order if method == "POST"]
    deleted = [name for method, name in order if method == "DELETE"]
    last = "runs/mine/checkpoints/10/default/manifest.json"
    assert written[-1] == deleted[0] == last and sorted(written) == sorted(deleted) and order[-1][0] == "DELETE"
    assert copied_steps(ObjectStore(URL)) == saved_steps(tmp_path / "run") == [20, 30]
    assert not [name for name in bucket.objects if "/10/" in name]


def test_the_newest_proven_copy_stays_though_it_is_gone_here(bucket, tmp_path):
    run, keep = tmp_path / "run", Keep(1, sound=15)
    save(run, 10, 20, keep=keep)
    assert copied_steps(ObjectStore(URL)) == saved_steps(run) == [10, 20]
    copies = Copies(run, URL)
    assert not copies.refusal()
    shutil.rmtree(run / "checkpoints" / "10")
    mesh, shardings = setup("1,1,1,1")
    saving = opened(run, keep=keep, copies=copies)
    saving.save(laid_out(STATES[30], shardings, mesh))
    saving.close()
    assert (copied_steps(ObjectStore(URL)), saved_steps(run)) == ([10, 30], [30])


def test_the_whole_copy_of_what_is_damaged_here_stays(bucket, tmp_path):
    """The run goes on from an older one, and what it saves on its way removes no later one."""
    run = tmp_path / "run"
    save(run, 10, 30)
    copies = Copies(run, URL)
    assert not copies.refusal()
    (run / "checkpoints" / "30").rename(tmp_path / "set aside")  # as restore_newest does, when the run has begun
    mesh, shardings = setup("1,1,1,1")
    saving = opened(run, keep=Keep(), copies=copies)
    saving.save(laid_out(STATES[20], shardings, mesh))
    saving.close()
    assert copied_steps(ObjectStore(URL)) == [10, 20, 30]


@pytest.mark.slow
def test_no_damage_of_a_copy_is_brought_back_in_silence(bucket, tmp_path):
    """Each kind of object of a copy cut, emptied, gone, zeroed, and with a bit turned."""
    save(tmp_path / "run", 10, 20)
    rng, harmless = np.random.default_rng(0), []
    place = "runs/mine/checkpoints/20/"
    inside = ("params.embed/0.0", "params.embed/zarr.json", "_METADATA", "manifest.json", *WRITTEN_LAST[:1])
    kinds = [*(f"{place}default/{name}" for name in inside), f"{place}{WRITTEN_LAST[1]}"]
    assert set(kinds) <= bucket.objects.keys()
    shutil.copytree(tmp_path / "run", tmp_path / "first")
    shutil.rmtree(tmp_path / "first" / "checkpoints" / "20")
    for name in kinds:
        whole = bucket.objects[name]
        bit = int(rng.integers(8 * len(whole))) if whole else 0
        flipped = bytearray(whole)
        if whole:
            flipped[bit // 8] ^= 1 << bit % 8
        for content in (whole[:-1], b"", None, bytes(len(whole)), bytes(flipped)):
            if content == whole:
                continue
            if content is None:
                del bucket.objects[name]
            else:
                bucket.objects[name] = content
            shutil.rmtree(tmp_path / "back", ignore_errors=True)
            shutil.copytree(tmp_path / "first", tmp_path / "back")
            lines = list(receive(ObjectStore(URL), tmp_path / "back"))
            if saved_steps(tmp_path / "back") == [10, 20]:
                assert checkpoint_faults(tmp_path / "back", 20) == []
                assert_same_bits(opened(tmp_path / "back").restore(20), STATES[20])
                harmless.append(Path(name).name)
            elif content is None and name.endswith("manifest.json"):
                assert copied_steps(ObjectStore(URL)) == [10]  # it does not count
            else:
                assert saved_steps(tmp_path / "back") == [10] and lines[-1][1], name
                assert "the copy of step 20 in gs://bucket/runs/mine is damaged (" in lines[-1][0]
            bucket.objects[name] = whole
    assert set(harmless) <= {*WRITTEN_LAST, "manifest.json"}  # of the manifest the end of its line


def test_a_checkpoint_that_is_damaged_here_is_not_copied(bucket, tmp_path):
    save(tmp_path / "run", 10)
    bucket.objects.clear()
    (file,) = (tmp_path / "run" / "checkpoints" / "10" / "default" / "params.embed").glob("0.*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    ((line, fault),) = send(tmp_path / "run", ObjectStore(URL))
    assert fault and line == f"step 10 is damaged, and not copied: {file} is not what was written: its hash differs"
    assert copied_steps(ObjectStore(URL)) == []
    file.unlink()
    assert "params.embed/" in said(send(tmp_path / "run", ObjectStore(URL)))[0]


def test_a_store_that_fails_ends_the_run_with_its_cause(bucket, tmp_path):
    """The checkpoint itself is whole; what ends the run says how to copy it."""
    bucket.refuse = lambda method, name: 403 if method == "POST" and "/checkpoints/" in name else None
    with pytest.raises(
        OSError,
        match=r"^the checkpoint of step 10 is saved in \S+/run, but not copied \(gs://bucket/"
        r"\S+ cannot be written: .*403.*\); `ringformer checkpoint copy \S+/run "
        r"gs://bucket/runs/mine` copies it$",
    ):
        save(tmp_path / "run", 10)
    assert checkpoint_faults(tmp_path / "run", 10) == []
    bucket.refuse = lambda method, name: None
    assert main(["checkpoint", "copy", str(tmp_path / "run"), URL]) == 0
    assert copied_steps(ObjectStore(URL)) == [10]


def test_an_interrupted_copy_is_none_and_is_made_again(bucket, tmp_path):
    save(tmp_path / "run", 10)
    kept = dict(bucket.objects)
    del bucket.objects["runs/mine/checkpoints/10/default/manifest.json"]
    bucket.objects["runs/mine/checkpoints/10/default/of another save"] = b"x"
    bucket._generations["runs/mine/checkpoints/10/default/of another save"] = 1
    copies = Copies(tmp_path / "run", URL)
    assert not copies.refusal()
    copies.begin(10, Keep())
    copies.close()
    assert bucket.objects == kept


def test_what_takes_the_place_of_a_copy_is_written_beside_it(bucket, tmp_path):
    """Step 20 is made again, to other bits: whoever looks while it is sent finds the old copy or the new one, whole."""
    run = tmp_path / "run"
    save(run, 10, 20)
    shutil.rmtree(run / "checkpoints" / "20")
    mesh, shardings = setup("1,1,1,1")
    again = logical_state(seed=77)._replace(step=np.asarray(20, np.int32))
    saving = opened(run)
    saving.save(laid_out(again, shardings, mesh))
    saving.close()
    whole = []

    def look(method, name):
        kept = {name for name in bucket.objects if "/20" in name and name.endswith("default/manifest.json")}
        whole.append(len(kept))

    bucket.refuse = look
    for replaced in (STATES[20], again):
        whole.clear()
        send_step(run, 20, ObjectStore(URL))
        assert min(whole) >= 1 and copied_steps(ObjectStore(URL)) == [10, 20], replaced
    bucket.refuse = lambda method, name: None
    assert len({name.split("/")[3] for name in bucket.objects if "/20" in name}) == 1, "the old one is gone"
    said(receive(ObjectStore(URL), tmp_path / "back"))
    assert_same_bits(opened(tmp_path / "back").restore(20), again)


@pytest.mark.usual("10000")
@pytest.mark.parametrize("sent", [1, 30, 10_000])
def test_a_copy_that_is_not_yet_replaced_is_sent_again(sent, bucket, tmp_path):
    """The process is killed after so many files; the run is no other one for it, and comes back either way."""
    run = tmp_path / "run"
    save(run, 10, 20)
    shutil.rmtree(run / "checkpoints" / "20")
    mesh, shardings = setup("1,1,1,1")
    saving = opened(run)
    saving.save(laid_out(logical_state(seed=77)._replace(step=np.asarray(20, np.int32)), shardings, mesh))
    saving.close()
    done = []

    def killed(method, name):
        done.extend([name] if method == "POST" and "checkpoints" in name else [])
        return 403 if len(done) > sent or (method == "DELETE" and done) else None

    bucket.refuse = killed
    with pytest.raises(OSError, match="403"):
        send_step(run, 20, ObjectStore(URL))
    bucket.refuse = lambda method, name: None
    assert copied_steps(ObjectStore(URL)) == [10, 20]
    assert not any(fault for _, fault in receive(ObjectStore(URL), tmp_path / "back"))
    assert checkpoint_faults(tmp_path / "back", 20) == []
    copies = Copies(run, URL)
    assert not copies.refusal()
    copies.begin(20, Keep())
    copies.close()
    shutil.rmtree(tmp_path / "back")
    said(receive(ObjectStore(URL), tmp_path / "back"))
    assert saved_arrays(tmp_path / "back", 20) == saved_arrays(run, 20)
    assert len({name.split("/")[3] for name in bucket.objects if "/20" in name}) == 1


OVERLAPS = {
    "itself": "file://{run}",
    "a slash": "file://{run}/",
    "a link to it": "file://{link}",
    "above it": "file://{above}",
    "above a link": "file://{above}/links",
    "in it": "file://{run}/copies",
    "its checkpoints": "file://{run}/checkpoints",
    "where its checkpoints are": "file://{run}-disk",
    "a link in the copies": "file://{above}/linked",
}


@pytest.mark.parametrize("url", OVERLAPS.values(), ids=OVERLAPS)
def test_copies_are_apart_from_what_they_are_of(url, tmp_path, monkeypatch):
    """By whatever name: nothing of the run is lost, and nothing is written into it."""
    run, link = tmp_path / "runs" / "checkpoints" / "10", tmp_path / "link"
    run.parent.mkdir(parents=True)
    save_alone(run, 10, 20)
    link.symlink_to(run)
    (tmp_path / "runs" / "links").symlink_to(tmp_path / "runs")
    (tmp_path / "runs" / "linked").mkdir()
    (tmp_path / "runs" / "linked" / "checkpoints").symlink_to(run / "checkpoints")
    if "disk" in url:
        (run.parent / "10-disk").mkdir()
        (run / "checkpoints").rename(run.parent / "10-disk" / "checkpoints")
        (run / "checkpoints").symlink_to(run.parent / "10-disk" / "checkpoints")
    url = url.format(run=run, link=link, above=tmp_path / "runs")

    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and "lock" not in path.parts}

    before = files()
    assert "are one place, or one is in the other" in Copies(run, url).refusal()
    for words in ([str(run), url], [url, str(run)]):
        assert main(["checkpoint", "copy", *words]) in (1, 2)
    assert files() == before
    assert saved_steps(run) == [10, 20]


def test_a_folder_beside_the_run_is_apart_from_it(tmp_path):
    """Its name may begin like the run's; what was tried leaves nothing."""
    save_alone(tmp_path / "run", 10)
    assert not Copies(tmp_path / "run", f"file://{tmp_path}/run2").refusal()
    assert main(["checkpoint", "copy", str(tmp_path / "run"), f"file://{tmp_path}/run2"]) == 0
    assert saved_arrays(tmp_path / "run2", 10) == saved_arrays(tmp_path / "run", 10)
    assert not list(tmp_path.rglob("probe-*"))


def test_copies_that_may_not_be_listed_are_not_none(bucket, tmp_path):
    """Else a run would begin anew over them."""
    save(tmp_path / "run", 10)
    bucket.refuse = lambda method, name: None if name else 403
    with pytest.raises(OSError, match="cannot be listed: it takes the permission"):
        Copies(tmp_path / "empty", URL).refusal()


@pytest.mark.usual(
    "here3-there3-",
    "here0-there0-has checkpoints up to step 10, .* has none: bring them back by `ringformer checkpoint copy",
)
@pytest.mark.parametrize(
    ("here", "there", "refused"),
    [
        ([], [10], "has checkpoints up to step 10, .* has none: bring them back by `ringformer checkpoint copy"),
        ([10], [10, 20], "has checkpoints up to step 20, .* has up to step 10: bring them back"),
        ([10, 20], [10], ""),
        ([10, 20], [], ""),
        ([], [], ""),
    ],
)
def test_a_run_whose_copies_are_ahead_does_not_begin(here, there, refused, bucket, tmp_path):
    """It would train again what was trained, and remove what it knows nothing of."""
    save(tmp_path / "run", 10, 20)
    for step in {10, 20} - set(here):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    for name in list(bucket.objects):
        if any(f"/checkpoints/{step}/" in name for step in {10, 20} - set(there)) or not there:
            del bucket.objects[name]
    found = Copies(tmp_path / "run", URL).refusal()
    assert bool(found) == bool(refused)
    assert not refused or (pytest.raises(ValueError, match=refused, check=None) and refused.split(",")[0] in found)


def test_another_run_s_copies_are_left_alone(bucket, tmp_path):
    save(tmp_path / "run", 10)
    before = dict(bucket.objects)
    mesh, shardings = setup("1,1,1,1")
    other = opened(tmp_path / "other")
    other.save(laid_out(logical_state(seed=5)._replace(step=np.asarray(10, np.int32)), shardings, mesh))
    other.close()
    (tmp_path / "other" / "identity.json").write_text(json.dumps({"hash": "of another"}))
    assert "has the checkpoints of another run than" in Copies(tmp_path / "other", URL).refusal()
    with pytest.raises(ValueError, match="of another run"):
        list(send(tmp_path / "other", ObjectStore(URL)))
    with pytest.raises(ValueError, match=r"other is another run than gs://bucket/runs/mine has checkpoints of"):
        list(receive(ObjectStore(URL), tmp_path / "other"))
    (tmp_path / "other" / "checkpoints" / "10").rename(tmp_path / "other" / "checkpoints" / "11")  # no step in common
    assert "has the checkpoints of another run than" in Copies(tmp_path / "other", URL).refusal()
    assert bucket.objects == before


def test_nothing_is_brought_back_over_what_is_later(bucket, tmp_path):
    save(tmp_path / "run", 10)
    shutil.copytree(tmp_path / "run", tmp_path / "later")
    shutil.copytree(tmp_path / "later/checkpoints/10", tmp_path / "later/checkpoints/20")
    with pytest.raises(ValueError, match="later has checkpoints up to step 20, gs://bucket/runs/mine up to step 10"):
        list(receive(ObjectStore(URL), tmp_path / "later"))


def test_names_that_lead_out_of_the_folder_are_refused(bucket, tmp_path):
    save(tmp_path / "run", 10)
    bucket.objects["runs/mine/checkpoints/10/../../../../evil"] = b"x"
    bucket._generations["runs/mine/checkpoints/10/../../../../evil"] = 1
    ((line, fault),) = receive(ObjectStore(URL), tmp_path / "a" / "b")
    assert fault and "is no file of a checkpoint" in line and not list(tmp_path.rglob("evil"))


def test_a_run_in_stages_is_copied_stage_by_stage(bucket, tmp_path, capsys):
    """To where the stages' own `copy_to` sends them, and back."""
    save(tmp_path / "run", 10)
    names = "stage-2-128", "stage-10-256"
    for name in names:
        shutil.copytree(tmp_path / "run", tmp_path / "stages" / name)
    bucket.objects.clear()
    values = base_config("tiny")
    values.data.store, values.run_dir, values.copy_to = "runs/data", str(tmp_path / "stages"), f"{URL}/"
    values.stages = ({"seq_len": 64}, {"seq_len": 128})
    stages = parse_stages(values, inherit=False)
    assert [stage.copy_to for stage in stages] == [f"{URL}/stage-1-64", f"{URL}/stage-2-128"]
    assert main(["checkpoint", "copy", str(tmp_path / "stages"), URL]) == 0
    assert {name.split("/")[2] for name in bucket.objects} == set(names)
    assert main(["checkpoint", "copy", URL, str(tmp_path / "back")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"step 10 was copied to {to}/{name}" for to in (URL, tmp_path / "back") for name in names
    ]
    for name in names:
        assert saved_arrays(tmp_path / "back" / name, 10) == saved_arrays(tmp_path / "run", 10)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["runs/a", "runs/b"], "one of FROM and TO must be a folder, the other a URL such as gs://BUCKET/PATH"),
        (["gs://bucket/a", "gs://bucket/b"], "one of FROM and TO must be a folder"),
        (["runs/none", "gs://bucket/a"], "runs/none has no checkpoints"),
        (["gs://bucket/a", "x"], "has no checkpoints"),
        (["s3://bucket/a", "x"], "names no object store that is known"),
    ],
)
def test_mistakes_of_the_verb(words, said, bucket, capsys):
    assert main(["checkpoint", "copy", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.fixture
def config(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "texts").mkdir()
    for i in range(40):
        (tmp_path / "texts" / f"{i}.txt").write_text(" ".join(rng.choice(["ring", "key"], rng.integers(20, 200))))
    data = DataConfig(store=str(tmp_path / "store"), source=f"text:{tmp_path}/texts/*.txt", held_out=0.0)
    return Config(
        model=MODEL,
        data=data,
        optimizer=OptimizerConfig(warmup_steps=1, learning_rate=1e-2),
        mesh_dim="2,4,1,1",
        run_dir=str(tmp_path / "run"),
        seq_len=64,
        batch_size=8,
        steps=6,
        checkpoint_every=2,
        copy_to=URL,
    )


@pytest.mark.slow
def test_a_run_whose_machine_is_gone_goes_on_elsewhere_to_the_same_bits(bucket, config, tmp_path, capsys):
    train(prepare(dataclasses.replace(config, run_dir=str(tmp_path / "whole"), copy_to="")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_copies.Copies, "close", lambda self: self.wait())  # the end of it is not reported
        train(prepare(dataclasses.replace(config, steps=6)))
    for name in list(bucket.objects):  # as if it had died after step 4
        if "/checkpoints/6/" in name:
            del bucket.objects[name]
    shutil.rmtree(config.run_dir)
    with pytest.raises(ValueError, match=r"has checkpoints up to step 4, .* has none: bring them back by"):
        train(prepare(config))
    shutil.rmtree(config.run_dir, ignore_errors=True)
    assert main(["checkpoint", "copy", URL, config.run_dir]) == 0
    assert main(["checkpoint", "verify", config.run_dir]) == 0
    assert saved_steps(config.run_dir) == [4]
    train(prepare(config))
    assert saved_arrays(Path(config.run_dir), 6) == saved_arrays(tmp_path / "whole", 6)
    losses = [
        [row["loss"] for row in read_metrics(run) if "loss" in row] for run in (config.run_dir, tmp_path / "whole")
    ]
    assert losses[0] == losses[1] and copied_steps(ObjectStore(URL)) == [4, 6]
    assert nothing_left(config)
    del bucket.objects["runs/mine/checkpoints/6/default/manifest.json"]  # it ended while this was sent
    assert not nothing_left(config)
    train(prepare(config))
    assert nothing_left(config) and saved_arrays(Path(config.run_dir), 6) == saved_arrays(tmp_path / "whole", 6)
    bucket.refuse = lambda method, name: 503
    with pytest.raises(OSError, match="gs://bucket/runs/mine cannot be listed"):
        nothing_left(config)


def test_keys_that_cannot_be(config):
    with pytest.raises(ValueError, match="'s3://b/x' names no object store that is known"):
        dataclasses.replace(config, copy_to="s3://b/x")
    with pytest.raises(ValueError, match="keep_checkpoints=1 with copy_to must be at least 2"):
        dataclasses.replace(config, keep_checkpoints=1)
