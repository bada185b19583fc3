"""The programs of inference, lowered for a target as a generator and its sessions run them."""

import jax

from ringformer.compiler_options import compiler_options
from ringformer.estimate.inference_workload import DECODE, FIRST_CHUNK, LOADING, PREFILL, InferenceWorkload
from ringformer.estimate.programs import WITHOUT_DEVICES, LoweredProgram
from ringformer.inference.programs import Programs, inference_config
from ringformer.inference.sampling import Kind
from ringformer.inference.weight_shares import make_reshard, parameter_dtypes
from ringformer.mesh import make_mesh
from ringformer.train.state import abstract_params, weight_shardings


def lower_inference(workload: InferenceWorkload, program: str) -> LoweredProgram:
    """`LOADING` or one of `INFERENCE` for abstract arrays on the target; tokens are drawn greedily. What lies on a
    device are its arguments and results. Raises ValueError for a mesh that cannot be."""
    workload.check()
    mesh = make_mesh(workload.mesh_dim, workload.target.devices())
    sizes, rows, options = workload.sizes, workload.batch_size, dict(compiler_options(mesh))
    programs = Programs(inference_config(workload.model, mesh, workload.chunk // sizes.ranks), mesh)
    if program == LOADING:
        params = abstract_params(weight_shardings(programs.config, mesh), mesh)
        params = jax.tree.map(lambda x, dtype: x.update(dtype=dtype), params, parameter_dtypes(programs.config))
        lowered, options = make_reshard(programs.config, mesh).lower(params), {}
    elif program == DECODE:
        lowered = programs.lower_decode(rows, sizes.capacity, sizes.read(sizes.capacity), Kind())
    elif program in (PREFILL, FIRST_CHUNK):
        top = 0 if program == FIRST_CHUNK else (workload.chunks - 1) * workload.chunk // sizes.ranks
        cached, travels = sizes.cached(programs.config, workload.chunk, top)
        lowered = programs.lower_prefill(rows, sizes.capacity, workload.chunk, cached, travels)
    else:
        raise ValueError(f"unknown program {program!r} of inference")
    return LoweredProgram(lowered, options | WITHOUT_DEVICES[workload.target.chip.kind], mesh, 0, 0)
