"""What tests of whole runs share: chats in bytes, small models, and what a run left in its folder."""

import json
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from ringformer.models.families.llama import LlamaConfig
from ringformer.models.interface import ModelConfig
from ringformer.models.registry import build

MODEL = LlamaConfig(
    vocab_size=257,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    init_std=0.2,
    compute_dtype="float32",
    attention="vanilla",
    remat="none",
    loss_chunk=16,
)
"""Quickly compiled: attention and chunks have tests of their own."""


def write_chats(path: Path, count: int = 120) -> None:
    """Questions and answers of all lengths, as JSON in the form `messages`."""
    rng = np.random.default_rng(0)

    def text():
        return " ".join(rng.choice(["ring", "block", "key", "query", "value", "é"], rng.integers(1, 6)))

    roles = "user", "assistant"
    chats = [{"messages": [{"role": r, "content": text()} for r in roles * rng.integers(1, 3)]} for _ in range(count)]
    path.write_text(json.dumps(chats))


def read_metrics(run_dir: str) -> list[dict]:
    return [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]


def first_parameters(model: ModelConfig, seed: int) -> dict:
    """Draw a run's first parameters on one device: numpy arrays in the package's nested dict."""
    built = jax.jit(lambda: nnx.state(build(model, nnx.Rngs(seed)), nnx.Param))()
    return jax.tree.map(np.asarray, nnx.to_pure_dict(built))


def read_parameters(run_dir: str, step: int) -> dict:
    """The parameters of a checkpoint: numpy arrays in the package's nested dict."""
    folder = Path(run_dir, "checkpoints", str(step), "default").absolute()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(folder).item_metadata.tree
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        found = checkpointer.restore(folder, ocp.args.PyTreeRestore(restore_args=arguments))
    return found["params"]


def saved_arrays(run_dir: Path, step: int) -> dict[str, bytes]:
    """Every byte of the arrays of a checkpoint, by file."""
    arrays = run_dir / "checkpoints" / str(step) / "default"
    return {f"{p.parent.name}/{p.name}": p.read_bytes() for p in arrays.glob("*.*/*")}


def flatten(tree: dict, prefix: str = "") -> dict[str, np.ndarray]:
    """Of a nested dict: its leaves in float64 by their dotted names."""
    found = {}
    for key, x in tree.items():
        found |= flatten(x, f"{prefix}{key}.") if isinstance(x, dict) else {prefix + key: np.asarray(x, np.float64)}
    return found


def unflatten(leaves: dict[str, np.ndarray]) -> dict:
    tree: dict = {}
    for name, x in leaves.items():
        *folders, last = name.split(".")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = x
    return tree
