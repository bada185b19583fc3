"""What `kernel="auto"` stands for on each chip, and the chunks that come with it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ringformer.hardware import CHIPS
from ringformer.models import kernel_choice
from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.models.kernel_choice import with_kernel

AUTO = LlamaConfig(**preset("llama_7b") | {"kernel": "auto"})
LONG = 2**15


@pytest.fixture(autouse=True)
def tuned(monkeypatch):
    """A table of v5e alone, for heads of at most 128 features."""
    sizes = {"v5e": (2048, 1024)}
    monkeypatch.setattr(kernel_choice, "chunk_sizes", lambda chip, d: sizes.get(chip) if d <= 128 else None)


def choose(change, platform, chip, local=LONG, masks=False, ring_size=1):
    model, why = with_kernel(replace(AUTO, **change), platform, CHIPS.get(chip), local, masks, ring_size)
    return (model.kernel, model.q_chunk, model.k_chunk), why


@pytest.mark.parametrize(
    ("change", "platform", "chip", "kernel", "why"),
    [
        ({}, "tpu", "v5e", "pallas", "chunks of 2048 queries and 1024 keys, tuned for v5e"),
        ({}, "tpu", "v6e", "pallas", "chunks of 1024 queries and 1024 keys, not tuned"),
        ({}, "tpu", "v3", "xla", "kernel='pallas' needs Mosaic, which cannot compile it for TPU v3 core"),
        ({}, "tpu", "tpu7x", "xla", "was not judged on tpu7x with heads of 128"),
        ({"head_dim": 256}, "tpu", "v5e", "xla", "was not judged on v5e with heads of 256"),
        ({"compute_dtype": "float32"}, "tpu", "v5e", "xla", "judged in bfloat16, not in float32"),
        ({}, "gpu", "H100", "cudnn", "the fastest on H100"),
        ({"head_dim": 100}, "gpu", "H100", "xla", "multiples of 8"),
        ({"head_dim": 256}, "gpu", "A100-80", "xla", "at most 128 on GPUs of compute capability 8"),
        ({"compute_dtype": "float32"}, "gpu", "H100", "xla", "computes bfloat16 and float16"),
        ({}, "cpu", None, "xla", "none for cpu"),
    ],
)
def test_auto_is_the_fastest_that_can_and_says_why(change, platform, chip, kernel, why):
    (chosen, *_), line = choose(change, platform, chip)
    assert chosen == kernel and line.startswith(f"kernel {kernel}: ") and why in line


def test_what_auto_would_be_is_said_of_xla():
    """The default, which nobody may have thought about."""
    assert choose({"kernel": "xla"}, "tpu", "v5e")[1] == "kernel xla: as configured; auto would be pallas"
    assert choose({"kernel": "xla"}, "tpu", "v3")[1] == "kernel xla: as configured"


def test_auto_takes_packed_documents_on_gpus():
    """But for shards that are no intervals of the sequence."""
    (chosen, *_), line = choose({}, "gpu", "H100", masks=True)
    assert chosen == "cudnn" and "the fastest on H100" in line
    (chosen, *_), line = choose({"layout": "striped"}, "gpu", "H100", masks=True)
    assert chosen == "xla" and "layout='zigzag' balances causal work too" in line


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ring": "both_ways", "num_kv_heads": 1}, "a device has 1; kernel='xla' can cut the tokens instead"),
        ({"ring": "both_ways", "num_kv_heads": 8, "head_groups": 8}, "a device has 1; kernel='xla' can"),
        ({"window": 2**14 + 2}, "kernel='cudnn' takes windows that reach no further than the part before, here"),
    ],
)
def test_auto_leaves_what_cudnn_refuses(change, why):
    """And a config that names cuDNN is told before anything compiles."""
    (chosen, *_), line = choose(change, "gpu", "H100", ring_size=8)
    assert chosen == "xla" and why in line
    with pytest.raises(ValueError, match=re.escape(why)):
        choose(change | {"kernel": "cudnn"}, "gpu", "H100", ring_size=8)
    assert choose(change | {"ring": "one_way", "window": 0}, "gpu", "H100", ring_size=8)[0][0] == "cudnn"


def test_cudnn_computes_windows_without_documents():
    """A model that has nothing but windows leaves cuDNN if there are documents, too."""
    assert choose({"window": 4096}, "gpu", "H100", ring_size=8)[0][0] == "cudnn"
    (chosen, *_), line = choose({"window": 4096}, "gpu", "H100", masks=True, ring_size=8)
    assert chosen == "xla" and "a window (window=4096) only without segment ids" in line


def test_chunks_of_a_window_are_a_quarter_of_it():
    assert choose({"window": 4096}, "tpu", "v5e", ring_size=8)[0][1:] == (1024, 1024)
    assert choose({"window": 1024}, "tpu", "v5e", ring_size=8)[0][1:] == (512, 512)
    assert choose({"window": 2**16}, "tpu", "v5e", ring_size=8)[0][1:] == (2048, 1024)


@pytest.mark.parametrize(
    ("change", "local", "chunks"),
    [
        ({}, LONG, (2048, 1024)),
        ({"num_kv_heads": 8}, LONG, (2048, 1024)),  # four heads share a chunk of keys
        ({"num_kv_heads": 2}, LONG, (2048, 1024)),  # sixteen: 89 of 128 MiB of VMEM
        ({"num_kv_heads": 1}, LONG, (1024, 1024)),  # thirty-two, of which 2048 queries need twice as much
        ({}, 2**13, (1024, 1024)),  # at most an eighth of a shard
        ({}, 2**10, (512, 512)),
        ({"q_chunk": 384}, LONG, (384, None)),  # what a config names stays
    ],
)
def test_chunks_are_those_tuned_for_the_chip(change, local, chunks):
    for kernel in ("auto", "pallas"):
        assert choose(change | {"kernel": kernel}, "tpu", "v5e", local)[0][1:] == chunks


@pytest.mark.parametrize(
    ("local", "ring_size", "layout", "chunks"),
    [
        (2**12, 1, "zigzag", (512, 512)),  # an eighth of the sequence
        (2**12, 2, "zigzag", (1024, 1024)),
        (2**12, 64, "zigzag", (2048, 1024)),  # a part of the shard
        (2**11, 64, "zigzag", (1024, 1024)),
        (2**11, 64, "contiguous", (2048, 1024)),
        (2**10, 64, "zigzag", (512, 512)),
    ],
)
def test_chunks_waste_at_most_an_eighth_of_a_sequence(local, ring_size, layout, chunks):
    assert choose({"layout": layout}, "tpu", "v5e", local, ring_size=ring_size)[0][1:] == chunks


def test_v4_has_little_vmem_for_heads_that_share_keys():
    """First fewer queries, then fewer keys, then no kernel."""
    assert choose({}, "tpu", "v4")[0] == ("pallas", 1024, 1024)
    assert choose({"num_kv_heads": 8}, "tpu", "v4")[0] == ("pallas", 512, 1024)
    assert choose({"num_kv_heads": 2}, "tpu", "v4")[0] == ("pallas", 256, 512)
    (kernel, *_), why = choose({"num_kv_heads": 1}, "tpu", "v4")
    assert kernel == "xla" and "does not fit 16 MiB of on-chip memory with 32 query heads a key head of 128" in why
    with pytest.raises(ValueError, match="kernel='xla' does"):
        choose({"num_kv_heads": 1, "kernel": "pallas"}, "tpu", "v4")


def test_narrow_heads_take_the_lanes_of_128():
    """Their arrays are padded on the chip: no more queries fit than of heads of 128."""
    wide, narrow = (choose({"num_kv_heads": 8, "head_dim": d}, "tpu", "v4")[0] for d in (128, 64))
    assert wide == narrow == ("pallas", 512, 1024)


def test_float32_takes_twice_the_memory():
    half, whole = (
        choose({"kernel": "pallas", "num_kv_heads": 8, "compute_dtype": d}, "tpu", "v4")[0]
        for d in ("bfloat16", "float32")
    )
    assert half == ("pallas", 512, 1024) and whole == ("pallas", 256, 1024)


def test_a_kernel_that_was_asked_for_stays_or_is_an_error():
    assert choose({"kernel": "xla"}, "tpu", "v5e")[0] == ("xla", None, None)
    chosen, why = choose({"kernel": "pallas"}, "tpu", "tpu7x")
    assert chosen == ("pallas", 1024, 1024) and "as configured; chunks of" in why
    with pytest.raises(ValueError, match="cannot compile it for TPU v3 core; kernel='xla' runs there"):
        choose({"kernel": "pallas"}, "tpu", "v3")
    with pytest.raises(ValueError, match="layout='zigzag' balances"):
        choose({"kernel": "cudnn", "layout": "striped"}, "gpu", "H100", masks=True)
    with pytest.raises(ValueError, match="unknown kernel 'triton'; known: auto, xla, pallas, cudnn"):
        replace(AUTO, kernel="triton")


def test_the_judged_are_those_of_the_committed_counts():
    results = Path(__file__).parents[2] / "results" / "kernel_cycles.json"
    assert set(kernel_choice.JUDGED) == set(json.loads(results.read_text())["targets"])


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "q_chunk"), [(128, 16, 1024), (256, 32, 1024), (256, 16, 512), (200, 16, 512)]
)
def test_v4_takes_fewer_queries_of_large_heads_that_share_keys(head_dim, kv_heads, q_chunk, monkeypatch):
    """Its VMEM holds no more: 1024 queries of two heads of 256 need 17 of 16 MiB, compiled."""
    monkeypatch.setattr(kernel_choice, "chunk_sizes", lambda chip, d: (1024, 512))
    assert choose({"head_dim": head_dim, "num_kv_heads": kv_heads}, "tpu", "v4")[0] == ("pallas", q_chunk, 512)


def test_chunks_on_cpus_are_small():
    """256 at most, unless the model sets some; what has smaller chunks by default keeps them."""
    assert choose({}, "cpu", None)[0] == ("xla", 256, 256)
    assert "; chunks of 256 queries and keys, the fastest on CPUs" in choose({}, "cpu", None)[1]
    assert choose({}, "cpu", None, local=4096)[0] == ("xla", None, None)
    assert choose({"q_chunk": 512}, "cpu", None)[0] == ("xla", 512, None)
    assert choose({"kernel": "xla"}, "gpu", "H100")[0] == ("xla", None, None)
