"""The launch scripts: shellcheck has nothing to say, a dry run shows what each host would run, mistakes are told."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ringformer.hardware import GiB
from ringformer.parallel.runtime_environment import GPU_FRACTION, HOST_POOL, MEMORY_FRACTION, runtime_environment
from tests.scripts.launching import A100, H200, PATHS, POD, ROOT, SRUN, dry_run, fake_python, launch

SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), *ROOT.glob("experiments/*.sh")])
RINGFORMER = [str(ROOT / ".venv/bin/python"), "-m", "ringformer.cli"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(path):
    subprocess.run(["bash", "-n", path], check=True)
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, "-x", path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_one_command_on_a_slurm_cluster():
    """Estimated once, then the same command on every node, with the paths that were given."""
    found = dry_run("slurm.sh", "--target=32xA100-80", A100, *PATHS, "--config.seed=3")
    assert [c[:4] for c in found.pop("this host")] == [[*RINGFORMER, "estimate"]]
    assert list(found) == [f"node {n}, tasks {8 * n} to {8 * n + 7}" for n in range(4)]
    (command,) = found["node 3, tasks 24 to 31"]
    assert command[:7] == ["env", f"{MEMORY_FRACTION}={GPU_FRACTION}", *RINGFORMER, "train", "--distributed"]
    assert {A100, "--config.init_from=/share/llama 13b", "--config.run_dir=/share/run", "--config.seed=3"} < {*command}
    assert all(commands == [command] for commands in found.values())


def test_one_command_on_a_host_with_gpus():
    estimate, train = dry_run("gpu_node.sh", "--target=8xH200", H200, *PATHS)["this host"]
    assert estimate[:4] == [*RINGFORMER, "estimate"] and {"--target=8xH200", "--require_fit"} < {*estimate}
    assert train[2:6] == [*RINGFORMER, "train"] and "--distributed" not in train
    (train,) = dry_run("gpu_node.sh", H200, *PATHS, "--skip-estimate")["this host"]
    assert train[2:6] == [*RINGFORMER, "train"]


def test_values_follow_a_space_or_an_equals_sign():
    joined = ["--target=8xH200", H200, *PATHS, "--config.seed=3", "--config.mesh_dim=-1,1,1,8"]
    spaced = [word for option in joined for word in option.split("=", 1)]
    assert spaced != joined and dry_run("gpu_node.sh", *spaced) == dry_run("gpu_node.sh", *joined)


@pytest.mark.parametrize("script", ["experiments/experience.sh", "experiments/figure3.sh", "experiments/retrieval.sh"])
def test_values_follow_a_space_in_the_other_scripts(script, tmp_path):
    """With a `ringformer` that fails, so that the script ends where it would begin."""
    fake_python(tmp_path / "python", 'echo "$@" >> "$0.log"; exit 9')
    options = [word for pair in OPTIONS[script] for word in pair]
    joined = ["=".join(pair) for pair in OPTIONS[script]]
    for words in (joined, options):
        launch(script, *words, str(tmp_path / "out"), RINGFORMER_PYTHON=str(tmp_path / "python"))
    first, second = (tmp_path / "python.log").read_text().splitlines()
    assert first == second and "0.3" in first
    done = launch(script, "--share", RINGFORMER_PYTHON=str(tmp_path / "python"))
    assert done.returncode == 2 and "--share needs a value" in done.stderr


OPTIONS = {
    "experiments/experience.sh": [("--seeds", "2"), ("--count", "54"), ("--share", "0.3")],
    "experiments/figure3.sh": [("--last", "5"), ("--cases", "40"), ("--share", "0.3")],
    "experiments/retrieval.sh": [("--seed", "7"), ("--devices", "2"), ("--share", "0.3")],
}

EVERY_SCRIPT = pytest.mark.parametrize(
    "command",
    [
        ["slurm.sh", "--target=32xA100-80", A100],
        ["gpu_node.sh", "--target=8xH200", H200],
        [*POD, "--accelerator=v5litepod-256"],
    ],
    ids=lambda command: command[0],
)


def verbs_of(found):
    """Of the commands of a dry run those of `ringformer`, wherever they run."""
    commands = [c for commands in found.values() for c in commands if "gcloud" not in c]
    commands = [shlex.split(c[c.index("-c") + 1]) if "setsid" in c else c for c in commands]  # of a shell of its own
    return [c for c in commands if "ringformer.cli" in c]


@pytest.mark.usual("tpu_pod.sh")
@EVERY_SCRIPT
def test_changes_are_allowed_to_training_alone(command):
    verbs = verbs_of(dry_run(*command, *PATHS, "--allow=steps"))
    assert all(c.count("--allow=steps") == c.count("train") for c in verbs) and any("train" in c for c in verbs)


@pytest.mark.usual("gpu_node.sh")
@EVERY_SCRIPT
def test_a_stage_is_passed_to_training_and_estimate(command):
    verbs = verbs_of(dry_run(*command, *PATHS, "--stage=2"))
    assert {"estimate", "train"} <= {word for c in verbs for word in c}
    assert all(c.count("--stage=2") == 1 for c in verbs)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["slurm.sh", "--target=12xA100-80", A100, *PATHS], "12 GPUs are not whole nodes of 8"),
        (["slurm.sh", "--target=4xA100-80", A100, *PATHS], "for less than a node there is scripts/gpu_node.sh"),
        (["slurm.sh", "--target=0xA100-80", A100, *PATHS], "which GPUs? --target=32xA100-80"),
        (["slurm.sh", "--target=08xA100-80", A100, *PATHS], "which GPUs? --target=32xA100-80"),
        (["slurm.sh", "--target=xA100-80", A100, *PATHS], "which GPUs? --target=32xA100-80"),
        (["slurm.sh", "--target=2x32xH100", A100, *PATHS], "--target=64xH100; for its groups, begin mesh_dim with 2"),
        (["gpu_node.sh", "--target=2x8xH100", H200, *PATHS], "a launch names all GPUs together, --target=16xH100"),
        (["slurm.sh", "--target=32xA100-80", A100, *PATHS, "--nodes=0"], "unknown option --nodes=0"),
        (["slurm.sh", "--target=32xA100-80", A100, *PATHS, "--stage=0"], "--stage=0: a stage is a number, 1 is the"),
        (["gpu_node.sh", "--target=8xH200", H200, *PATHS, "--stage=two"], "--stage=two: a stage is a number"),
        (["gpu_node.sh", "--target=8xH200", H200, *PATHS, "--stage"], "--stage needs a value; one that begins"),
        (["gpu_node.sh", "--target", "--config", "x.py"], "--target needs a value"),
        (["gpu_node.sh", A100, *PATHS, "--config.seed"], "--config.seed needs a value"),
        ([*POD, "--accelerator=v5litepod-0"], "none of v4-N, v5litepod-N, v5p-N"),
        ([*POD, "--accelerator=v4-512; reboot"], "none of v4-N, v5litepod-N, v5p-N"),
        ([*POD, "--accelerator=v4-512", "--nfs=-o:/share"], "--nfs=-o:/share is no IP:/SHARE"),
        ([*POD, "--accelerator=v4-512", "--nfs=/share"], "--nfs=/share is no IP:/SHARE"),
        ([*POD, "--accelerator=v4-512", "--slices=0"], "--slices=0 is no number from 1 to 9999"),
        ([*POD, "--accelerator=v4-512", "--slices=x"], "--slices=x is no number from 1 to 9999"),
        ([*POD, "--accelerator=v4-512", "--slices"], "--slices needs a value"),
        ([*POD, "--accelerator=v4-512", "--bucket=mine"], "--bucket=mine is no gs://NAME"),
        ([*POD, "--accelerator=v4-512", "--bucket=gs://mine/runs"], "--bucket=gs://mine/runs is no gs://NAME"),
        ([*POD, "--accelerator=v4-512", "--bucket=gs://a b;reboot"], "is no gs://NAME"),
        ([*POD, "--accelerator=v4-512", "--bucket=gs://mine", "--nfs=10.0.0.2:/x"], "both mounted at /mnt/share"),
        (["slurm.sh", "--target=32xA100-80", *PATHS], "which config?"),
        (["gpu_node.sh", A100], "where to? --run_dir=DIR"),
        (["gpu_node.sh", A100, *PATHS], "which GPUs? --target=8xH200"),
        (["gpu_node.sh", A100, *PATHS, "--skip-estimat"], "unknown option --skip-estimat; did you mean --skip"),
        (
            ["slurm.sh", "--target=32xA100-80", A100, *PATHS, "--run-di", "x"],
            "--run-di; did you mean --run_dir? --help",
        ),
        (["slurm.sh", "--target=32xA100-80", A100, *PATHS, "--zzz"], "unknown option --zzz; --help lists all"),
        ([*POD, "--accelerator=v2-8"], "none of v4-N, v5litepod-N, v5p-N"),
    ],
)
def test_mistakes_are_told(command, message):
    done = launch(*command, "--dry-run")
    assert done.returncode == 2 and message in done.stderr


QUICK = ["--config=configs/quickstart.py", "--run_dir=/share/run"]
LOCAL = ["launch_local.sh", *QUICK]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["gpu_node.sh", "--target=9xH100", A100, *PATHS], "--target=9xH100 is more than a node of 8 GPUs"),
        pytest.param(
            ["gpu_node.sh", "--target=16xH100", A100, *PATHS, "--skip-estimate"],
            "is more than a node of 8 GPUs",
            marks=pytest.mark.slow,
        ),
        (["gpu_node.sh", "--target=7xH200", H200, *PATHS], "needs 8 devices, there are 7"),
        pytest.param(
            ["gpu_node.sh", "--target=8xH101", A100, *PATHS], "unknown target '8xH101'", marks=pytest.mark.slow
        ),
        (["slurm.sh", "--target=32xA100-80", *QUICK, "--skip-estimate"], "needs 8 devices, there are 32"),
        pytest.param(
            [*POD, *QUICK, "--accelerator=v5litepod-256", "--skip-estimate"],
            "needs 8 devices, there are 256",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [*POD, "--accelerator=v5litepod-128", "--slices=2"],
            "dp=1 is not a multiple of the 2 slices",
            marks=pytest.mark.slow,
        ),
        ([*LOCAL, "--processes=3"], "3 processes do not share eight devices equally: --devices=N"),
        pytest.param(
            [*LOCAL, "--processes=3", "--devices=2"],
            "mesh_dim='1,1,1,8' needs 8 devices, there are 6",
            marks=pytest.mark.slow,
        ),
        ([*LOCAL, "--processes=2", "--config.seq_len=100"], "sequence length 100 is"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(command, message):
    done = launch(*command, "--dry-run")
    assert done.returncode == 2 and message in done.stderr, done.stdout
    assert " train " not in done.stdout and "Traceback" not in done.stderr


def test_a_dry_run_without_ringformer_says_what_it_does_not_check(clone):
    done = launch("gpu_node.sh", "--target=8xH100", A100, *PATHS, "--config.mesh_dim=1,1,1,7", "--dry-run", cwd=clone)
    assert done.returncode == 0 and "this dry run does not check the config against" in done.stderr


THIRTY_TWO = ["slurm.sh", "--target=32xA100-80", A100, *PATHS, "--dry-run"]
ONE_HOST = ["gpu_node.sh", "--target=8xH200", H200, *PATHS, "--dry-run"]


@pytest.mark.parametrize(
    ("command", "job", "message"),
    [
        (THIRTY_TWO, "NNODES=3", "32 GPUs, 3 nodes of 8 have 24: sbatch --nodes=4"),
        (THIRTY_TWO, "JOB_NUM_NODES=3", "32 GPUs, 3 nodes of 8 have 24: sbatch --nodes=4"),
        (THIRTY_TWO, "NNODES=4 GPUS_ON_NODE=4", "4 nodes of 4 have 16: sbatch --nodes=8 --gpus-per-node=4 --ntasks-"),
        (THIRTY_TWO, "NNODES=8 GPUS_ON_NODE=4 NTASKS_PER_NODE=8", "SLURM_NTASKS_PER_NODE=8, but a node has 4 GPUs"),
        (THIRTY_TWO, "NNODES=4 NTASKS=4", "SLURM_NTASKS=4, but there are 32 GPUs, each with its own process: sbatch"),
        (THIRTY_TWO, "NNODES=4 JOB_NUM_NODES=8", "SLURM_JOB_NUM_NODES=8 and SLURM_NNODES=4 contradict each other"),
        (
            THIRTY_TWO,
            "GPUS_ON_NODE=4 GPUS_PER_NODE=a100:8",
            "SLURM_GPUS_ON_NODE=4 and SLURM_GPUS_PER_NODE=a100:8 contra",
        ),
        (THIRTY_TWO, "GPUS_ON_NODE=0", "SLURM_GPUS_ON_NODE=0 is no number from 1"),
        (THIRTY_TWO, "NNODES=many", "SLURM_NNODES=many is no number from 1"),
        (THIRTY_TWO, "GPUS_ON_NODE=5", "32 GPUs are not whole nodes of 5"),
        (ONE_HOST, "GPUS_ON_NODE=4", "--target=8xH200 has 8 GPUs, but SLURM gives this host 4: --target=4xH200"),
        (ONE_HOST, "GPUS_ON_NODE=8 NNODES=2", "this job has 2 nodes, and this script trains on one: sbatch"),
    ],
)
def test_a_job_of_another_size_is_told_the_right_one(command, job, message):
    variables = dict(f"SLURM_{word}".split("=") for word in job.split())
    done = launch(*command, **variables)
    assert done.returncode == 2 and message in done.stderr


def test_a_job_on_nodes_of_four():
    """As SLURM describes it on clusters whose nodes have four GPUs."""
    job = dict(SLURM_JOB_NUM_NODES="2", SLURM_NNODES="2", SLURM_NTASKS="8", SLURM_NTASKS_PER_NODE="4")
    done = launch("slurm.sh", "--target=8xH200", H200, *PATHS, "--dry-run", SLURM_GPUS_PER_NODE="h200:4", **job)
    assert done.returncode == 0, done.stderr
    assert "[node 1, tasks 4 to 7]" in done.stdout and "[node 2" not in done.stdout
    four = ["--target=4xH200", H200, *PATHS, "--skip-estimate"]
    done = launch("gpu_node.sh", *four, "--dry-run", SLURM_GPUS_ON_NODE="4", RINGFORMER_PYTHON="/nowhere/python")
    assert done.returncode == 0, done.stderr


SLURM = ["slurm.sh", "--target=8xH200", H200, *PATHS, "--skip-estimate"]
LAUNCHES = [
    (["gpu_node.sh", "--target=8xH200", H200, *PATHS], "cuda"),
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
    fake_python(tmp_path / "bin" / "srun", SRUN)
    more = {"RINGFORMER_PYTHON": str(python)} if named else {}
    for command, distributed in ((LAUNCHES[0][0], ""), (SLURM, "--distributed ")):
        done = launch(
            *command,
            cwd=clone,
            PATH=f"{tmp_path}/bin:/usr/bin:/bin",
            SLURM_JOB_ID="1",
            SLURM_NNODES="1",
            SLURM_SUBMIT_DIR=str(clone),
            **more,
        )
        assert done.returncode == 0, done.stderr
        last = (python.parent / "python.log").read_text().splitlines()[-1]
        assert last.startswith(f"-m ringformer.cli train {distributed}{H200}") and "--config.run_dir=/share/run" in last


LONG_WITH_OFFLOAD = """
from ringformer.runs.config import base_config


def get_config():
    config = base_config("llama_13b")
    config.mesh_dim, config.seq_len, config.batch_size = "1,1,1,8", 2**21, 1
    config.model.offload = OFFLOAD
    return config
"""


@pytest.mark.slow
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
    fake_python(tmp_path / "bin" / "srun", SRUN)
    done = launch(
        script,
        "--target=8xA100-80",
        A100,
        *PATHS,
        cwd=clone,
        PATH=f"{tmp_path}/bin:/usr/bin:/bin",
        SLURM_JOB_ID="1",
        SLURM_NNODES="1",
        SLURM_SUBMIT_DIR=str(clone),
    )
    assert done.returncode == 0, done.stderr
    *_, title, said, trained = done.stdout.splitlines()
    assert (title, said, trained) == ("a title", line, f"train 83 {GPU_FRACTION}")


def test_a_job_is_submitted_from_the_repository(clone, tmp_path):
    done = launch(*SLURM, cwd=clone, SLURM_JOB_ID="1", SLURM_NNODES="1", SLURM_SUBMIT_DIR=str(tmp_path))
    assert done.returncode == 2 and f"{tmp_path} is not the repository: submit from its root" in done.stderr


def test_an_estimate_that_fails_stops_the_training(clone):
    """With a `ringformer` that refuses and says so."""
    fake_python(clone / ".venv/bin/python", 'echo "$3" >> "$0.log"; [ "$1" = -c ]')
    done = launch("gpu_node.sh", "--target=8xH200", H200, *PATHS, cwd=clone)
    assert done.returncode == 2 and "not every stage fits 8xH200" in done.stderr
    assert (clone / ".venv/bin/python.log").read_text() == "\nestimate\n"
