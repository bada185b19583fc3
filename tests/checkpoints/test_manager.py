"""Checkpoints between meshes that pad, to the bit; without a device program; read back before a run counts on them."""

import dataclasses
import json
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from ringformer.checkpoints import manager as checkpoints
from ringformer.checkpoints import sharded_arrays as checkpoint_arrays
from ringformer.checkpoints import zarr_files
from ringformer.checkpoints.saved_model import latest_checkpoint, restore_params
from ringformer.convert.block_streams import open_streams
from ringformer.files import manifest as file_manifest
from ringformer.inference.generator import load_model
from ringformer.train.state import abstract_state
from tests.train import states
from tests.train.states import CONFIG, MESHES, OPTIMIZER, assert_same_bits, laid_out, logical_state, setup

STATE = logical_state()
COMPILED = "/jax/core/compile/backend_compile_duration"


def opened(folder, mesh_dim="1,2,1,4", config=CONFIG):
    return states.opened(folder, mesh_dim, config)


def save(folder, mesh_dim="1,2,1,4"):
    states.save(folder, mesh_dim, STATE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save(folder)
    return folder


@pytest.mark.usual("1,2,1,4", "1,5,1,1")
@pytest.mark.parametrize("mesh_dim", MESHES)
def test_a_state_goes_from_any_mesh_to_any_other(saved, tmp_path, mesh_dim):
    assert_same_bits(opened(saved, mesh_dim).restore(7), STATE)
    save(tmp_path, mesh_dim)
    assert_same_bits(opened(tmp_path).restore(7), STATE)


def test_parameters_alone(saved):
    mesh, shardings = setup("1,5,1,1")
    assert_same_bits(restore_params(saved, shardings.params, mesh), STATE.params)


def test_checkpoints_of_orbax_own_are_restored(tmp_path):
    """As they were written until 2026-11: by StandardSave, in one database."""
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        manager.save(7, args=ocp.args.StandardSave(jax.tree.map(jnp.asarray, STATE._asdict())))
    assert (latest_checkpoint(tmp_path) / "manifest.ocdbt").exists()
    for mesh_dim in ("1,2,1,4", "1,1,1,1"):
        assert_same_bits(opened(tmp_path, mesh_dim).restore(7), STATE)
    mesh, shardings = setup("1,1,1,8")
    assert_same_bits(restore_params(tmp_path, shardings.params, mesh), STATE.params)


def test_others_read_ours(saved):
    """Orbax's own handler, and the one that opens arrays without reading them."""
    mesh, shardings = setup("1,1,1,1")
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(latest_checkpoint(saved), abstract_state(shardings, OPTIMIZER, mesh)._asdict())
    assert_same_bits(found, STATE._asdict())
    for path, store in open_streams(latest_checkpoint(saved), CONFIG).items():
        logical = STATE.params
        for key in path:
            logical = logical[key]
        np.testing.assert_array_equal(store.read().result(), logical)


def buffers() -> set[int]:
    """Where the memory of all arrays on all devices begins."""
    return {shard.data.unsafe_buffer_pointer() for x in jax.live_arrays() for shard in x.addressable_shards}


def test_no_program_runs_and_nothing_else_lies_on_a_device(tmp_path, monkeypatch):
    """A program would have to be compiled: the caches are empty. In the midst of a save the devices hold what they held
    before it; in the midst of a restore nothing but that and parts of the state."""
    mesh, shardings = setup("1,2,1,4")
    state, saving, restoring = laid_out(STATE, shardings, mesh), opened(tmp_path), opened(tmp_path)
    events, held = [], []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.append(event))
    for name in ("_write", "_read"):
        original = getattr(checkpoint_arrays, name)

        async def counted(*args, original=original):
            held.append(buffers())
            return await original(*args)

        monkeypatch.setattr(checkpoint_arrays, name, counted)
    jax.clear_caches()
    before = buffers()
    saving.save(state)
    saving.close()
    restored = restoring.restore(7)
    after = buffers()
    assert COMPILED not in events
    assert len(held) == 1 + len(jax.tree.leaves(STATE))
    assert held[0] <= before and all(midst <= before | after for midst in held)
    assert_same_bits(restored, STATE)
    jax.jit(lambda x: x + 1)(restored.step)
    assert COMPILED in events, "the test would see a program"


def test_donation_meets_no_buffer_of_a_checkpoint(tmp_path):
    """The state that is being written is donated at once; so is the one that was just read."""
    mesh, shardings = setup("1,2,1,4")
    state, saving = laid_out(STATE, shardings, mesh), opened(tmp_path)
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    saving.save(state)
    after = step(state)
    saving.close()
    restored = opened(tmp_path).restore(7)
    assert_same_bits(restored, STATE)
    again = step(restored)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(again), strict=True):
        for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_array_equal(x.data, y.data)


def test_training_waits_for_no_read(tmp_path, monkeypatch):
    """Other threads than the one that saves read back what was written."""
    threads = []
    for module in (zarr_files, file_manifest):
        real = module.read_back
        monkeypatch.setattr(
            module, "read_back", lambda path, real=real: threads.append(threading.get_ident()) or real(path)
        )
    save(tmp_path)
    assert len(threads) > len(jax.tree.leaves(STATE)) and threading.get_ident() not in threads


def test_a_checkpoint_of_another_model_is_refused(saved):
    wider = dataclasses.replace(CONFIG, intermediate_size=48)
    with pytest.raises(ValueError, match=r"w_down is \[3, 44, 36\] in the checkpoint .* this model's is \[3, 48, 36\]"):
        opened(saved, config=wider).restore(7)


def test_a_lost_chunk_is_an_error_and_not_zeros(tmp_path):
    save(tmp_path)
    (latest_checkpoint(tmp_path) / "params.embed" / "0.0").unlink()
    with pytest.raises(OSError, match=r"step 7 is damaged \(.*/params.embed/0.0 is missing\): bring it back"):
        opened(tmp_path).restore(7)


def test_a_disk_that_forgets_is_noticed_before_the_checkpoint_counts(tmp_path, monkeypatch):
    """A flipped bit does not match the CRC; a chunk that was written before has a valid one."""
    original, contents = zarr_files.read_back, {}

    def flipped(path):
        content = bytearray(original(path))
        content[-1] ^= 1
        return bytes(content)

    def stale(path):
        return contents.setdefault(path.name, original(path))

    for forgetful, message in ((flipped, "not read back: .*digest"), (stale, "does not return what was written")):
        monkeypatch.setattr(zarr_files, "read_back", forgetful)
        with pytest.raises(OSError, match=message):
            save(tmp_path)
        assert checkpoints.latest_step(tmp_path) is None


def _lose_the_step(folder):
    shutil.rmtree(folder)


def _lose_an_array(folder):
    shutil.rmtree(folder / "default" / "opt_state.0.mu.head")


def _shorten_an_array(folder):
    path = folder / "default" / "params.head" / "zarr.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shape": [36, 60]}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_lose_the_step, "latest checkpoint that can be found there is None"),
        (_lose_an_array, "cannot be read.*mu.head"),
        (_shorten_an_array, r"does not hold what was: params\.head$"),
    ],
)
def test_what_a_restore_would_not_find_raises(tmp_path, damage, message):
    mesh, shardings = setup("1,2,1,4")
    saving = opened(tmp_path)
    saving.save(laid_out(STATE, shardings, mesh))
    saving._manager.wait_until_finished()
    damage(tmp_path / "checkpoints" / "7")
    with pytest.raises(OSError, match=message):
        saving.close()


def test_brackets_in_a_path(tmp_path):
    """Orbax takes them for a pattern where it merges its databases, and what it wrote cannot be read: that is noticed.
    Ours can be read."""
    mesh, shardings = setup("1,2,1,4")
    with ocp.CheckpointManager(tmp_path / "a[1]" / "checkpoints") as manager:
        manager.save(7, args=ocp.args.StandardSave(jax.tree.map(jnp.asarray, STATE._asdict())))
    with pytest.raises(OSError, match="was saved, but cannot be read"):
        checkpoints._check(tmp_path / "a[1]", 7, abstract_state(shardings, OPTIMIZER, mesh), shardings)
    save(tmp_path / "b[1]")
    assert_same_bits(opened(tmp_path / "b[1]").restore(7), STATE)


@pytest.mark.parametrize("mesh_dim", MESHES)
def test_chunks_end_where_shards_end(mesh_dim, monkeypatch):
    """Every element is in one chunk of one shard, and a chunk of the file is written once."""
    monkeypatch.setattr(checkpoint_arrays, "CHUNK_BYTES", 300)
    mesh, shardings = setup(mesh_dim)
    state = laid_out(STATE, shardings, mesh)
    for x, logical in zip(jax.tree.leaves(state.params), jax.tree.leaves(STATE.params), strict=True):
        leaf = checkpoint_arrays._leaf(checkpoint_arrays.Saved(x, logical.shape), None)
        chunks = list(leaf.blocks)
        chunk, files = leaf.metadata["chunk_grid"]["configuration"]["chunk_shape"], set()
        found = np.zeros(logical.shape, np.int32)
        for index, host in chunks:
            found[index] += host.view(np.int32) == logical[index].view(np.int32)
            files.add(tuple(s.start // c for s, c in zip(index, chunk, strict=True)))
            assert all(s.start % c == 0 and s.stop - s.start <= c for s, c in zip(index, chunk, strict=True))
        assert (found == 1).all() and len(files) == len(chunks)


def test_a_model_is_loaded_as_it_was_saved(saved):
    (saved / "config.json").write_text(json.dumps({"model": dataclasses.asdict(CONFIG)}))
    assert_same_bits(nnx.to_pure_dict(nnx.state(load_model(saved))), STATE.params)
