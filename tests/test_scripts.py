"""The launch scripts: shellcheck has nothing to say, and a dry run shows what each host would execute."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(ROOT.glob("scripts/*.sh"))
PATHS = ["--init_from=/share/llama 13b", "--store=/share/data", "--tokenizer=/share/t.model", "--run_dir=/share/run"]
A100, V5E = (f"--config=configs/llama_13b_512k_{name}.py" for name in ("32xa100", "v5e_256"))
POD = ["tpu_pod.sh", "--name=pod", "--zone=us-west4-a", V5E, *PATHS]


def launch(script, *arguments):
    return subprocess.run(["bash", f"scripts/{script}", *arguments], cwd=ROOT, capture_output=True, text=True)


def dry_run(script, *arguments):
    """The lines of a script that only says what it would do: {where: [command as words]}."""
    done = launch(script, "--dry-run", *arguments)
    assert done.returncode == 0, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        where, _, command = line[1:].partition("] ")
        found.setdefault(where, []).append(shlex.split(command))
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(path):
    subprocess.run(["bash", "-n", path], check=True)
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, "-x", path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_one_command_on_a_slurm_cluster():
    """Estimated once, then the same command on every node, with the paths that were given."""
    found = dry_run("slurm.sh", "--target=32xA100-80", A100, *PATHS, "--config.steps=3")
    assert [c[:2] for c in found.pop("this host")] == [["ringformer", "estimate"]]
    assert list(found) == [f"node {n}, tasks {8 * n} to {8 * n + 7}" for n in range(4)]
    (command,) = found["node 3, tasks 24 to 31"]
    assert command[:5] == ["env", "XLA_PYTHON_CLIENT_MEM_FRACTION=0.92", "ringformer", "train", "--distributed"]
    assert {A100, "--config.init_from=/share/llama 13b", "--config.run_dir=/share/run", "--config.steps=3"} < {*command}
    assert all(commands == [command] for commands in found.values())


def test_one_command_on_a_host_with_gpus():
    estimate, train = dry_run("gpu_node.sh", "--target=8xH200", A100, *PATHS)["this host"]
    assert estimate[:2] == ["ringformer", "estimate"] and {"--target=8xH200", "--require_fit"} < {*estimate}
    assert train[2:4] == ["ringformer", "train"] and "--distributed" not in train
    (train,) = dry_run("gpu_node.sh", A100, *PATHS, "--skip-estimate")["this host"]
    assert train[2:4] == ["ringformer", "train"]


@pytest.mark.parametrize(("accelerator", "target"), [("v5litepod-256", "v5e-256"), ("v4-512", "v4-512")])
def test_one_command_on_a_pod(accelerator, target):
    found = dry_run(*POD, f"--accelerator={accelerator}", "--nfs=10.0.0.2:/share")
    estimate, create, *_ = found["this host"]
    assert f"--target={target}" in estimate
    assert create[:5] == ["gcloud", "compute", "tpus", "queued-resources", "create"]
    assert f"--accelerator-type={accelerator}" in create
    mount, install, train = found["every host of pod"]
    assert "10.0.0.2:/share" in mount and "./ringformer[tpu]" in install
    assert train[train.index("train") + 1] == "--distributed" and "--config.init_from=/share/llama 13b" in train
    sent = [c for c in found["this host"] if "ssh" in c]
    assert len(sent) == 3 and all("--worker=all" in c and "--zone=us-west4-a" in c for c in sent)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["slurm.sh", "--target=12xA100-80", A100, *PATHS], "12 GPUs, 2 nodes of eight have 16"),
        (["slurm.sh", "--target=32xA100-80", *PATHS], "which config?"),
        (["gpu_node.sh", A100], "where to? --run_dir=DIR"),
        (["gpu_node.sh", A100, *PATHS], "which GPUs? --target=8xH200"),
        (["gpu_node.sh", A100, *PATHS, "--skip-estimat"], "unknown option --skip-estimat"),
        ([*POD, "--accelerator=v2-8"], "neither v4-N nor v5litepod-N"),
    ],
)
def test_mistakes_are_told(command, message):
    done = launch(*command, "--dry-run")
    assert done.returncode == 2 and message in done.stderr


def test_an_estimate_that_fails_stops_the_training(tmp_path):
    """With a `ringformer` that refuses and says so."""
    (tmp_path / "ringformer").write_text('#!/bin/sh\necho "$1" >> "$0.log"\nexit 3\n')
    (tmp_path / "ringformer").chmod(0o755)
    command = ["bash", "scripts/gpu_node.sh", "--target=8xH200", A100, *PATHS]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode == 2 and "not every stage fits 8xH200" in done.stderr
    assert (tmp_path / "ringformer.log").read_text() == "estimate\n"
