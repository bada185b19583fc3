"""Several processes train as one: two of them, with four simulated devices each, that find each other by an address."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from ringformer.cli import main
from ringformer.inference.generator import load_model
from tests.cpu_flags import cpu_environment
from tests.helpers import relative_error

ROOT = Path(__file__).parent.parent.parent

CONFIG = """
from ringformer.runs.config import base_config


def get_config():
    config = base_config("tiny")
    config.data.source = "text:{folder}/*.txt"
    config.data.store = "{folder}/store"
    config.data.held_out = 0.2
    config.mesh_dim = "1,2,1,4"
    config.seq_len = 64
    config.batch_size = 4
    config.eval_batches = 1
    config.optimizer.warmup_steps = 0
    config.model.hidden_size = 32
    config.model.num_layers = 1
    config.model.compute_dtype = "float32"
    config.steps = 2
    config.stages = {stages}
    return config
"""


@pytest.mark.parametrize(
    "stages", [(), pytest.param(({}, {"model.rope_theta": 4e4}), marks=pytest.mark.slow)], ids=["run", "stages"]
)
def test_two_processes_train_as_one_does(tmp_path, stages):
    """With two stages the second process must see what the first wrote."""
    rng = np.random.default_rng(0)
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text(" ".join(rng.choice(["ring", "block", "key", "query"], 60)))
    (tmp_path / "config.py").write_text(CONFIG.format(folder=tmp_path, stages=stages))
    train = ["train", f"--config={tmp_path}/config.py"]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    together = [
        f"--config.run_dir={tmp_path}/two",
        "--config.cpu_devices=4",
        "--distributed",
        f"--coordinator_address={address}",
        "--num_processes=2",
    ]
    command = [sys.executable, "-m", "ringformer.cli", *train, *together]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": cpu_environment()}
    processes = [subprocess.Popen([*command, f"--process_id={i}"], **quiet) for i in range(2)]
    assert main([*train, f"--config.run_dir={tmp_path}/one", "--config.cpu_devices=8"]) == 0
    said = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert ["finished" in out for out, _ in said] == [bool(stages), False], "process 0 alone reports"
    assert ["step 2/2" in err for _, err in said] == [True, False], "process 0 alone reports"
    for folder in ("stage-1-64", "stage-2-64") if stages else (".",):
        one, two = (numbers(tmp_path / run / folder) for run in ("one", "two"))
        assert len(one) == 6
        np.testing.assert_allclose(two, one, rtol=1e-5)
        ours, theirs = (parameters(tmp_path / run / folder) for run in ("one", "two"))
        assert max(jax.tree.leaves(jax.tree.map(relative_error, theirs, ours))) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [False, True])
def test_hosts_with_other_files_are_refused(tmp_path, resumed):
    """A path of one config, and under it another store on the second host: half of the batches would be of it."""
    rng = np.random.default_rng(0)
    for host in ("0", "1"):
        (tmp_path / host).mkdir()
        for i in range(30):
            (tmp_path / host / f"{i}.txt").write_text(" ".join(rng.choice(["ring", "block", "key", "query"], 60)))
        config = CONFIG.format(folder=tmp_path / host, stages=()).replace(f'"{tmp_path / host}/store"', '"store"')
        config = config.replace(f"{tmp_path / host}/", "").replace("warmup_steps = 0", 'schedule = "constant"')
        (tmp_path / host / "config.py").write_text(config)
        prepared = [
            sys.executable,
            "-m",
            "ringformer.cli",
            "train",
            "--config=config.py",
            "--config.cpu_devices=8",
            f"--config.run_dir={tmp_path}/{'run' if resumed and host == '0' else 'other' + host}",
        ]
        environment = cpu_environment(PYTHONPATH=str(ROOT))
        subprocess.run(prepared, cwd=tmp_path / host, env=environment, check=True, capture_output=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [
        sys.executable,
        "-m",
        "ringformer.cli",
        "train",
        "--config=config.py",
        "--config.cpu_devices=4",
        f"--config.run_dir={tmp_path}/run",
        "--config.steps=4",
        "--distributed",
        f"--coordinator_address={address}",
        "--num_processes=2",
    ]
    processes = [
        subprocess.Popen(
            [*command, f"--process_id={i}"], cwd=tmp_path / str(i), env=environment, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    said = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], said
    assert all("data.store" in text and len(text.strip().splitlines()) == 1 for text in said), said
    assert (tmp_path / "run" / "metrics.jsonl").exists() == resumed


def parameters(run_dir):
    """Of the run's checkpoint, to which every process wrote its shards."""
    return nnx.to_pure_dict(nnx.state(load_model(run_dir)))


def numbers(run_dir) -> list[float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows for key in ("loss", "grad_norm", "eval_loss") if key in row]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--process_id=0"], "need --distributed"),
        (["--distributed", "--num_processes=2"], "pass all of --coordinator_address"),
        (["--stage=1"], "the config has no stages"),
    ],
)
def test_processes_that_cannot_find_each_other(arguments, message, capsys):
    assert main(["train", "--config=configs/quickstart.py", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_processes_compare_config_stage_and_version(monkeypatch, capsys, tmp_path):
    def asked(self, member, *_):
        raise ValueError(json.dumps(dict(member.asked)))

    monkeypatch.setattr("ringformer.processes.supervisor.Supervisor.join", asked)
    arguments = [
        "--distributed",
        "--coordinator_address=localhost:1",
        "--num_processes=2",
        "--process_id=1",
        f"--config.run_dir={tmp_path}",
        "--config.seed=7",
        "--allow=seed",
    ]
    assert main(["train", "--config=configs/quickstart.py", *arguments]) == 2
    said = capsys.readouterr().err
    compared = json.loads(said[said.index("{") :].replace("\n", ""))
    assert compared["seed"] == 7 and compared["jax"] == jax.__version__ and len(compared["ringformer's code"]) == 32
    assert (compared["--stage"], compared["--allow"]) == (None, "seed")


def test_a_machine_that_is_no_pod_says_so():
    """In a process of its own: JAX must not have begun."""
    command = [sys.executable, "-m", "ringformer.cli", "train", "--config=configs/quickstart.py", "--distributed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "detects no TPU pod and no SLURM job here" in done.stderr
