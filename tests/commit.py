"""A number that changes with each commit: what the usual suite samples rotates with it."""

import argparse
import hashlib
import subprocess
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]


def commit_number() -> int:
    """The commit's hash; where there is no repository, a hash of the package's files."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if (ROOT / ".git").exists() and git.returncode == 0:
        return int(git.stdout, 16)
    content = hashlib.blake2b()
    for path in sorted((ROOT / "ringformer").rglob("*.py")):
        content.update(path.read_bytes())
    return int(content.hexdigest(), 16)


def generator_of_this_commit() -> np.random.Generator:
    """Random numbers that a commit repeats, and that the next one does not."""
    seed = commit_number()
    print(f"sampled by the commit's number {seed:x}")
    return np.random.default_rng(seed)


def revision(name: str) -> str:
    """Return the name of a commit, for an option of a command. Raises ArgumentTypeError if there is no such commit."""
    command = ["git", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    if subprocess.run(command, cwd=ROOT, capture_output=True).returncode:
        raise argparse.ArgumentTypeError(f"{name} is no commit of this clone: git log --oneline lists them")
    return name
