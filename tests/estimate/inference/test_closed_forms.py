"""What inference holds by count, by hand; and that an estimate's programs are those that a session asks for."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ringformer.estimate.closed_forms.inference import (
    cache_bytes,
    floor_seconds,
    prefill_memory,
    prefill_seconds,
    weight_bytes,
)
from ringformer.estimate.workloads.inference import InferenceWorkload
from ringformer.estimate.workloads.targets import find_target
from ringformer.inference.programs import Programs
from ringformer.inference.session import Session
from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.parallel.mesh import make_mesh

GiB = 2**30


def inference(model, target, seq_len, mesh_dim="1,1,1,-1", **more):
    return InferenceWorkload(LlamaConfig(**preset(model)), find_target(target), mesh_dim, seq_len, **more)


def test_the_cache_of_7b_at_a_million_tokens_by_hand():
    """2 x 32 layers x 2^20 tokens x 32 heads x 128 features x 2 bytes: 512 GiB, over all of (sp, tp)."""
    for mesh_dim in ("1,1,1,256", "1,1,8,32"):
        assert cache_bytes(inference("llama_7b", "v5e-256", 2**20, mesh_dim)) == 512 * GiB // 256
    assert cache_bytes(inference("llama_7b", "v5e-256", 2**20, "1,4,1,64")) == 512 * GiB // 64  # fsdp holds none
    assert cache_bytes(inference("llama_7b", "v5e-256", 2**20, "4,1,1,64", batch_size=4)) == 512 * GiB // 64
    single = inference("llama_7b", "v4-256", 2**20)
    assert cache_bytes(replace(single, model=replace(single.model, compute_dtype="float32"))) == 2 * 512 * GiB // 128
    grouped = inference("llama3_8b", "v5e-32", 2**21)  # a quarter of the heads
    assert cache_bytes(grouped) == 2 * 128 * GiB // 32
    assert cache_bytes(replace(grouped, mesh_dim="1,1,16,2")) == 2 * cache_bytes(grouped)  # 8 heads on 16 ranks


def test_the_weights_of_7b_by_hand():
    D, F, V, L = 4096, 11008, 32000, 32
    matrices, vectors = 2 * V * D + L * (4 * D * D + 3 * D * F), (2 * L + 1) * D
    alone = inference("llama_7b", "v5e-1", 4096)
    assert weight_bytes(alone) == 2 * matrices + 4 * vectors
    for mesh_dim in ("1,4,1,8", "1,1,8,4", "1,1,1,32"):
        shared = weight_bytes(inference("llama_7b", "v5e-32", 32768, mesh_dim))
        assert shared == pytest.approx(2 * matrices / 32 + 4 * vectors, rel=1e-3)


@pytest.mark.parametrize("mesh_dim", ["1,1,1,8", "1,2,2,2", "2,1,4,1"])
def test_counted_bytes_are_those_of_the_programs_arrays(mesh_dim):
    """With padding: features that no mesh divides, 2 key heads on up to 4 ranks, and a length that is rounded up."""
    config = LlamaConfig(259, 48, 100, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=12)
    mesh, rows = make_mesh(mesh_dim, jax.devices()[:8]), 2
    workload = InferenceWorkload(config, find_target("v5e-8"), mesh_dim, 1000, rows, prefill_chunk=None)
    programs = Programs(replace(config, layout=workload.layout), mesh)
    assert workload.sizes == programs.sizes(workload.seq_len, workload.prefill_chunk)

    def held(tree):
        return sum(x.sharding.shard_shape(x.shape) and x.dtype.itemsize * _size(x) for x in jax.tree.leaves(tree))

    assert weight_bytes(workload) == held(programs.weights)
    cache = programs.state(rows, workload.sizes.capacity).cache
    assert cache_bytes(workload) == held((cache.k, cache.v))


def _size(x):
    return jnp.empty(x.sharding.shard_shape(x.shape), jnp.int8).size


def test_the_floor_of_a_token():
    """2 GiB of cache, 1/256 of the matrices and all vectors, without the embedding, at 819 GB/s."""
    D, F, V, L = 4096, 11008, 32000, 32
    read = 2 * GiB + 2 * (V * D + L * (4 * D * D + 3 * D * F)) / 256 + 4 * (2 * L + 1) * D
    assert floor_seconds(inference("llama_7b", "v5e-256", 2**20)) == pytest.approx(read / 819e9, rel=1e-3)


def test_seconds_of_a_prefill_go_with_the_square():
    whole = inference("llama_7b", "v5e-256", 2**20)
    assert prefill_seconds(replace(whole, seq_len=2**21)) == pytest.approx(4 * prefill_seconds(whole), rel=0.1)
    chunked = replace(whole, prefill_chunk=2**14)
    assert prefill_seconds(chunked) > prefill_seconds(whole)


def test_chunks_save_activations_where_a_device_has_many_tokens():
    whole = inference("llama_7b", "8xH100", 2**20, "1,1,4,2")
    chunked = replace(whole, prefill_chunk=2**15)
    activations = [prefill_memory(w)["activations of a layer"] for w in (whole, chunked)]
    assert activations == [2**19 * 4096 * 2 * 8, 2**14 * 4096 * 2 * 8]
    assert sum(prefill_memory(chunked).values()) < sum(prefill_memory(whole).values())


@pytest.mark.parametrize(
    ("seq_len", "chunk", "mesh_dim", "message"),
    [
        (
            65536,
            3000,
            "1,1,1,8",
            "chunks of 3000 tokens do not work on mesh 1,1,1,8: use a multiple of 16 that divides",
        ),
        (65536, 48, "1,1,1,8", "use a multiple of 16 that divides the context of 65536"),
        (1001, None, "1,1,1,8", "chunks of 1001 tokens"),
        (65536, None, "2,1,1,4", "1 rows on a mesh with dp=2: --batch_size must be a multiple of dp"),
        (65536, None, "1,1,3,1", "needs 3 devices, there are 8"),
    ],
)
def test_what_no_session_can_have(seq_len, chunk, mesh_dim, message):
    with pytest.raises(ValueError, match=message):
        inference("llama_7b", "v5e-8", seq_len, mesh_dim, prefill_chunk=chunk).check()


@pytest.mark.parametrize(("mesh_dim", "chunk"), [("1,1,1,8", 4096), ("1,1,2,4", 1024), ("1,1,1,8", None)])
def test_the_programs_are_those_of_a_session(monkeypatch, mesh_dim, chunk):
    """A prompt that fills the context: which programs the session asks for, without running any."""
    asked, length = [], 16384
    config = LlamaConfig(**preset("tiny") | {"num_kv_heads": 2})
    workload = InferenceWorkload(config, find_target("v5e-8"), mesh_dim, length, prefill_chunk=chunk)
    programs = Programs(replace(config, layout=workload.layout), make_mesh(mesh_dim, jax.devices()[:8]))

    def prefill(self, rows, slots, tokens, reads, *_):
        asked.append((slots, tokens, reads))
        return lambda weights, state, chunk: (state,)

    monkeypatch.setattr(Programs, "prefill", prefill)
    session = Session(programs, None, 1, programs.sizes(length, chunk))
    session.append([[1] * length])
    assert len(asked) == workload.chunks
    sizes = workload.sizes
    for number, (slots, tokens, reads) in enumerate(asked):
        assert (slots, tokens) == (sizes.capacity, workload.chunk)
        top = number * workload.chunk // sizes.ranks
        assert reads == sizes.reads(config, workload.chunk, top)
        assert workload.attended_slots(number) == top and (not reads or reads.slots >= top)
    assert sizes.read(session._slots.top) == sizes.capacity  # what a decode step reads then
