"""scripts/tpu_pod.sh: what it sends to the hosts, and each answer of the cloud."""

import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ringformer.hardware import CLOUD_TPUS, SLICES
from tests.scripts.launching import PATHS, POD, ROOT, V5E, dry_run, fake_python, launch

LOCK = "requirements/train.txt"


@pytest.mark.usual("v6e")
@pytest.mark.parametrize("generation", CLOUD_TPUS)
def test_one_command_on_a_pod(generation, tmp_path):
    """Each generation under Google's name of its slices, with the image of its hosts, estimated for the same slice."""
    cloud, size = CLOUD_TPUS[generation], max(SLICES[generation])
    accelerator, target = f"{cloud.accelerator_type}-{size}", f"{generation}-{size}"
    python = str(tmp_path / "python")  # there is none, which could say that the config is for another size
    found = dry_run(*POD, f"--accelerator={accelerator}", "--nfs=10.0.0.2:/share", RINGFORMER_PYTHON=python)
    estimate, create, *_ = found["this host"]
    assert f"--target={target}" in estimate
    assert create[:5] == ["gcloud", "compute", "tpus", "queued-resources", "create"]
    assert f"--accelerator-type={accelerator}" in create and f"--runtime-version={cloud.runtime_version}" in create
    mount, install, train = found["every host of pod"]
    assert "10.0.0.2:/share" in mount and "./ringformer[train,tpu]" in install
    hashed = install.index("--require-hashes")
    assert install[hashed + 1 : hashed + 3] == ["-r", f"ringformer/{LOCK}"]
    assert (ROOT / LOCK).is_file() and install.count("ringformer/.venv/bin/python") == 3
    assert train[:2] == ["cd", "ringformer"] and {"setsid", "nohup"} < {*train}
    kept = shlex.split(train[train.index("-c") + 1])
    assert kept[kept.index("keep_running") + 2 :][:4] == [".venv/bin/python", "-m", "ringformer.cli", "train"]
    assert kept[kept.index("train") + 1] == "--distributed" and "--config.init_from=/share/llama 13b" in kept
    sent = [c for c in found["this host"] if "ssh" in c]
    assert len(sent) == 3 and all("--worker=all" in c and "--zone=us-west4-a" in c for c in sent)


TWO = ["--slices=2", "--accelerator=v5p-128"]


def test_one_command_on_two_slices(tmp_path):
    """One queued resource with both, estimated as joined, and the same commands for the hosts of each."""
    found = dry_run(*POD, *TWO, "--nfs=10.0.0.2:/share", RINGFORMER_PYTHON=str(tmp_path / "python"))
    estimate, create, *_ = found["this host"]
    assert "--target=2xv5p-128" in estimate
    assert create[5] == "pod" and {"--node-count=2", "--node-prefix=pod", "--accelerator-type=v5p-128"} <= {*create}
    assert not any(word.startswith("--node-id") for word in create)
    first = found["every host of pod-0"]
    second = found["every host of pod-1"]
    assert first == second and len(first) == 4 and "every host of pod" not in found
    for copy in ("pod-0:ringformer.tar.gz", "pod-1:ringformer.tar.gz"):
        assert sum(copy in command for command in found["this host"]) == 1


@pytest.mark.parametrize(
    ("metadata", "accepted"),
    [
        ("ZONE: 'z'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'", True),
        ("MEGASCALE_NUM_SLICES: 2", True),
        ("MEGASCALE_NUM_SLICES: '22'", False),
        ("MEGASCALE_NUM_SLICES: '4'", False),
        ("ZONE: 'z'", False),
    ],
)
def test_hosts_that_do_not_know_of_the_other_slice_train_nothing(tmp_path, metadata, accepted):
    """Executed, as a host would: each slice would train alone, and both in one folder."""
    found = dry_run(*POD, *TWO, RINGFORMER_PYTHON=str(tmp_path / "python"))
    (sent,) = [c for c in found["this host"] if "pod-1" in c and "MEGASCALE" in c[-1]]
    fake_python(tmp_path / "curl", f"echo {shlex.quote(metadata)}")
    fake_python(tmp_path / "hostname", "echo host-w-3")
    command, environment = sent[-1].removeprefix("--command="), {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) == accepted
    refusal = "host-w-3 is not one of 2 slices: its tpu-env has no MEGASCALE_NUM_SLICES of 2; delete pod and run"
    assert done.stderr.startswith("" if accepted else refusal) and done.stderr.count("\n") == (not accepted)


@pytest.mark.slow
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


@pytest.mark.usual("True-True")
@pytest.mark.parametrize(("installed", "mounted"), [(True, True), (False, False)])
def test_a_bucket_is_mounted_on_each_host(tmp_path, installed, mounted):
    """Executed, as a host would, by a shell whose programs say what they are given. What was mounted before, with
    whatever options, is unmounted."""
    found = dry_run(*POD, "--accelerator=v5litepod-256", "--bucket=gs://mine")
    (sent,) = [c for c in found["this host"] if "ssh" in c and "gcsfuse" in c[-1]]
    programs = {"mountpoint": f"exit {int(not mounted)}", "id": "echo me", "lsb_release": "echo jammy", "tee": "cat"}
    for name in ("curl", "apt-get", "mkdir", "chown", "fusermount", *(["gcsfuse"] if installed else ["gcsfuse-new"])):
        programs[name] = f'echo {name} "$@" >> {tmp_path}/log'
    programs["sudo"] = (
        'echo sudo "$@" >> '
        + f'{tmp_path}/log; [ "$1" != apt-get ] || [ "$2" != install ] || cp '
        + (f'{tmp_path}/gcsfuse-new {tmp_path}/gcsfuse; exec "$@"')
    )
    for name, text in programs.items():
        fake_python(tmp_path / name, text)
    command = sent[-1].removeprefix("--command=")
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
    log = (tmp_path / "log").read_text().splitlines()
    assert log[-1].split()[0] in ("gcsfuse", "gcsfuse-new") and log[-1].endswith("=0 mine /mnt/share")
    assert log[-2:-1] == ["chown me /mnt/share"] and ("fusermount -u /mnt/share" in log) == mounted
    assert ("apt-get install -y -q gcsfuse" in log) != installed
    assert any(line.startswith("curl -fsSL https://") for line in log) != installed


@pytest.fixture
def pod(clone, tmp_path):
    """`pod(ANSWERS, ...)` runs tpu_pod.sh in a committed clone, with a gcloud that gives these answers to `describe`,
    (stdout, stderr, exit code) each, the last one for ever; it executes what is sent to a host. Returns what was done
    and the log of gcloud's commands."""
    fake_python(clone / ".venv/bin/python")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "scripts", "configs", "setup.py"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], cwd=clone, check=True)
    host = tmp_path / "host"
    host.mkdir()

    def run(answers, *options, hosts="echo IDLE", **environment):
        for i, (out, err, code) in enumerate(answers):
            text = f"echo {shlex.quote(out)}; echo {shlex.quote(err)} >&2; exit {code}"
            (tmp_path / f"answer-{i}").write_text(text)
        fake_python(
            tmp_path / "bin" / "gcloud",
            f"""echo "$@" >> {tmp_path}/gcloud.log
                case "$*" in
                    *buckets*describe*) echo "$HIERARCHICAL"; exit "${{DENIED:-0}}" ;;
                    *describe*)
                        n=$(cat {tmp_path}/count 2>/dev/null || echo 0)
                        echo $((n + 1)) > {tmp_path}/count
                        [ "$n" -lt {len(answers)} ] || n={len(answers) - 1}
                        . {tmp_path}/answer-$n ;;
                    *"echo IDLE"*) {hosts} ;;
                    *ringformer.code*" "*) ;;
                    *"cat ringformer.code"*) echo 0 ;;
                esac""",
        )
        fake_python(tmp_path / "bin" / "sleep", "exit 0")
        command = ["--name=pod", "--zone=z", V5E, *PATHS, "--accelerator=v5litepod-256", "--skip-estimate", *options]
        done = launch("tpu_pod.sh", *command, cwd=clone, PATH=f"{tmp_path}/bin:/usr/bin:/bin", **environment)
        log = tmp_path / "gcloud.log"
        return done, log.read_text() if log.exists() else ""

    return run


NOT_FOUND = ("", "ERROR: (gcloud...describe) NOT_FOUND: Resource 'queuedResources/pod' was not found", 1)
ACTIVE = ("ACTIVE", "", 0)


@pytest.mark.parametrize(
    ("answers", "created", "said"),
    [
        ([NOT_FOUND, ("ACCEPTED", "", 0), ("PROVISIONING", "", 0), ACTIVE], True, "waiting for pod"),
        ([ACTIVE], False, ""),
        ([("WAITING_FOR_RESOURCES", "", 0), ACTIVE], False, "waiting for pod"),
        ([("", "ERROR: PERMISSION_DENIED: no", 1)], False, "so nothing is created: ERROR: PERMISSION_DENIED"),
        ([("", "ERROR: Reauthentication required", 1)], False, "so nothing is created"),
        ([("", "", 1)], False, "so nothing is created"),
        ([("", "", 0)], False, "gcloud says that pod is '', which this script does not know"),
        ([("HIBERNATING", "", 0)], False, "pod is 'HIBERNATING', which this script does not know"),
        ([("SUSPENDED", "", 0)], False, "the queued resource pod is SUSPENDED: delete it"),
        ([("DELETING", "", 0)], False, "the queued resource pod is DELETING"),
        ([NOT_FOUND, ("ACCEPTED", "", 0), ("FAILED", "", 0)], True, "the queued resource pod is FAILED"),
        ([("CREATING", "", 0), ("", "ERROR: UNAVAILABLE", 1), ACTIVE], False, "gcloud cannot say"),
        ([("CREATING", "", 0), ("", "ERROR: UNAVAILABLE", 1)], False, "gcloud cannot say"),
    ],
)
def test_each_answer_of_the_cloud_is_understood_or_refused(pod, answers, created, said):
    done, log = pod(answers)
    assert ("queued-resources create" in log) == created, log
    assert said in done.stderr
    trains = answers[-1] == ACTIVE
    assert ("keep_running" in log) == trains, done.stderr
    assert (done.returncode == 0) == trains, done.stderr


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [
        ({"HIERARCHICAL": "True"}, ""),
        ({"HIERARCHICAL": ""}, "gs://mine has no hierarchical namespace"),
        ({"HIERARCHICAL": "False"}, "gs://mine has no hierarchical namespace"),
        ({"HIERARCHICAL": "", "DENIED": "1"}, "gcloud does not describe gs://mine"),
    ],
)
def test_a_bucket_that_renames_no_folders_is_refused_before_anything_is_created(pod, answer, refusal):
    done, log = pod([NOT_FOUND, ACTIVE], "--bucket=gs://mine", **answer)
    assert (done.returncode != 0) == bool(refusal) and refusal in done.stderr
    assert ("create" in log) == ("keep_running" in log) == ("gcsfuse" in log) == (not refusal)


def test_a_run_that_is_under_way_is_followed(pod):
    done, log = pod([ACTIVE], hosts="echo UNDER_WAY")
    assert done.returncode == 0 and "it is not started again" in done.stderr
    assert "setsid" not in log and "scp" not in log and "tail" in log


def sent_to(log):
    """Return the commands in gcloud's log by the slice that they were sent to."""
    lines = [line for line in log.splitlines() if " tpu-vm " in line]
    sent = {}
    for node in ("pod-0", "pod-1", "pod-2"):
        sent[node] = "\n".join(line for line in lines if f" {node}" in line)
    return sent


def test_a_run_begins_on_each_slice(pod):
    """Process 0 is on the first host of the first."""
    done, log = pod([NOT_FOUND, ("ACCEPTED", "", 0), ACTIVE], "--slices=3")
    assert done.returncode == 0, done.stderr
    assert "waiting for pod (3 of v5litepod-256 in z): ACCEPTED" in done.stderr
    assert "--node-count=3 --node-prefix=pod" in log
    sent = sent_to(log)
    for commands in sent.values():
        assert commands.count("setsid") == commands.count(" scp ") == commands.count("uv venv") == 1
        assert commands.index("echo IDLE") < commands.index("MEGASCALE") < commands.index(" scp ")
    assert [("tail" in commands, "--worker=0" in commands) for commands in sent.values()] == [(True, True)] + [
        (False, False)
    ] * 2


@pytest.mark.parametrize("node", ["pod-0", "pod-1"])
def test_a_run_that_is_under_way_on_one_slice_is_not_started_on_the_others(pod, node):
    hosts = f'case "$*" in *" {node} "*) echo UNDER_WAY ;; *) echo IDLE ;; esac'
    done, log = pod([ACTIVE], "--slices=2", hosts=hosts)
    assert done.returncode == 0 and f"a run is under way on {node}: it is not started again" in done.stderr
    assert "setsid" not in log and "scp" not in log and "tail" in sent_to(log)["pod-0"]


def test_a_slice_that_does_not_answer_begins_no_run(pod):
    done, log = pod([ACTIVE], "--slices=2", hosts='case "$*" in *" pod-1 "*) exit 1 ;; *) echo IDLE ;; esac')
    assert done.returncode != 0 and "setsid" not in log and "scp" not in log


def test_a_slice_that_fails_to_install_begins_no_run(pod):
    """Whichever it is: the others are installed at the same time."""
    for node in ("pod-0", "pod-1"):
        hosts = f"""echo IDLE ;; *" {node} "*"uv venv"*) exit 5"""
        done, log = pod([ACTIVE], "--slices=2", hosts=hosts)
        assert done.returncode == 5 and "uv venv" in log and "setsid" not in log


@pytest.mark.parametrize(("option", "sent"), [("--follow", ["tail"]), ("--stop", ["kill -TERM", "tail"])])
def test_a_run_on_two_slices_is_followed_on_the_first_and_stopped_on_both(pod, option, sent):
    done, log = pod([ACTIVE], "--slices=2", option)
    assert done.returncode == 0, done.stderr
    first, second = sent_to(log)["pod-0"], sent_to(log)["pod-1"]
    assert all(command in first for command in sent) and "setsid" not in log and "create" not in log
    assert ("kill -TERM" in second) == (option == "--stop") and "tail" not in second


@pytest.mark.parametrize(("option", "sent"), [("--follow", "tail"), ("--stop", "kill -TERM")])
def test_a_run_on_a_pod_is_followed_and_stopped(pod, option, sent):
    done, log = pod([ACTIVE], option)
    assert done.returncode == 0, done.stderr
    assert sent in log and "setsid" not in log and "create" not in log


def test_what_is_not_committed_does_not_go_to_hosts(pod, clone):
    config = clone / V5E.partition("=")[2]
    text = config.read_text()
    config.write_text(text + "\n# changed\n")
    done, log = pod([ACTIVE])
    assert done.returncode == 2 and "commit first" in done.stderr and config.name in done.stderr and not log
    config.write_text(text)
    (clone / "configs" / "new.py").write_text(text)
    done, log = pod([ACTIVE])
    assert done.returncode == 2 and "configs/new.py" in done.stderr and not log


def test_a_run_outlives_the_shell_that_started_it(clone, tmp_path):
    """What tpu_pod.sh sends to a host, executed there: the shell ends, the run goes on, is seen, and stopped."""
    dry = launch(
        "tpu_pod.sh",
        "--dry-run",
        "--name=pod",
        "--zone=z",
        V5E,
        "--run_dir=/share/a run",
        "--skip-estimate",
        "--accelerator=v5litepod-256",
        cwd=clone,
    )
    (sent,) = [line for line in dry.stdout.splitlines() if line.startswith("[every host") and "setsid" in line]
    pid = tmp_path / "pid"
    sent = sent.partition("] ")[2].replace("/tmp/ringformer.pid", str(pid))
    host = tmp_path / "host"
    shutil.copytree(clone, host / "ringformer")
    fake_python(
        host / "ringformer/.venv/bin/python",
        "echo begun; trap 'echo saved; exit 75' TERM; while :; do sleep 0.05; done",
    )
    subprocess.run(["setsid", "bash", "-c", sent], cwd=host, check=True, timeout=10)
    log = host / "ringformer.log"
    end = time.monotonic() + 20
    while not (log.exists() and "begun" in log.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    number = int(pid.read_text())
    assert "keep_running" in Path(f"/proc/{number}/cmdline").read_text()
    os.kill(number, signal.SIGTERM)
    code = host / "ringformer.code"
    while not (code.exists() and code.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    assert code.read_text() == "75\n" and "saved" in log.read_text()
