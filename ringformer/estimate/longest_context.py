"""The longest context that trains on a target: closed forms choose what to try, the compiler judges.

An attempt is one `ringformer estimate` in a process of its own, so that a compiler that dies takes nothing along and
every number can be had again by its command.
"""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version

from ringformer.estimate.closed_forms import host_bytes, peak_bytes
from ringformer.estimate.targets import Target, target
from ringformer.models.llama_config import LlamaConfig
from ringformer.models.llama_presets import preset


@dataclass(frozen=True)
class Case:
    """What is to be trained where; all but the sequence length."""

    model: str
    target: str
    attention: str
    compute_dtype: str
    mesh_dim: str
    batch_size: int
    offload: bool = False
    layout: str = "zigzag"

    @property
    def shards(self) -> dict[str, int]:
        """The devices that share the state, and those of a tp group, as `roofline.memory` wants them."""
        _, fsdp, tp, sp = (int(x) for x in self.mesh_dim.split(","))
        return {"devices": fsdp * tp * sp, "tp": tp}

    def local(self, seq_len: int) -> int:
        """Tokens of a step on a device."""
        return seq_len * self.batch_size // math.prod(int(x) for x in self.mesh_dim.split(","))

    def command(self, seq_len: int, saving: "Saving") -> list[str]:
        """The estimate that decides it."""
        options = {**vars(self), "seq_len": seq_len, **vars(saving)}
        offload = ["--offload"] if options.pop("offload") else []
        if self.layout == LlamaConfig.layout:
            del options["layout"]
        words = [f"--{k}={v}" for k, v in options.items() if v is not None]
        return ["ringformer", "estimate", *words, *offload, "--json"]

    def config(self, saving: "Saving") -> LlamaConfig:
        return LlamaConfig(**preset(self.model) | vars(saving) | dict(
            attention=self.attention, compute_dtype=self.compute_dtype, offload=self.offload, layout=self.layout,
        ))  # fmt: skip


@dataclass(frozen=True)
class Saving:
    """Settings that buy memory with time."""

    head_groups: int = 1
    remat_group: int = 1
    q_chunk: int | None = None
    k_chunk: int | None = None

    def __str__(self):
        return ", ".join(f"{name} {value}" for name, value in vars(self).items() if value is not None)


def savings(model: LlamaConfig) -> Iterator[Saving]:
    """From the fastest on: groups of heads cost only latency, two-level remat a forward pass."""
    groups = [g for g in (1, 4, 8, 13, 16) if model.num_kv_heads % g == 0]
    # Layers that make no group cost a second loop in the program: only if they save much.
    fewest = min(range(1, model.num_layers), default=1,
                 key=lambda g: model.num_layers // g + g + 2 * (model.num_layers % g > 0))  # fmt: skip
    for remat_group in dict.fromkeys((1, fewest)):
        for g in groups:
            yield Saving(g, remat_group, model.q_chunk, model.k_chunk)


def likely_savings(model: LlamaConfig, goal: Target, local: int, *, devices: int, tp: int) -> list[Saving]:
    """What to compile, in this order: the fastest setting that the closed forms let fit, and the smallest."""
    if model.attention != "ring":
        return [Saving()]
    possible = [s for s in savings(model) if max(1, model.num_kv_heads // tp) % s.head_groups == 0]
    configs = {s: replace(model, **vars(s)) for s in possible}
    peaks = {s: peak_bytes(c, local, devices=devices, tp=tp) for s, c in configs.items()}
    in_host = [s for s, c in configs.items() if host_bytes(c, local) <= goal.chip.host_bytes] or possible
    fitting = [s for s in in_host if peaks[s] <= goal.budget]
    return list(dict.fromkeys(fitting[:1] + [min(in_host, key=peaks.get)]))


def attempt(case: Case, seq_len: int, log=lambda line: None) -> dict:
    """Whether the case trains at this length, with the first setting that the compiler accepts.

    Returns the estimate as `report.as_json` without its list of collectives, with `seq_len`, the settings and the
    command; that of the smallest setting if none fits. It does not fit either if what it offloads is too much for a
    usual host. Raises RuntimeError if a compiler broke down.
    """
    goal = target(case.target)
    for saving in likely_savings(case.config(Saving()), goal, case.local(seq_len), **case.shards):
        command = case.command(seq_len, saving)
        log(" ".join(command))
        found = run(command) | {"seq_len": seq_len, **vars(saving), "command": " ".join(command)}
        found["fits"] &= found["fits_host"]
        if found["fits"]:
            break
    return found


def run(command: list[str]) -> dict:
    """The JSON of an estimate; raises RuntimeError with its last words if there is none."""
    done = subprocess.run([sys.executable, "-m", "ringformer.cli", *command[1:]], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return {k: v for k, v in found.items() if k != "collectives"}


def compiled_by(target_name: str) -> str:
    """The versions of JAX and of the compiler of a target, or of a command that names one."""
    wheel = "jax-cuda12-plugin" if any(gpu in target_name for gpu in ("A100", "H100", "H200")) else "libtpu"
    return f"jax {version('jax')}, {wheel} {version(wheel)}"


def next_length(attempts: list[dict], first: int) -> int | None:
    """The length to try next in a search over powers of two that begins at `first`; None: the maximum is known."""
    fitting = [a["seq_len"] for a in attempts if a["fits"]]
    failing = [a["seq_len"] for a in attempts if not a["fits"]]
    if not attempts:
        return first
    longer = 2 * max(fitting) if fitting else min(failing) // 2
    return None if longer in failing or longer < 1024 else longer


def longest_start(case: Case) -> int:
    """A power of two to begin with: the longest that the closed form lets fit, with any setting."""
    goal, length = target(case.target), 1024
    model = case.config(Saving())
    settings = [case.config(s) for s in savings(model)] if case.attention == "ring" else [model]

    def fits(seq_len):
        return any(peak_bytes(c, case.local(seq_len), **case.shards) <= goal.budget for c in settings)

    while fits(2 * length):
        length *= 2
    return length
