"""A tiny run whose losses are kept, by JAX's version: `python -m tests.train.golden` writes the file of this one.

Write it anew only for a change that is meant to change numbers, with that change.
"""

import json
import sys
import tempfile
from pathlib import Path

import jax

from ringformer.models.families.llama import LlamaConfig
from ringformer.runs.config import Config, DataConfig, OptimizerConfig
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from tests.train.runs import read_metrics, write_chats

FOLDER = Path(__file__).parent / "golden_losses"
STEPS = 20


def golden_config(folder: Path, run: str = "run") -> Config:
    """Chats packed on a ring of four with ZeRO-3, microbatches, warm-up and cosine; many epochs."""
    if not (folder / "chats.json").exists():
        write_chats(folder / "chats.json", count=60)
    return Config(
        model=LlamaConfig(
            vocab_size=257,
            hidden_size=32,
            intermediate_size=48,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            compute_dtype="float32",
            q_chunk=16,
            k_chunk=16,
            ffn_chunk=16,
            loss_chunk=16,
        ),
        data=DataConfig(
            store=str(folder / "store"), source=f"json:{folder}/chats.json", format="messages", held_out=0.0
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=3),
        run_dir=str(folder / run),
        mesh_dim="1,2,1,4",
        seq_len=128,
        batch_size=8,
        accumulate=2,
        steps=STEPS,
        seed=3,
        checkpoint_every=4,
        checkpoint_minutes=0,
        cpu_devices=8,
    )


def numbers(run_dir: str | Path) -> dict[str, list[float]]:
    """The losses and gradient norms of a run's steps."""
    rows = [row for row in read_metrics(str(run_dir)) if "grad_norm" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return {name: [row[name] for row in rows] for name in ("loss", "grad_norm")}


def write() -> Path:
    with tempfile.TemporaryDirectory() as folder:
        config = golden_config(Path(folder))
        train(prepare(config))
        path = FOLDER / f"{jax.__version__}.json"
        path.write_text(json.dumps(numbers(config.run_dir), indent=1) + "\n")
    return path


if __name__ == "__main__":
    import tests.conftest  # eight simulated devices  # noqa: F401

    print(write(), file=sys.stderr)
