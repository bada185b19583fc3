"""The launch scripts run as a user would, in a clone whose `python` is a stand-in."""

import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PATHS = ["--init_from=/share/llama 13b", "--store=/share/data", "--tokenizer=/share/t.model", "--run_dir=/share/run"]
A100, V5E = (f"--config=configs/llama_13b_512k_{name}.py" for name in ("32xa100", "v5e_256"))
H200 = "--config=configs/llama3_8b_1m_8xh200.py"
POD = ["tpu_pod.sh", "--name=pod", "--zone=us-west4-a", V5E, *PATHS]


def launch(script, *arguments, cwd=ROOT, **env):
    """Run a script, of scripts/ if no folder is named."""
    path = script if "/" in script else f"scripts/{script}"
    env = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere"} | env
    return subprocess.run(["bash", path, *arguments], cwd=cwd, env=env, capture_output=True, text=True)


def dry_run(script, *arguments, **env):
    """The lines of a script that only says what it would do: {where: [command as words]}."""
    done = launch(script, "--dry-run", *arguments, **env)
    assert done.returncode == 0, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        where, _, command = line[1:].partition("] ")
        found.setdefault(where, []).append(shlex.split(command))
    return found


def fake_python(path, text='echo "$@" >> "$0.log"'):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


SRUN = 'while [[ "$1" = -* ]]; do shift; done; "$@"'
"""Runs the command itself, once."""
