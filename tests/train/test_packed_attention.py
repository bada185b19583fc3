"""What packed attention is for: a model reads off the earlier text of its sequence what comes next, or it cannot.

Documents of random letters, as long as the context, whose second half repeats the first: the second half can be
predicted by who sees the first. A model learns it in two stages, 32 and 64 tokens, on eight devices, a ring in the
second; then it is asked for the loss of every position.
"""

import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from ringformer.checkpoints.saved_model import restore_params
from ringformer.data import Batch, ByteTokenizer, Document, Loader, build_stores
from ringformer.data.packing.options import PackingOptions
from ringformer.ops.layouts import permutation
from ringformer.parallel.mesh import BATCH
from ringformer.runs.config import base_config
from ringformer.runs.config_file import parse_stages
from ringformer.train.stages import prepare_stages, train_stages
from ringformer.train.step import make_logits

CONTEXTS = (32, 64)
DOCUMENTS = (4000, 1000)
LETTERS = np.array([chr(i) for i in range(33, 123)])


def halves(seed, length, count):
    """Texts of so many random letters."""
    return ["".join(letters) for letters in np.random.default_rng(seed).choice(LETTERS, (count, length))]


def trained(folder, packed_attention, cut):
    """The last run, and its parameters, of two stages on documents as long as their context; or cut into halves."""
    folder.mkdir()
    with (folder / "documents.jsonl").open("w") as file:
        for length, count in zip(CONTEXTS, DOCUMENTS, strict=True):
            # A byte is a token, and each document ends in one more.
            for half in halves(length, length // 2, count):
                for text in [half[:-1], half[:-1]] if cut else [half + half[:-1]]:
                    file.write(json.dumps({"text": text}) + "\n")
    config = base_config("tiny")
    config.run_dir, config.data.store = str(folder / "run"), str(folder / "store")
    config.data.source, config.data.packed_attention = f"jsonl:{folder}/documents.jsonl", packed_attention
    config.model.update(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        compute_dtype="float32",
        remat="none",
        init_std=0.125,
    )
    config.optimizer.update(learning_rate=2e-2, warmup_steps=20)
    config.eval_batches = 2

    def stage(length, **settings):
        length = length // 2 if cut else length
        return settings | {"data.min_length": length, "data.max_length": length}

    first, second = CONTEXTS
    config.stages = (
        stage(first, seq_len=first, batch_size=32, steps=200, mesh_dim="1,8,1,1"),
        stage(second, seq_len=second, batch_size=16, steps=40, mesh_dim="1,1,1,8")
        | {"model.rope_scaling.kind": "linear", "model.rope_scaling.factor": second / first},
    )
    stages = parse_stages(config)
    runs = prepare_stages(stages)
    train_stages(stages, runs)
    return runs[-1], restore_params(runs[-1].config.run_dir, runs[-1].program.shardings.params, runs[-1].program.mesh)


def quarters(run, params, batch):
    """The loss of each quarter of the sequence, in nats per predicted token; the batch is of numpy arrays."""
    on_devices = jax.device_put(batch, NamedSharding(run.program.mesh, BATCH))
    compute = make_logits(run.config.model, run.program.shardings.params, run.program.mesh)
    logits = np.asarray(compute(params, on_devices), np.float64)
    nats = np.log(np.exp(logits).sum(axis=-1)) - np.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
    natural = np.argsort(permutation(run.config.model.layout, run.config.seq_len, run.program.mesh.shape["sp"]))
    parts = zip(*(np.split(x[:, natural], 4, axis=1) for x in (nats, batch.mask)), strict=True)
    return [part[mask].mean() for part, mask in parts]


def twins(run, folder, packed_attention, count=16):
    """A batch of sequences of two documents each, the same half twice, packed and seen as the loader has it."""
    T, rows = run.config.seq_len, []
    for number, half in enumerate(halves(5, T // 2 - 1, count)):
        store, _ = build_stores(folder / str(number), [Document(half, "twin")] * 2, ByteTokenizer(), held_out=0)
        loader = Loader(
            store,
            batch_size=1,
            seq_len=T,
            seed=0,
            layout=run.config.model.layout,
            ring_size=run.program.mesh.shape["sp"],
            packing=PackingOptions("whole", packed_attention),
        )
        rows.append(loader.read(0))
    fields = zip(*rows, strict=True)
    return Batch(*(None if field[0] is None else np.concatenate(field) for field in fields))


@pytest.mark.slow
def test_the_first_half_is_seen_in_a_sequence_and_not_in_another_document(tmp_path):
    run, params = trained(tmp_path / "sequence", "sequence", cut=False)
    assert run.train_data.read(0).segment_ids is None
    losses = {"sequence": quarters(run, params, run.eval_data.read(0))}
    for seen in ("sequence", "document"):  # the same parameters, and each text as two documents
        losses[f"twins, {seen}"] = quarters(run, params, twins(run, tmp_path / f"twins {seen}", seen))
    other, cut_params = trained(tmp_path / "document", "document", cut=True)
    losses["cut, document"] = quarters(other, cut_params, other.eval_data.read(0))
    print({name: np.round(loss, 2).tolist() for name, loss in losses.items()})
    for name, (first, *_, last) in losses.items():
        assert last <= first / 2 if name.endswith("sequence") else last >= 0.9 * first, (name, losses)
