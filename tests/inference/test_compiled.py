"""What compilers make of decode steps and prefills: what they move between devices, keep, read and compute.

Compiled on a CPU host for v5e and H100; nothing here runs on them.
"""

import math
from dataclasses import replace
from functools import lru_cache

import jax
import pytest

from ringformer.estimate.compiled.program_text import Program
from ringformer.estimate.seconds.memory_traffic import hbm_bytes
from ringformer.estimate.workloads.programs import WITHOUT_DEVICES
from ringformer.estimate.workloads.targets import find_target
from ringformer.inference.cache.chunk_attention import Reads
from ringformer.inference.inference_config import inference_config
from ringformer.inference.programs import Programs
from ringformer.inference.sampling import Kind
from ringformer.models.families.llama import LlamaConfig
from ringformer.parallel.compiler_options import compiler_options
from ringformer.parallel.mesh import make_mesh
from tests.hlo import executed_collectives, on_cuda, on_tpu

B, H, K, d, L = 4, 16, 8, 128, 3
CONFIG = LlamaConfig(
    vocab_size=4096, hidden_size=1024, intermediate_size=2048, num_layers=L, num_heads=H, num_kv_heads=K, head_dim=d
)
CONTEXT = 32768


@lru_cache
def decode_step(mesh_dim, context=CONTEXT):
    """Compiled, and its text parsed."""
    devices = list(find_target("v5e:4x2").devices())[: math.prod(map(int, mesh_dim.split(",")))]
    mesh = make_mesh(mesh_dim, devices)
    slots = context // mesh.shape["sp"]
    compiled = Programs(inference_config(CONFIG, mesh, slots)[0], mesh).decode(B, slots, slots, Kind())
    return compiled, Program.parse(compiled.as_text())


MESHES = ["1,1,1,8", "1,2,2,2"]


def key_bytes(mesh_dim):
    """Of the keys of one layer on a device, in bfloat16."""
    _, _, tp, sp = map(int, mesh_dim.split(","))
    return B * K * CONTEXT * d * 2 // (tp * sp)


@pytest.mark.usual("1,2,2,2")
@on_tpu
@pytest.mark.parametrize("mesh_dim", MESHES)
def test_nothing_as_large_as_a_layer_of_the_cache_is_made(mesh_dim):
    """The cache stays where it lies, and of a layer of it no copy and no slice exists: not a third of its keys."""
    memory = decode_step(mesh_dim)[0].memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * L * key_bytes(mesh_dim)
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 2**16
    assert memory.temp_size_in_bytes < key_bytes(mesh_dim) / 3


@on_tpu
@pytest.mark.parametrize("mesh_dim", MESHES)
def test_what_travels(mesh_dim):
    """A layer: columns of q, k, v, one maximum and one sum of the attention, two sums of the residual stream. Beside
    the layers one sum for the embedding, the logits and the tokens. No weight, and nothing that knows the context."""
    tp = int(mesh_dim.split(",")[2])
    found = executed_collectives(decode_step(mesh_dim)[1])
    size = {x: math.prod(x.shape) for x in found}
    gathered = {x: n for x, n in found.items() if x.kind == "all-gather"}
    summed = {x: n for x, n in found.items() if x.kind == "all-reduce"}
    assert {x.kind for x in found} == {"all-gather", "all-reduce"}

    assert sorted((size[x], n) for x, n in gathered.items()) == sorted(
        [(B * (H + 2 * K) * d // tp, L), (B * CONFIG.vocab_size, 1)]
    )
    heads = B * H // tp
    by_size = dict.fromkeys((size[x] for x in summed), 0)
    for x, n in summed.items():
        by_size[size[x]] += n
    assert by_size == {heads: L, heads * (d + 1): L, B * CONFIG.hidden_size: 2 * L + 1}
    merge = sum(4 * n * size[x] for x, n in summed.items() if size[x] in (heads, heads * (d + 1)))
    assert merge <= L * B * H * (d + 2) * 8


@on_tpu
def test_collectives_do_not_grow_with_the_context():
    longer = decode_step("1,1,1,8", 2 * CONTEXT)[1]
    assert executed_collectives(longer) == executed_collectives(decode_step("1,1,1,8")[1])


@on_tpu
@pytest.mark.parametrize("mesh_dim", MESHES)
def test_work_is_shared_out(mesh_dim):
    """Matrix FLOPs and bytes of HBM, executed: those of one device over the ring. fsdp shares weights and no cache."""
    _, fsdp, tp, sp = map(int, mesh_dim.split(","))
    alone, shared = (work(decode_step(mesh)[1]) for mesh in ("1,1,1,1", mesh_dim))
    attention = 4 * B * L * H * CONTEXT * d, 2 * L * B * K * CONTEXT * d * 2
    for found, whole, of_attention in zip(shared, alone, attention, strict=True):
        assert whole > of_attention
        expected = of_attention / (tp * sp) + (whole - of_attention) / (fsdp * tp * sp)
        assert expected <= found * 1.01 and found <= 1.05 * expected


def work(program: Program) -> tuple[float, float]:
    """(FLOPs, bytes to and from HBM) of one run."""
    moved = sum(
        times * hbm_bytes(program, name, instruction)
        for name, times in program.executed.items()
        for instruction in program.computations[name].values()
    )
    return program.flops(program.entry), moved


# --- GPUs ---------------------------------------------------------------------------------------------------------


GPU_MESH = "1,1,2,4"


def on_h100(lower, key_heads=H):
    """A program on eight H100, compiled."""
    mesh = make_mesh(GPU_MESH, list(find_target("8xH100").devices()))
    config = inference_config(replace(CONFIG, num_kv_heads=key_heads, kernel="auto"), mesh, 1024)[0]
    options = dict(compiler_options(mesh)) | WITHOUT_DEVICES["gpu"]
    return lower(Programs(config, mesh)).compile(compiler_options=options)


GPU_SLOTS = CONTEXT // 4
GPU_KEYS = H // 2 * GPU_SLOTS * d * 2
"""Bytes of the keys of a layer on a device."""


@on_cuda
def test_a_gpu_reads_the_cache_once_where_it_lies():
    """The bytes of a decode step are those of cache and weights, and 10%; no copy as large as a layer's keys exists."""
    compiled = on_h100(lambda programs: programs.lower_decode(1, GPU_SLOTS, GPU_SLOTS, Kind()))
    moved, memory = work(Program.parse(compiled.as_text()))[1], compiled.memory_analysis()
    assert memory.temp_size_in_bytes < GPU_KEYS / 2
    weights = memory.argument_size_in_bytes - memory.alias_size_in_bytes
    assert 2 * L * GPU_KEYS < moved < 1.1 * (2 * L * GPU_KEYS + weights)


@on_cuda
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA copies the operands of products before JAX 0.11")
@pytest.mark.parametrize(
    ("key_heads", "rows", "slots", "shared", "most"),
    [(H // 4, 1, GPU_SLOTS, 0, 1.4), (H, 4, 256, GPU_SLOTS, 1.6)],
    ids=["grouped heads", "a shared document"],
)
def test_a_gpu_multiplies_with_keys_where_they_lie(key_heads, rows, slots, shared, most):
    """A decode step moves the bytes of cache and weights, and 0.4 times as many of logits and sums, 0.6 for four rows.
    With a copy of each layer it would move more than 2.5 times as many."""
    compiled = on_h100(lambda programs: programs.lower_decode(rows, slots, slots, Kind(), shared), key_heads)
    moved, memory = work(Program.parse(compiled.as_text()))[1], compiled.memory_analysis()
    keys = L * key_heads // 2 * (rows * slots + shared) * d * 2
    assert 2 * keys < moved < most * memory.argument_size_in_bytes


@on_cuda
def test_a_gpu_prefills_with_cudnn_and_copies_no_layer():
    """Whole pieces are calls of cuDNN without a mask, and no array is as large as a layer's keys."""
    reads = Reads(GPU_SLOTS, GPU_SLOTS // 8, "queries")
    compiled = on_h100(lambda programs: programs.lower_prefill(1, GPU_SLOTS, 1024, reads))
    text = compiled.as_text()
    assert text.count('"mask_type":"NO_MASK"') >= 1 and "__cudnn$fmhaSoftmax" in text
    made = Program.parse(text).computations.values()
    largest = max(
        array.bytes
        for instructions in made
        for instruction in instructions.values()
        if instruction.opcode in ("fusion", "copy", "transpose", "dynamic-slice")
        for array in instruction.arrays
        if array.bytes < L * GPU_KEYS  # the cache itself, updated in place
    )
    assert largest < GPU_KEYS / 2
