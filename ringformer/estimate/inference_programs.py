"""The programs of inference, lowered for a target as a session runs them."""

from ringformer.compiler_options import compiler_options
from ringformer.estimate.inference_workload import DECODE, FIRST_CHUNK, PREFILL, InferenceWorkload
from ringformer.estimate.programs import WITHOUT_DEVICES, LoweredProgram
from ringformer.inference.programs import Programs, inference_config
from ringformer.inference.sampling import Kind
from ringformer.mesh import make_mesh


def lower_inference(workload: InferenceWorkload, program: str) -> LoweredProgram:
    """One of `INFERENCE` for abstract arrays on the target; tokens are drawn greedily. Weights, cache and logits are
    its arguments, and nothing else lies on a device. Raises ValueError for a mesh that cannot be."""
    workload.check()
    mesh = make_mesh(workload.mesh_dim, workload.target.devices())
    sizes, rows = workload.sizes, workload.batch_size
    programs = Programs(inference_config(workload.model, mesh, workload.chunk // sizes.ranks), mesh)
    if program == DECODE:
        lowered = programs.lower_decode(rows, sizes.capacity, sizes.read(sizes.capacity), Kind())
    elif program in (PREFILL, FIRST_CHUNK):
        number = 0 if program == FIRST_CHUNK else workload.chunks - 1
        top = number * workload.chunk // sizes.ranks
        cached, travels = sizes.cached(programs.config, workload.chunk, top)
        lowered = programs.lower_prefill(rows, sizes.capacity, workload.chunk, cached, travels)
    else:
        raise ValueError(f"unknown program {program!r} of inference")
    options = dict(compiler_options(mesh)) | WITHOUT_DEVICES[workload.target.chip.kind]
    return LoweredProgram(lowered, options, mesh, 0, 0)
