"""The paper's Table 1: what one layer holds, by its closed form and in the compiled program.

The compiled number is a slope. A two-layer model of 7B's width is compiled at several local lengths; what its
temporaries grow by, less the layer inputs kept for the backward, is what the layer at work holds of activations.
Weights and their gradients do not grow with the length and drop out.
"""

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np

from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.programs import EVALUATION, TRAIN_STEP
from ringformer.estimate.targets import compiled_by, find_target
from ringformer.estimate.workload import Workload
from ringformer.models.llama_config import ATTENTION, LlamaConfig
from ringformer.models.llama_presets import preset
from ringformer.paper.attempts import NUMBER, check_fields, entries

TARGET, DEVICES, LAYERS = "v5e-8", 8, 2
LENGTHS = {"vanilla": (512, 1024, 2048)} | dict.fromkeys(ATTENTION[1:], (8192, 16384))
"""Tokens on a device; the table gives the first length of the linear kinds, the last of vanilla."""


SAID = "local_tokens", "paper_bytes", "forward_bytes", "backward_bytes"
"""What the table says of a kind."""


def local_length(kind: str) -> int:
    """Tokens on a device for which the table gives the bytes."""
    return LENGTHS[kind][-1 if kind == "vanilla" else 0]


def paper(kind: str, model: LlamaConfig, c: int) -> int:
    """Bytes of the largest activations of a layer with `c` tokens on a device, bfloat16 (paper, Table 1).

    For vanilla the paper's total prints 2 b h s^2; its attention column, 2 b n s^2 with n heads, is what it means.
    """
    h = model.hidden_size
    return {
        "vanilla": 2 * model.num_heads * c * c,
        "memory_efficient": 8 * c * h,
        "blockwise": 2 * c * h,
        "ring": 6 * c * h,
    }[kind]


def grows_by(kind: str, temporaries: list[int]) -> float:
    """What grows with the length, linearly and for vanilla also with its square: its bytes at `local_length(kind)`."""
    lengths = np.array(LENGTHS[kind], float)
    slopes = np.polyfit(lengths, temporaries, len(lengths) - 1)[:-1]
    return float(np.polyval([*slopes, 0.0], local_length(kind)))


def fill(path: Path, log: Callable[[str], None]) -> None:
    """Compile what `path` does not know yet; it is written after each kind."""
    known, target = read(path), find_target(TARGET)
    for kind in ATTENTION:
        if kind in known:
            continue
        model = LlamaConfig(**preset("llama_7b") | {"num_layers": LAYERS, "attention": kind})
        forward, train = [], []
        for c in LENGTHS[kind]:
            log(f"[table 1] {kind}, {c:,} tokens a device")
            mesh, seq_len, batch = ("1,1,1,-1", c * DEVICES, 1) if kind == "ring" else ("1,-1,1,1", c, DEVICES)
            workload = Workload(model, target, mesh, seq_len, batch)
            forward.append(_temporaries(workload, EVALUATION))
            train.append(_temporaries(workload, TRAIN_STEP))
        c = local_length(kind)
        known[kind] = {
            "local_tokens": c,
            "paper_bytes": paper(kind, model, c),
            "forward_bytes": grows_by(kind, forward),
            "backward_bytes": grows_by(kind, train) - 2 * LAYERS * c * model.hidden_size,
            "lengths": LENGTHS[kind],
            "forward_temp_bytes": forward,
            "train_temp_bytes": train,
            "compiled_by": compiled_by(target),
            "date": date.today().isoformat(),
        }
        content = {
            "what": "compiled: activations of a layer of 7B, paper's Table 1",
            "target": TARGET,
            "layers": LAYERS,
            "command": "ringformer tables --only=table1",
            "kinds": known,
        }
        path.write_text(json.dumps(content, indent=1) + "\n")


def _temporaries(workload: Workload, program: str) -> int:
    size = compile_apart(workload, program).temp_bytes
    if size is None:
        raise ValueError(f"the compiler of {TARGET} tells no memory of the {program}")
    return size


def read(path: Path) -> dict[str, dict]:
    """The bytes of each attention kind; none if there is no file. Raises ValueError if it is not such a file."""
    kinds = entries(path, "kinds")
    for kind, held in kinds.items():
        check_fields(path, kind, held, dict.fromkeys(SAID, NUMBER))
    return kinds
