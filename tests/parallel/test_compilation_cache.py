"""Compiled programs in the user's cache: read back at the second start, private, and never a reason to fail."""

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from ringformer.parallel import compilation_cache
from ringformer.parallel.compilation_cache import VARIABLE, keep_programs
from tests.cpu_flags import cpu_environment

PROGRAM = """
import jax, jax.numpy as jnp
from ringformer.parallel.compilation_cache import keep_programs
from ringformer.parallel.mesh import simulate_cpu_devices
simulate_cpu_devices(%s)
keep_programs()
print(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8)))[0, 0])
"""


def start(folder: Path, devices: int = 1, **variables: str) -> tuple[str, str, tuple[int, int] | None]:
    """Run the program; return its output, its messages, and the programs that it read and compiled."""
    environment = cpu_environment(XDG_CACHE_HOME=str(folder), **variables)
    del environment[VARIABLE]
    command = [sys.executable, "-c", PROGRAM % devices]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    counts = re.search(r"(\d+) programs were read from \S+, (\d+) were compiled", done.stderr)
    return done.stdout, done.stderr, counts and (int(counts[1]), int(counts[2]))


def test_the_second_start_compiles_nothing(tmp_path):
    """Also after files were damaged, from which nothing is read: JAX warns of each, and compiles again."""
    first, _, (_, compiled) = start(tmp_path)
    again, _, (read, compiled_again) = start(tmp_path)
    assert compiled and read and compiled_again == 0 and again == first
    folder = tmp_path / "ringformer" / "programs"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    programs = list(folder.glob("*-cache"))
    assert len(programs) == compiled
    for program in programs:
        program.write_bytes(program.read_bytes()[:-9])
    damaged, warnings, counts = start(tmp_path)
    assert damaged == first and "Error reading persistent compilation cache entry" in warnings
    assert counts is None or counts[0] < read


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 12), reason="JAX reads programs of several CPU devices back as they were"
)
@pytest.mark.parametrize(
    "simulated",
    [{}, {"JAX_NUM_CPU_DEVICES": "2"}, {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}],
    ids=["by the command", "by a variable", "by a flag"],
)
def test_programs_of_simulated_devices_are_not_kept(tmp_path, simulated):
    """What JAX reads back computes wrong numbers (docs/simulated-devices.md)."""
    _, _, counts = start(tmp_path, devices=0 if simulated else 2, **simulated)
    assert counts is None and not list(tmp_path.iterdir())


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """What `keep_programs` sets in JAX, which is not set here."""
    set_here = {}
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jax.config, "update", set_here.__setitem__)
    monkeypatch.setattr(compilation_cache, "_may_keep", lambda: True)
    monkeypatch.setattr(compilation_cache, "_count_programs", lambda folder: None)
    return set_here


def test_the_folder_is_the_user_s_alone_and_its_size_is_bounded(configured, tmp_path):
    folder = tmp_path / "ringformer" / "programs"
    folder.mkdir(mode=0o755, parents=True)
    keep_programs()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert configured["jax_compilation_cache_dir"] == str(folder)
    assert configured["jax_persistent_cache_min_compile_time_secs"] == 0


def test_the_oldest_programs_are_deleted_above_the_limit(configured, monkeypatch, tmp_path):
    folder = tmp_path / "ringformer" / "programs"
    folder.mkdir(parents=True)
    for age, name in enumerate(("new", "middle", "old")):
        (folder / name).write_bytes(bytes(100))
        os.utime(folder / name, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(compilation_cache, "MOST_BYTES", 200)
    keep_programs()
    assert {file.name for file in folder.iterdir()} == {"new", "middle"}


def test_a_user_without_a_home_keeps_no_programs(configured, monkeypatch, capsys):
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    keep_programs()
    assert configured == {} and "compiled programs are not kept: " in capsys.readouterr().err


@pytest.mark.parametrize("value", ["", "/somewhere"])
def test_a_folder_that_the_environment_names_or_an_empty_one_holds(configured, monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    keep_programs()
    assert configured == {}


def test_somebody_else_s_folder_is_not_used(configured, monkeypatch, capsys):
    """Its programs would be executed."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    keep_programs()
    assert configured == {}
    assert re.search(r"programs are not kept: \S+ belongs to another user; JAX_COMP", capsys.readouterr().err)


def test_a_home_that_cannot_be_written_to_is_said_and_nothing_else(configured, monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_programs()
    assert configured == {} and "compiled programs are not kept: " in capsys.readouterr().err
