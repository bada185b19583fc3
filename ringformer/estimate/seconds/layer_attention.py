"""Parts of a train step lowered alone, so that their machine code is available in a fraction of the step's time.

For the same arrays in the same memories, the compiler generates the same instructions for a part as for the step. An
instruction that differs from the step's has a different key (`kernel_keys.py`) and does not count.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringformer.estimate.programs import LoweredProgram
from ringformer.estimate.workload import Workload
from ringformer.ops.ring_attention import ring_attention
from ringformer.parallel.mesh import compiler_options, make_mesh

ATTENTION = "attention of a layer"


def lower_attention(workload: Workload) -> LoweredProgram:
    """Lower the forward and backward pass of one layer's attention, over a ring or on one device, for the heads that
    the step computes at once."""
    model, mesh = workload.model, make_mesh(workload.mesh_dim, workload.target.devices())
    dtype, spec = jnp.dtype(model.compute_dtype), P(("dp", "fsdp"), "sp", "tp")
    ring = model.attention == "ring"  # otherwise every device has all keys, as in the model
    attend = partial(
        ring_attention,
        axis_name="sp" if ring else None,
        layout=model.layout if ring else "contiguous",
        q_chunk=model.q_chunk,
        k_chunk=model.k_chunk,
        kernel=model.kernel,
    )

    def array(heads):
        shape = workload.batch_size // workload.accumulate, workload.seq_len, heads, model.head_dim
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def both(q, k, v, segment_ids, do):
        o, backward = jax.vjp(lambda q, k, v: attend(q, k, v, segment_ids=segment_ids), q, k, v)
        return o, backward(do)

    key_heads = max(model.num_kv_heads, mesh.shape["tp"])  # with fewer heads than tp ranks, each rank reads one
    q, k = array(model.num_heads // model.head_groups), array(key_heads // model.head_groups)
    ids_spec = P(("dp", "fsdp"), "sp")
    ids = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32, sharding=NamedSharding(mesh, ids_spec))
    sharded = jax.shard_map(both, mesh=mesh, in_specs=(spec, spec, spec, ids_spec, spec), out_specs=(spec, (spec,) * 3))
    return LoweredProgram(jax.jit(sharded).lower(q, k, k, ids, q), dict(compiler_options(mesh)), mesh, 0, 0)
