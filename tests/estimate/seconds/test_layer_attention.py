"""The parts of a step as they are lowered, without a compiler's verdict on them."""

from dataclasses import replace

import pytest

from ringformer.estimate.workloads.programs import lower_attention
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import Workload
from tests.estimate.test_programs import MODEL
from tests.hlo import on_tpu


@on_tpu
@pytest.mark.parametrize(
    ("mesh_dim", "kv_heads", "groups", "local"),
    [("1,1,1,4", 2, 2, "4x128"), ("1,1,2,2", 2, 1, "4x128"), ("1,1,4,1", 2, 1, "2x128"), ("1,2,1,2", 2, 1, "8x128")],
)
def test_a_device_has_the_heads_that_the_step_computes_at_once(mesh_dim, kv_heads, groups, local):
    """Also with fewer key heads than tp ranks, of which each reads one."""
    model = replace(MODEL, num_kv_heads=kv_heads, head_groups=groups)
    fsdp, sp = (int(mesh_dim.split(",")[axis]) for axis in (1, 3))
    part = lower_attention(Workload(model, find_target("v5e:2x2"), mesh_dim, sp * 256, batch_size=fsdp))
    assert f"tensor<1x256x{local}xbf16>" in part.lowered.as_text()


@on_tpu
@pytest.mark.parametrize(
    ("attention", "mesh_dim", "hops"), [("ring", "1,1,1,4", True), ("blockwise", "1,4,1,1", False)]
)
def test_only_a_ring_has_hops(attention, mesh_dim, hops):
    model = replace(MODEL, attention=attention)
    part = lower_attention(Workload(model, find_target("v5e:2x2"), mesh_dim, 1024, batch_size=4))
    assert ("collective_permute" in part.lowered.as_text()) == hops
