"""Seconds by the machine code of a layer's attention, by the real compiler."""

import json
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from ringformer.estimate.compiled.dump import CompilerFailure
from ringformer.estimate.compiled.program_text import Program
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.kernels import kernel_cycles
from ringformer.estimate.kernels.kernel_cycles import KernelCache, kernel_keys, with_machine_code
from ringformer.estimate.seconds.kernel_keys import KernelKeys
from ringformer.estimate.seconds.program_seconds import of_chunk_pairs, purpose
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import Workload
from tests.estimate.test_programs import MHA
from tests.hlo import on_tpu

SMALL = replace(MHA, q_chunk=256, k_chunk=256)


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def workload(target="v5e:2x2"):
    return Workload(SMALL, find_target(target), "1,1,1,4", 4 * 2048)


@lru_cache
def scheduled():
    return compile_apart(workload())


def test_what_has_no_schedule_stays_as_it_is():
    estimate: Any = SimpleNamespace(schedule=None)
    log: list[str] = []
    assert with_machine_code(workload(), estimate, log.append) is estimate and not log


@pytest.mark.slow
@on_tpu
def test_the_part_has_the_instructions_of_the_step_and_their_seconds(monkeypatch):
    """Products of the ring's loops whose code is dumped (of equal ones the first), some of each purpose of attention,
    take at least as long as their FLOPs at the units' full rate, and less than ten times that. What is known once is
    not generated again."""
    w, said, assumed = workload(), [], scheduled()
    counted = with_machine_code(w, assumed, said.append)
    assert said == ["generating the machine code of a layer's attention, for its cycles; about a minute, once"]
    before, after = (
        sum(s.counted for k, s in e.schedule.purposes.items() if k.startswith("attention"))
        / sum(s.overlapped for k, s in e.schedule.purposes.items() if k.startswith("attention"))
        for e in (assumed, counted)
    )
    assert before < 0.5 and after > 0.8
    assert replace(counted, schedule=assumed.schedule) == assumed

    cycles, program, cores = KernelCache.of(w.target).read(), Program.parse(assumed.text), w.target.chip.tensor_cores
    products = {}
    for name in program.executed:
        for instruction in program.computations[name].values():
            flops = program.instruction_flops(name, instruction) if instruction.opcode == "fusion" else 0
            known = cycles.get(KernelKeys(program).key(name, instruction))
            if flops and known and of_chunk_pairs(instruction):
                ideal = flops / cores.count / cores.matrix_flops_per_cycle
                products[purpose(instruction), instruction.name] = known / ideal
    attention = {name for name in counted.schedule.purposes if name.startswith("attention")}
    # 0.12 makes one product less, and those of the backward are no fusions whose code is dumped under their own name.
    old = jax.__version_info__ < (0, 12)
    assert {name for name, _ in products} == attention - (set() if old else {"attention backward"})
    assert len(products) >= (5 if old else 4)
    assert all(1 < share < 10 for share in products.values())

    monkeypatch.setattr(kernel_cycles, "at_work", lambda *_, **__: pytest.fail("it is in the cache"))
    assert with_machine_code(w, assumed, said.append).schedule == counted.schedule and len(said) == 1

    some_sum = next(key for key, multiplies in kernel_keys(program, of_chunk_pairs).items() if not multiplies)
    known = KernelCache.of(w.target).path
    known.write_text(json.dumps({key: value for key, value in cycles.items() if key != some_sum}))
    assert with_machine_code(w, assumed, said.append).schedule.seconds.counted > 0 and len(said) == 1


@pytest.mark.slow
@on_tpu
def test_a_step_compiled_to_machine_code_has_its_own_seconds_and_those_of_the_part_beside_them():
    w, said, assumed = workload(), [], scheduled()
    counted = with_machine_code(w, assumed, said.append)
    own = compile_apart(w, generate_code=True)
    held = with_machine_code(w, own, said.append)
    assert own.own_machine_code and held.schedule == own.schedule and held.by_parts != own.schedule
    seconds = own.schedule.seconds
    assert seconds.counted > 0.95 * seconds.overlapped > 0.95 * counted.schedule.seconds.counted
    assert held.by_parts.seconds.overlapped == pytest.approx(seconds.overlapped, rel=0.25)


def test_what_has_no_machine_code_stays_as_it_is(monkeypatch):
    """A GPU's, for one."""
    monkeypatch.setattr(kernel_cycles, "at_work", lambda *_, **__: pytest.fail("nothing to generate"))
    estimate = object()
    assert with_machine_code(workload("4xH100"), estimate, pytest.fail) is estimate


@pytest.mark.slow
@on_tpu
def test_a_compiler_that_writes_no_machine_code_is_said(monkeypatch):
    def none(workload, wanted, part):
        raise CompilerFailure("attention of a layer: this compiler writes no machine code")

    monkeypatch.setattr(kernel_cycles, "generate_cycles", none)
    w, said, assumed = workload(), [], scheduled()
    assert with_machine_code(w, assumed, said.append).schedule == assumed.schedule
    assert (
        said[1]
        == "attention of a layer: this compiler writes no machine code; the seconds are not based on machine code"
    )
