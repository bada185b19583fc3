"""The paper's Table 1: activations of one layer, by the paper's closed form and in compiled programs.

The compiled number is a slope. A two-layer model of 7B's width is compiled at several local lengths. The growth of its
temporaries, minus the layer inputs kept for the backward pass, is the activations of the layer that is being computed.
Weights and their gradients do not grow with the length, so they cancel out.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.workloads.programs import EVALUATION, TRAIN_STEP
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import Workload
from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.models.own_attention import ATTENTION
from ringformer.paper.attempts import NUMBER, check_fields, entries, stamp, write_results

TARGET = "v5e-8"
DEVICES = 8
LAYERS = 2
LENGTHS = {"vanilla": (512, 1024, 2048)} | dict.fromkeys(ATTENTION[1:], (8192, 16384))
"""Tokens per device to compile for; the table shows the first length of the linear kinds and the last of vanilla."""


def local_length(kind: str) -> int:
    """Return the number of tokens on a device for which the table states the bytes."""
    return LENGTHS[kind][-1 if kind == "vanilla" else 0]


def paper(kind: str, model: LlamaConfig, c: int) -> int:
    """Bytes of the largest activations of a layer with `c` tokens on a device, bfloat16 (paper, Table 1).

    For vanilla, the paper's column of totals prints 2 b h s^2. Its attention column, 2 b n s^2 with n heads, is what is
    intended.
    """
    h = model.hidden_size
    return {
        "vanilla": 2 * model.num_heads * c * c,
        "memory_efficient": 8 * c * h,
        "blockwise": 2 * c * h,
        "ring": 6 * c * h,
    }[kind]


def grows_by(kind: str, temporaries: list[int]) -> float:
    """Return the bytes, at `local_length(kind)`, of the part that grows with the length: linearly, and for vanilla also
    quadratically."""
    *slopes, _ = np.polyfit(LENGTHS[kind], temporaries, len(temporaries) - 1)
    return float(np.polyval([*slopes, 0.0], local_length(kind)))


def fill(path: Path, log: Callable[[str], None]) -> None:
    """Compile the kinds of attention that the file `path` lacks; the file is written after each kind."""
    kinds = read(path)
    target = find_target(TARGET)
    for kind in ATTENTION:
        if kind in kinds:
            continue
        model = LlamaConfig(**preset("llama_7b") | {"num_layers": LAYERS, "attention": kind})
        temporaries: dict[str, list[int]] = {EVALUATION: [], TRAIN_STEP: []}
        for c in LENGTHS[kind]:
            log(f"[table 1] {kind}, {c:,} tokens per device")
            mesh = "1,-1,1,1"
            seq_len = c
            batch = DEVICES
            if kind == "ring":
                mesh = "1,1,1,-1"
                seq_len = c * DEVICES
                batch = 1
            for program, sizes in temporaries.items():
                size = compile_apart(Workload(model, target, mesh, seq_len, batch), program).temp_bytes
                if size is None:
                    raise ValueError(f"the compiler of {TARGET} does not report the memory of the {program}")
                sizes.append(size)
        forward, train = temporaries.values()
        c = local_length(kind)
        kinds[kind] = {
            "local_tokens": c,
            "paper_bytes": paper(kind, model, c),
            "forward_bytes": grows_by(kind, forward),
            "backward_bytes": grows_by(kind, train) - 2 * LAYERS * c * model.hidden_size,
            "lengths": LENGTHS[kind],
            "forward_temp_bytes": forward,
            "train_temp_bytes": train,
            **stamp(target),
        }
        write_results(
            path,
            what="compiled: activations of a layer of 7B, paper's Table 1",
            target=TARGET,
            layers=LAYERS,
            command="ringformer tables --only=table1",
            kinds=kinds,
        )


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Read the bytes of each attention kind; empty if there is no file. Raises ValueError for a damaged file."""
    kinds = entries(path, "kinds")
    wanted = dict.fromkeys(("local_tokens", "paper_bytes", "forward_bytes", "backward_bytes"), NUMBER)
    for kind, entry in kinds.items():
        check_fields(path, kind, entry, wanted)
    return kinds
