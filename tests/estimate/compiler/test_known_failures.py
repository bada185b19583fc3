"""What a compiler dies of is refused by name, and nothing beside it."""

from dataclasses import replace

import pytest

from ringformer.estimate.compiled.dump import CompilerFailure
from ringformer.estimate.compiler import process as compiler_process
from ringformer.estimate.compiler.known_failures import known_failure
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.workloads import targets
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import Workload
from ringformer.models.families.llama import LlamaConfig, preset
from tests.hlo import on_tpu

MODEL = LlamaConfig(**preset("llama3_8b") | {"head_groups": 4, "remat_group": 4, "offload": True})
CHOKING = Workload(MODEL, find_target("v5p-128"), "1,1,1,64", 2**25)


def test_a_transfer_of_four_gibibytes_to_the_host_is_refused():
    """T/64 x 4096 of bf16; in microbatches, on twice the devices, in device memory, or on GPUs there is none."""
    assert "bf16[524288,4096] on each device, has 4.00 GiB" in known_failure(CHOKING)
    assert "f32[262144,4096]" in known_failure(
        replace(CHOKING, model=replace(MODEL, compute_dtype="float32"), seq_len=2**24)
    )
    for possible in (
        replace(CHOKING, seq_len=2**24),
        replace(CHOKING, target=find_target("v5p-256"), mesh_dim="1,1,1,128"),
        replace(CHOKING, batch_size=2, accumulate=2, seq_len=2**24),
        replace(CHOKING, model=replace(MODEL, offload=False)),
        replace(CHOKING, target=find_target("64xH100")),
    ):
        assert known_failure(possible) == ""


def test_it_is_refused_before_anything_is_compiled(monkeypatch):
    monkeypatch.setattr(targets, "_installed", lambda module: True)
    monkeypatch.setattr(compiler_process, "at_work", lambda *args, **options: pytest.fail("it was compiled"))
    with pytest.raises(CompilerFailure, match="train step: the offloaded input of a layer"):
        compile_apart(CHOKING)


@pytest.mark.slow
@on_tpu
def test_the_compiler_still_dies_of_it(monkeypatch):
    """A minute. It has scheduled the program before: asked for no more, it answers. If this fails because it lives, the
    limit can go."""
    monkeypatch.setattr(compiler_process, "known_failure", lambda workload: "")
    e = compile_apart(CHOKING)
    assert e.fits and not e.generated_code and e.host_bytes == 8 * 2**32
    with pytest.raises(CompilerFailure, match=r"train step: the compiler died \(SIGABRT\): llo_loop.cc"):
        compile_apart(CHOKING, generate_code=True)
