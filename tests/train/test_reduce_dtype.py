"""Sums of gradients over copies of the model (dp) in bfloat16: `optimizer.reduce_dtype`."""

import re
from dataclasses import replace

import jax
import pytest

from ringformer.estimate.choices.candidates import parts_in_host
from ringformer.estimate.closed_forms.communication import exposed_seconds
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import preset_workload
from ringformer.parallel.mesh import make_mesh
from ringformer.runs.config import OptimizerConfig, check_offload
from ringformer.train.program import make_program
from tests.helpers import relative_error
from tests.train.test_step import CONFIG, T
from tests.train.updates import batch_on, same_bits, trained

NARROW = {"reduce_dtype": "bfloat16"}


def sums_over_dp(mesh_dim: str, reduce_dtype: str) -> list[str]:
    """Return the dtypes that a step sums over dp alone, by the traced program."""
    mesh = make_mesh(mesh_dim, jax.devices())
    optimizer = OptimizerConfig(reduce_dtype=reduce_dtype)
    program = make_program(CONFIG, mesh, optimizer, steps=40, seq_len=T)
    text = str(program.step.trace(program.state, *batch_on(program)).jaxpr)
    return re.findall(r":(f32|bf16)\[[\d,]*\]\S* = psum_invariant\[\s*axes=\('dp',\)", text)


def test_gradients_are_summed_over_dp_in_the_dtype():
    """Those of all parameters; the control sums none in bfloat16."""
    parameters = len(
        jax.tree.leaves(make_program(CONFIG, make_mesh("2,2,1,2"), OptimizerConfig(), steps=9, seq_len=T).state.params)
    )
    assert sums_over_dp("2,2,1,2", "bfloat16").count("bf16") == parameters
    assert "bf16" not in sums_over_dp("2,2,1,2", "float32")


@pytest.mark.slow
@pytest.mark.parametrize("mesh_dim", ["2,1,1,4", "4,1,1,2"])
def test_a_run_is_near_that_of_float32_sums(mesh_dim):
    """Each gradient is rounded once for each copy. Without dp nothing is rounded."""
    _, expected, losses = trained(mesh_dim, "none", steps=3)
    _, found, narrow = trained(mesh_dim, "none", steps=3, **NARROW)
    error = max(jax.tree.leaves(jax.tree.map(relative_error, found.params, expected.params)))
    assert 1e-6 < error < 2e-2 and narrow == pytest.approx(losses, rel=2e-3)


@pytest.mark.slow
def test_without_copies_nothing_changes():
    _, expected, _ = trained("1,2,1,4", "none", steps=1)
    _, found, _ = trained("1,2,1,4", "none", steps=1, **NARROW)
    assert same_bits(found.params, expected.params)


def test_half_of_the_bytes_cross():
    workload = preset_workload("llama3_8b", find_target("2xv5p-128"), 2**16)
    narrow = replace(workload, optimizer=OptimizerConfig(reduce_dtype="bfloat16"))
    wide = replace(workload, optimizer=OptimizerConfig(params_dtype="bfloat16"))
    seconds = exposed_seconds(workload)["slices"]
    assert exposed_seconds(narrow)["slices"] == pytest.approx(seconds / 2)
    assert exposed_seconds(wide)["slices"] == pytest.approx(seconds), "gradients of narrow weights are float32"


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"unknown optimizer\.reduce_dtype .float16.; choose float32 or bfloat16"):
        OptimizerConfig(reduce_dtype="float16")
    with pytest.raises(ValueError, match=r"optimizer\.offload=all: .* reduce_dtype=bfloat16. Choose"):
        check_offload(OptimizerConfig(reduce_dtype="bfloat16", offload="all"), CONFIG, 1)
    workload = preset_workload("llama3_8b", find_target("8xH100"), 2**16)
    narrow = replace(workload, optimizer=OptimizerConfig(reduce_dtype="bfloat16"))
    assert parts_in_host(workload) == ("moments", "state", "all") and parts_in_host(narrow) == ("moments", "state")
