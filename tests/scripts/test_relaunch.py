"""Signals and exit codes: a run is told to save, and started again where that helps."""

import re
import subprocess
import time

import pytest

from tests.scripts.launching import A100, PATHS, ROOT, SRUN, fake_python, launch


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


def launched(tmp_path, script, codes, **env):
    """A launch with a `ringformer` that ends with these exit codes, one after the other; a 0 at last. Returns what the
    script did, and how often it ran the trainer. An exit code with a `+` leaves a new checkpoint."""
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in (*codes, 0)))
    python = fake_python(
        tmp_path / "python",
        f"""[ "$1" != -c ] || {{ [[ "$2" != *socket* ]] || echo 4711; exit 0; }}
            [[ "$*" = *" train "* ]] || exit 1
            cd {tmp_path} && echo run >> runs
            code=$(head -n 1 codes) && sed -i 1d codes
            [[ "$code" != *+ ]] || mkdir -p "run/checkpoints/$(wc -l < runs)"
            exit "${{code%+}}" """,
    )
    for name, text in {
        "srun": SRUN,
        "sleep": "exec /bin/sleep 0.01",
        "squeue": "echo ${STATE:-RUNNING}",
        "scontrol": f'echo "$@" >> {tmp_path}/scontrol.log',
    }.items():
        fake_python(tmp_path / "bin" / name, text)
    done = launch(
        *script,
        A100,
        f"--run_dir={tmp_path}/run",
        "--skip-estimate",
        RINGFORMER_PYTHON=str(python),
        PATH=f"{tmp_path}/bin:/usr/bin:/bin",
        SLURM_JOB_ID="7",
        SLURM_NNODES="1",
        SLURM_SUBMIT_DIR=str(ROOT),
        **env,
    )
    return done, len((tmp_path / "runs").read_text().splitlines())


NODE, JOB = ["gpu_node.sh"], ["slurm.sh", "--target=8xH200"]


@pytest.mark.parametrize(
    ("script", "codes", "code", "runs"),
    [
        (NODE, [], 0, 1),
        (NODE, [75, 75, 75, 75, 75], 0, 6),
        (NODE, [76, 137, 135], 0, 4),
        (NODE, [76, 76, 76, 76], 76, 4),
        (NODE, [76, 76, "76+", 76, 76], 0, 6),
        (NODE, [1], 1, 1),
        (NODE, [2], 2, 1),
        (NODE, [130], 130, 1),
        (JOB, [76, 137], 0, 3),
        (JOB, [76, 76, 76, 76], 76, 4),
        (JOB, [1], 1, 1),
        (JOB, [75], 75, 1),
    ],
)
def test_a_run_is_started_again(tmp_path, script, codes, code, runs):
    """After a stop always, after a lost process three times without a new checkpoint, after an error never."""
    done, count = launched(tmp_path, script, codes)
    assert (done.returncode, count) == (code, runs), done.stderr
    assert ("without a new checkpoint: not started again" in done.stderr) == (codes == [76] * 4)


@pytest.mark.parametrize(
    ("codes", "state", "requeued"),
    [
        ([75], "RUNNING", True),
        ([75], "CANCELLED", False),
        ([75], "COMPLETING", False),
        ([76] * 4, "RUNNING", False),
        ([2], "RUNNING", False),
        ([], "RUNNING", False),
    ],
)
def test_a_job_whose_time_is_up_is_queued_again(tmp_path, codes, state, requeued):
    """And one that was cancelled, or failed, is not."""
    launched(tmp_path, JOB, codes, STATE=state)
    log = tmp_path / "scontrol.log"
    assert (log.read_text() if log.exists() else "") == ("requeue 7\n" if requeued else "")


def test_slurm_signals_the_processes_and_lets_them_save(tmp_path):
    text = (ROOT / "scripts/slurm.sh").read_text()
    assert re.search(r"^#SBATCH --signal=USR1@\d+$", text, re.MULTILINE), "the steps, not the shell (B:)"
    fake_python(tmp_path / "bin" / "srun", 'echo "$@"')
    launched(tmp_path, JOB, [])
    assert "--kill-on-bad-exit=0" in text and "--distribution=block" in text, "processes of a node follow each other"


@pytest.mark.parametrize(
    ("codes", "code"),
    [({0: 0, 1: 0}, 0), ({0: 75, 1: 75}, 75), ({0: 76, 1: 137}, 76), ({0: 76, 1: 2}, 2), ({0: 130, 1: 130}, 130)],
)
def test_the_exit_code_of_several_processes(tmp_path, codes, code):
    """Two processes of one host, which are told the same port and their numbers."""
    cases = " ".join(f"*--process_id={i}*) exit {c} ;;" for i, c in codes.items())
    python = fake_python(
        tmp_path / "python",
        f"""[ "$1" != -c ] || {{ [[ "$2" != *socket* ]] || echo 4711; exit 0; }}
            echo "$@" >> {tmp_path}/log
            [ "$(grep -c process_id=0 {tmp_path}/log)" -le 1 ] || exit 3
            case "$*" in {cases} esac""",
    )
    done = launch("launch_local.sh", "--processes=2", A100, f"--run_dir={tmp_path}/run", RINGFORMER_PYTHON=str(python))
    again = code in (75, 76)
    assert done.returncode == (3 if again else code), done.stderr
    assert (f"exit code {code}: the same command again" in done.stderr) == again
    first = sorted((tmp_path / "log").read_text().splitlines()[:2])
    for i, line in enumerate(first):
        assert "--coordinator_address=localhost:4711" in line and "--num_processes=2" in line
        assert f"--process_id={i}" in line and "--config.cpu_devices=4" in line
