"""Two processes save a checkpoint, find it damaged together, and go back together."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu_flags import cpu_environment

ROOT = Path(__file__).parent.parent.parent

PROGRAM = """
import sys
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
address, index, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
jax.distributed.initialize(address, 2, index)

import numpy as np
from jax.experimental import multihost_utils

from ringformer.files import manifest as file_manifest
from ringformer.checkpoints import array_folder, zarr_files
from ringformer.checkpoints.verify import checkpoint_faults, tree_folder
from ringformer.checkpoints.manager import Checkpoints
from ringformer.checkpoints.retention import Keep
from ringformer.train.state import abstract_state
from tests.damage import flip
from tests.train.states import OPTIMIZER, assert_same_bits, laid_out, logical_state, setup

mesh, shardings = setup("1,1,1,2")
states = {step: logical_state(step)._replace(step=np.asarray(step, np.int32)) for step in (10, 20)}
checkpoints = Checkpoints(folder, abstract_state(shardings, OPTIMIZER, mesh), shardings, Keep())
for state in states.values():
    checkpoints.save(laid_out(state, shardings, mesh))
checkpoints.close()
multihost_utils.sync_global_devices("saved")
hashes = file_manifest.read_manifest(tree_folder(folder, 20))
assert {"params.embed/0.0", "params.embed/0.1", "params.embed/zarr.json", "_METADATA"} <= hashes.keys(), hashes.keys()
assert not list(tree_folder(folder, 20).glob("manifest.*.json"))

read, real = [], file_manifest.read_verified
file_manifest.read_verified = lambda folder, name, *args, **kwargs: read.append(name) or real(
    folder, name, *args, **kwargs
)
assert checkpoint_faults(folder, 20) == []
print("read", len(read), "of", len(hashes))
read.clear()
chunks, real_chunk = [], zarr_files.read_verified
zarr_files.read_verified = lambda folder, name, *args, **kwargs: (
    array_folder.is_chunk(name) and chunks.append(name)
) or real_chunk(folder, name, *args, **kwargs)
checkpoints = Checkpoints(folder, abstract_state(shardings, OPTIMIZER, mesh), shardings, Keep())
step, state, lines = checkpoints.restore_newest()
assert (step, lines) == (20, [])
assert_same_bits(state, states[20])
assert not any(map(array_folder.is_chunk, read)), "chunks are not read before they are restored"
assert len(chunks) == len(set(chunks)), "each chunk is read once"
print("chunks", *chunks)
print("all", *filter(array_folder.is_chunk, hashes))
multihost_utils.sync_global_devices("verified")
if index == 0:
    flip(tree_folder(folder, 20) / "params.embed" / "0.0", np.random.default_rng(0))
multihost_utils.sync_global_devices("damaged")
step, state, lines = checkpoints.restore_newest()
assert step == 10 and len(lines) == 1
assert_same_bits(state, states[10])
multihost_utils.sync_global_devices("restored")
if index == 0:
    described = tree_folder(folder, 10) / "_METADATA"
    described.write_text("{" * described.stat().st_size)
multihost_utils.sync_global_devices("damaged too")
faults = checkpoint_faults(folder, 10)  # one process compares it, the other cannot parse it
assert faults and all("_METADATA" in fault for fault in faults), faults
print("said", lines[0])
"""


@pytest.mark.slow
def test_two_processes_agree_on_what_is_damaged(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, address, str(index), str(tmp_path / "run")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=cpu_environment(),
        )
        for index in range(2)
    ]
    said = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    one, two = ({line.split()[0]: line.split()[1:] for line in out.splitlines() if line.split()} for out, _ in said)
    counts = [int(words["read"][0]) for words in (one, two)]
    assert sum(counts) == int(one["read"][2]) and abs(counts[0] - counts[1]) <= 1, "each read its half"
    assert set(one["chunks"]) | set(two["chunks"]) == set(one["all"])
    assert one["said"] == two["said"] and "params.embed/0.0 is not what was written" in " ".join(one["said"])
    assert (tmp_path / "run" / "damaged" / "20" / "default" / "manifest.json").is_file()
