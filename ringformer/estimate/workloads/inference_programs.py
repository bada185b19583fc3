"""Programs of inference, lowered for a target in the form in which a generator and its sessions run them."""

import jax
from jax.sharding import Mesh

from ringformer.estimate.workloads.inference import DECODE, FIRST_CHUNK, LOADING, PREFILL, InferenceWorkload
from ringformer.estimate.workloads.programs import WITHOUT_DEVICES, LoweredProgram
from ringformer.inference.inference_config import inference_config
from ringformer.inference.programs import Programs
from ringformer.inference.sampling import Kind
from ringformer.inference.weight_shares import make_reshard, weight_shares
from ringformer.models.decoder_config import DecoderConfig
from ringformer.parallel.compiler_options import compiler_options
from ringformer.parallel.parameters import abstract_params, weight_shardings


def lower_inference(workload: InferenceWorkload, program: str) -> LoweredProgram:
    """Lower `LOADING` or one of `INFERENCE` for abstract arrays on the target, with greedy decoding. While such a
    program runs, a device holds only its arguments and results besides. Raises ValueError for an invalid mesh."""
    workload.check()
    mesh = workload.mesh()
    sizes = workload.sizes
    rows = workload.batch_size
    options = dict(compiler_options(mesh))
    programs = Programs(
        inference_config(workload.model, mesh, workload.chunk // sizes.ranks)[0], mesh, workload.cache_dtype
    )
    if program == LOADING:
        lowered = _lower_loading(programs.config, mesh)
        options = {}
    elif program == DECODE:
        lowered = programs.lower_decode(rows, sizes.capacity, sizes.read(sizes.capacity), Kind())
    elif program in (PREFILL, FIRST_CHUNK):
        top = 0 if program == FIRST_CHUNK else (workload.chunks - 1) * workload.chunk // sizes.ranks
        reads = sizes.reads(programs.config, workload.chunk, top)
        reads = reads and reads._replace(slots=top)  # so that the loop over pieces is charged for those that it runs
        lowered = programs.lower_prefill(rows, sizes.capacity, workload.chunk, reads)
    else:
        raise ValueError(f"unknown program {program!r} of inference")
    return LoweredProgram(lowered, options | WITHOUT_DEVICES[workload.target.chip.kind], mesh)


def _lower_loading(config: DecoderConfig, mesh: Mesh) -> jax.stages.Lowered:
    """Lower the conversion of the largest parameter from shards to shares, as it runs when all other parameters are
    loaded."""
    shardings = weight_shardings(config, mesh)
    shares = weight_shares(config, mesh)
    params = jax.tree.map(lambda x, share: x.update(dtype=share.dtype), abstract_params(shardings, mesh), shares)
    leaves = zip(*map(jax.tree.leaves, (params, shardings, shares)), strict=True)
    (x, shard, share), *others = sorted(leaves, key=lambda leaf: leaf[0].size, reverse=True)
    reshard = make_reshard(shard, share, mesh)
    return jax.jit(lambda x, _others: reshard(x), keep_unused=True).lower(x, [other for other, *_ in others])
