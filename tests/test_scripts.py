"""The launch scripts: shellcheck has nothing to say, and a dry run shows what each host would execute."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringformer.hardware import CLOUD_TPUS, SLICES, GiB
from ringformer.runtime_environment import GPU_FRACTION, HOST_POOL, MEMORY_FRACTION, runtime_environment

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(ROOT.glob("scripts/*.sh"))
PATHS = ["--init_from=/share/llama 13b", "--store=/share/data", "--tokenizer=/share/t.model", "--run_dir=/share/run"]
A100, V5E = (f"--config=configs/llama_13b_512k_{name}.py" for name in ("32xa100", "v5e_256"))
POD = ["tpu_pod.sh", "--name=pod", "--zone=us-west4-a", V5E, *PATHS]
LOCK = "requirements/train.txt"
RINGFORMER = [str(ROOT / ".venv/bin/python"), "-m", "ringformer.cli"]


def launch(script, *arguments, cwd=ROOT, **env):
    env = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere"} | env
    return subprocess.run(["bash", f"scripts/{script}", *arguments], cwd=cwd, env=env, capture_output=True, text=True)


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
    assert [c[:4] for c in found.pop("this host")] == [[*RINGFORMER, "estimate"]]
    assert list(found) == [f"node {n}, tasks {8 * n} to {8 * n + 7}" for n in range(4)]
    (command,) = found["node 3, tasks 24 to 31"]
    assert command[:7] == ["env", f"{MEMORY_FRACTION}={GPU_FRACTION}", *RINGFORMER, "train", "--distributed"]
    assert {A100, "--config.init_from=/share/llama 13b", "--config.run_dir=/share/run", "--config.steps=3"} < {*command}
    assert all(commands == [command] for commands in found.values())


def test_one_command_on_a_host_with_gpus():
    estimate, train = dry_run("gpu_node.sh", "--target=8xH200", A100, *PATHS)["this host"]
    assert estimate[:4] == [*RINGFORMER, "estimate"] and {"--target=8xH200", "--require_fit"} < {*estimate}
    assert train[2:6] == [*RINGFORMER, "train"] and "--distributed" not in train
    (train,) = dry_run("gpu_node.sh", A100, *PATHS, "--skip-estimate")["this host"]
    assert train[2:6] == [*RINGFORMER, "train"]


@pytest.mark.parametrize(
    "command",
    [["slurm.sh", "--target=32xA100-80", A100], ["gpu_node.sh", "--target=8xH200", A100],
     [*POD, "--accelerator=v5litepod-256"]],
    ids=lambda command: command[0],
)  # fmt: skip
def test_a_stage_is_passed_to_training_and_estimate(command):
    found = dry_run(*command, *PATHS, "--stage=2")
    verbs = [c for commands in found.values() for c in commands if "ringformer.cli" in c]
    assert {"estimate", "train"} <= {word for c in verbs for word in c}
    assert all(c.count("--stage=2") == 1 for c in verbs)


@pytest.mark.parametrize("generation", CLOUD_TPUS)
def test_one_command_on_a_pod(generation):
    """Each generation under Google's name of its slices, with the image of its hosts, estimated for the same slice."""
    cloud, size = CLOUD_TPUS[generation], max(SLICES[generation])
    accelerator, target = f"{cloud.accelerator_type}-{size}", f"{generation}-{size}"
    found = dry_run(*POD, f"--accelerator={accelerator}", "--nfs=10.0.0.2:/share")
    estimate, create, *_ = found["this host"]
    assert f"--target={target}" in estimate
    assert create[:5] == ["gcloud", "compute", "tpus", "queued-resources", "create"]
    assert f"--accelerator-type={accelerator}" in create and f"--runtime-version={cloud.runtime_version}" in create
    mount, install, train = found["every host of pod"]
    assert "10.0.0.2:/share" in mount and "./ringformer[train,tpu]" in install
    hashed = install.index("--require-hashes")
    assert install[hashed + 1 : hashed + 3] == ["-r", f"ringformer/{LOCK}"]
    assert (ROOT / LOCK).is_file() and install.count("ringformer/.venv/bin/python") == 3
    assert train[:7] == ["cd", "ringformer", "&&", ".venv/bin/python", "-m", "ringformer.cli", "train"]
    assert train[train.index("train") + 1] == "--distributed" and "--config.init_from=/share/llama 13b" in train
    sent = [c for c in found["this host"] if "ssh" in c]
    assert len(sent) == 3 and all("--worker=all" in c and "--zone=us-west4-a" in c for c in sent)


def test_a_share_s_name_is_one_word_for_root(tmp_path):
    """Executed, as a host would, by a shell whose `sudo` says what it is given."""
    share = "10.0.0.2:/two words;touch $(echo injected) `id` 'x' & | > y"
    found = dry_run(*POD, "--accelerator=v5litepod-256", f"--nfs={share}")
    (sent,) = [c for c in found["this host"] if "ssh" in c and "nfs-common" in c[-1]]
    for name, text in {"sudo": 'printf "%s\\n" "$#" "$@" >> log', "mountpoint": "exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    command = sent[-1].removeprefix("--command=")
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
    assert (tmp_path / "log").read_text().splitlines()[-6:] == ["5", "mount", "-t", "nfs", share, "/mnt/share"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "mountpoint", "sudo"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["slurm.sh", "--target=12xA100-80", A100, *PATHS], "whole nodes of eight GPUs, e.g. 8x, 16x or 32x"),
        (["slurm.sh", "--target=4xA100-80", A100, *PATHS], "for less than a node there is scripts/gpu_node.sh"),
        (["slurm.sh", "--target=0xA100-80", A100, *PATHS], "which GPUs? --target=32xA100-80"),
        (["slurm.sh", "--target=08xA100-80", A100, *PATHS], "which GPUs? --target=32xA100-80"),
        (["slurm.sh", "--target=xA100-80", A100, *PATHS], "which GPUs? --target=32xA100-80"),
        (["slurm.sh", "--target=32xA100-80", A100, *PATHS, "--nodes=0"], "unknown option --nodes=0"),
        (["slurm.sh", "--target=32xA100-80", A100, *PATHS, "--stage=0"], "--stage=0: a stage is a number, 1 is the"),
        (["gpu_node.sh", "--target=8xH200", A100, *PATHS, "--stage=two"], "--stage=two: a stage is a number"),
        (["gpu_node.sh", "--target=8xH200", A100, *PATHS, "--stage"], "unknown option --stage"),
        ([*POD, "--accelerator=v5litepod-0"], "none of v4-N, v5litepod-N, v5p-N"),
        ([*POD, "--accelerator=v4-512; reboot"], "none of v4-N, v5litepod-N, v5p-N"),
        ([*POD, "--accelerator=v4-512", "--nfs=-o:/share"], "--nfs=-o:/share is no IP:/SHARE"),
        ([*POD, "--accelerator=v4-512", "--nfs=/share"], "--nfs=/share is no IP:/SHARE"),
        (["slurm.sh", "--target=32xA100-80", *PATHS], "which config?"),
        (["gpu_node.sh", A100], "where to? --run_dir=DIR"),
        (["gpu_node.sh", A100, *PATHS], "which GPUs? --target=8xH200"),
        (["gpu_node.sh", A100, *PATHS, "--skip-estimat"], "unknown option --skip-estimat"),
        ([*POD, "--accelerator=v2-8"], "none of v4-N, v5litepod-N, v5p-N"),
    ],
)
def test_mistakes_are_told(command, message):
    done = launch(*command, "--dry-run")
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.parametrize(
    ("nodes", "message"),
    [("3", "32 GPUs, 3 nodes of eight have 24: sbatch --nodes=4"), ("0", "0 nodes of eight have 0: sbatch --nodes=4")],
)
def test_a_job_of_another_size_is_told_the_right_one(nodes, message):
    done = launch("slurm.sh", "--target=32xA100-80", A100, *PATHS, "--dry-run", SLURM_NNODES=nodes)
    assert done.returncode == 2 and message in done.stderr


@pytest.fixture
def clone(tmp_path):
    """The launch scripts and a config, without a .venv."""
    folder = tmp_path / "a clone"
    (folder / "configs").mkdir(parents=True)
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    shutil.copy(ROOT / A100.partition("=")[2], folder / "configs")
    shutil.copy(ROOT / "setup.py", folder)
    return folder


def fake_python(path, text='echo "$@" >> "$0.log"'):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


SLURM = ["slurm.sh", "--target=8xH200", A100, *PATHS, "--skip-estimate"]
LAUNCHES = [
    (["gpu_node.sh", "--target=8xH200", A100, *PATHS], "cuda"),
    (SLURM, "cuda"),
    (["tpu_pod.sh", "--name=pod", "--zone=z", A100, *PATHS, "--accelerator=v4-512"], "estimate"),
]


@pytest.mark.parametrize(("command", "extra"), LAUNCHES, ids=lambda x: x[0] if type(x) is list else x)
def test_without_an_environment_nothing_starts(clone, command, extra):
    """The error is the command that makes it; a dry run needs none."""
    job = dict(SLURM_JOB_ID="1", SLURM_NNODES="1", SLURM_SUBMIT_DIR=str(clone))
    done = launch(*command, cwd=clone, **job)
    assert done.returncode == 2 and f"there is no {clone}/.venv/bin/python; make it: bash " in done.stderr
    assert f"/scripts/setup_venv.sh {extra} " in done.stderr
    fake_python(clone / ".venv/bin/python", "echo no module named ringformer >&2; exit 1")
    done = launch(*command, cwd=clone, **job)
    assert done.returncode == 2 and "/.venv/bin/python has no ringformer; make it" in done.stderr
    assert launch(*command, "--dry-run", cwd=clone, **job).returncode == 0


@pytest.mark.parametrize("named", [False, True], ids=["the clone's own", "named"])
def test_the_environment_is_used_whether_active_or_not(clone, tmp_path, named):
    python = fake_python(tmp_path / "other" / "python" if named else clone / ".venv/bin/python")
    fake_python(tmp_path / "bin" / "srun", 'shift; "$@"')
    more = {"RINGFORMER_PYTHON": str(python)} if named else {}
    for command, distributed in ((LAUNCHES[0][0], ""), (SLURM, "--distributed ")):
        done = launch(*command, cwd=clone, PATH=f"{tmp_path}/bin:/usr/bin:/bin", SLURM_JOB_ID="1", SLURM_NNODES="1",
                      SLURM_SUBMIT_DIR=str(clone), **more)  # fmt: skip
        assert done.returncode == 0, done.stderr
        last = (python.parent / "python.log").read_text().splitlines()[-1]
        assert last.startswith(f"-m ringformer.cli train {distributed}{A100}") and "--config.run_dir=/share/run" in last


LONG_WITH_OFFLOAD = """
from ringformer.train.config import base_config


def get_config():
    config = base_config("llama_13b")
    config.mesh_dim, config.seq_len, config.batch_size = "1,1,1,8", 2**21, 1
    config.model.offload = OFFLOAD
    return config
"""


@pytest.mark.parametrize("script", ["gpu_node.sh", "slurm.sh"])
@pytest.mark.parametrize("estimated", [[], ["--skip-estimate"]], ids=["estimate", "skip-estimate"])
def test_a_dry_run_shows_the_host_pool_of_what_is_offloaded(tmp_path, script, estimated):
    """As counted: 100 GiB a GPU. With --skip-estimate that is what the run gets, too."""
    found = {}
    for offload in (True, False):
        config = tmp_path / f"{offload}.py"
        config.write_text(LONG_WITH_OFFLOAD.replace("OFFLOAD", str(offload)))
        arguments = ["--dry-run", "--target=8xA100-80", f"--config={config}", *PATHS, *estimated]
        done = launch(script, *arguments, RINGFORMER_PYTHON=sys.executable, SLURM_NNODES="1")
        assert done.returncode == 0 and " train " in done.stdout.splitlines()[-1], done.stderr
        found[offload] = re.search(rf"{HOST_POOL}=(\d+) ", done.stdout.splitlines()[-1])
    assert int(found[True][1]) > 100 and found[False] is None


@pytest.mark.parametrize("script", ["gpu_node.sh", "slurm.sh"])
def test_a_run_gets_the_environment_that_the_estimate_says(clone, tmp_path, script):
    """With a `ringformer` that says what is needed for 13B with offload, and one that trains where it is set."""
    needed = runtime_environment("gpu", 81 * GiB)
    line = "environment: " + " ".join(f"{name}={value}" for name, value in needed.items())
    estimate, train = f'echo "a title"; echo "{line}"', f'echo "$3 ${HOST_POOL} ${MEMORY_FRACTION}"'
    fake_python(clone / ".venv/bin/python", f'if [ "$3" = estimate ]; then {estimate}; else {train}; fi')
    fake_python(tmp_path / "bin" / "srun", 'shift; "$@"')
    done = launch(script, "--target=8xA100-80", A100, *PATHS, cwd=clone, PATH=f"{tmp_path}/bin:/usr/bin:/bin",
                  SLURM_JOB_ID="1", SLURM_NNODES="1", SLURM_SUBMIT_DIR=str(clone))  # fmt: skip
    assert done.returncode == 0, done.stderr
    *_, title, said, trained = done.stdout.splitlines()
    assert (title, said, trained) == ("a title", line, f"train 83 {GPU_FRACTION}")


def test_a_job_is_submitted_from_the_repository(clone, tmp_path):
    done = launch(*SLURM, cwd=clone, SLURM_JOB_ID="1", SLURM_NNODES="1", SLURM_SUBMIT_DIR=str(tmp_path))
    assert done.returncode == 2 and f"{tmp_path} is not the repository: submit from its root" in done.stderr


def test_an_estimate_that_fails_stops_the_training(clone):
    """With a `ringformer` that refuses and says so."""
    fake_python(clone / ".venv/bin/python", 'echo "$3" >> "$0.log"; [ "$1" = -c ]')
    done = launch("gpu_node.sh", "--target=8xH200", A100, *PATHS, cwd=clone)
    assert done.returncode == 2 and "not every stage fits 8xH200" in done.stderr
    assert (clone / ".venv/bin/python.log").read_text() == "\nestimate\n"


def test_a_signal_to_the_launcher_reaches_the_run(tmp_path):
    """`docker stop` and systemd signal the script: the run, of one process, saves itself then."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exit 0\ntrap "echo saved; exit 143" TERM\ntouch {tmp_path}/begun\n'
        "while :; do sleep 0.05; done\n"
    )
    python.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "RINGFORMER_PYTHON": str(python)}
    command = ["bash", "scripts/gpu_node.sh", A100, *PATHS, "--skip-estimate"]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 143 and "saved" in out


@pytest.fixture
def installing(tmp_path):
    """A clone without .venv, and a python3 whose venv's pip only says what it was asked: (folder, run, asked)."""
    folder, log = tmp_path / "clone", tmp_path / "log"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    pip = f'#!/bin/bash\necho "${{@:6}}" >> {log}\n'
    (tmp_path / "pip").write_text(pip)
    (tmp_path / "pip").chmod(0o755)
    made = f"mkdir -p .venv/bin && cp {tmp_path}/pip .venv/bin/python"
    python = fake_python(tmp_path / "bin" / "python3", f'[ "$1 $2" != "-m venv" ] || {{ {made}; }}')

    def run(*arguments, **env):
        done = launch("setup_venv.sh", *arguments, cwd=folder, PATH=f"{python.parent}:/usr/bin:/bin", **env)
        assert done.returncode == 0, done.stderr
        asked = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return asked

    return folder, run


@pytest.mark.parametrize(
    ("extra", "lock", "then"),
    [
        ([], "train", "--no-build-isolation --no-deps --editable ."),
        (["train"], "train", "--no-build-isolation --no-deps --editable ."),
        (["test"], "test", "--no-build-isolation --editable .[train,test]"),
        (["cuda"], "train", "--no-build-isolation --editable .[train,cuda]"),
    ],
    ids=str,
)
def test_what_is_installed_is_what_is_locked(installing, extra, lock, then):
    _, run = installing
    locked, package = run(*extra)
    assert locked == f"--require-hashes --no-deps --requirement requirements/{lock}.txt"
    assert package == then


def test_nothing_is_installed_twice_unless_something_changed(installing):
    folder, run = installing
    assert run() and not run() and not run("train")
    assert run("test") and not run("test") and not run()
    for name in ("setup.py", "pyproject.toml", LOCK):
        later = time.time() + 60
        os.utime(folder / name, (later, later))
        assert run(), name
        os.utime(folder / name, (0, 0))
        assert not run()


def test_the_python_that_is_named_makes_the_environment(installing, tmp_path):
    folder, run = installing
    other = fake_python(tmp_path / "other", f'echo "$@" >> {tmp_path}/other.log; exec {tmp_path}/bin/python3 "$@"')
    assert run(PYTHON=str(other))
    assert "-m venv .venv" in (tmp_path / "other.log").read_text()
    shutil.rmtree(folder / ".venv")
    old = fake_python(tmp_path / "old", '[ "$1" != --version ] || echo Python 3.9.2; exit 1')
    done = launch("setup_venv.sh", cwd=folder, PYTHON=str(old))
    assert done.returncode == 1 and "ringformer needs Python 3.11 or newer" in done.stderr
