"""A whole program's slots: a loop of products, by the real compiler."""

import pytest

from ringformer.estimate.compiled.dump import CompilerFailure
from ringformer.estimate.compiled.program_text import Program
from ringformer.estimate.kernels.pair_kernels import dumped
from ringformer.estimate.kernels.slot_use import NOTHING, ProgramSlots, SlotUse, one_after_the_other, times
from tests.hlo import on_tpu

LOOP = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.targets import only_compilers
only_compilers()
mesh = jax.sharding.Mesh(find_target("v5e:2x2").devices()[:1], "x")
x = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
turn = lambda _, a: (a @ a).astype(jnp.bfloat16)
print(jax.jit(lambda a: jax.lax.fori_loop(0, 7, turn, a)).lower(x).compile().as_text())
"""


@on_tpu
def test_a_loop_takes_its_turns():
    with dumped(["-c", LOOP]) as (folder, text):
        program = Program.parse(text)
        slots = ProgramSlots(program, folder, "v5e")
        (loop,) = (i for i in program.computations[program.entry].values() if i.opcode == "while")
        turn, whole = slots.of_computation(loop.called[0]), slots.of_computation(program.entry)
    ideal = 2 * 2048**3 / 131072
    assert ideal <= turn.cycles * turn.units["matrix"] <= turn.cycles < 1.5 * ideal
    assert 7 * turn.cycles <= whole.cycles < 7.5 * turn.cycles


def test_uses_add_up_by_their_cycles():
    a, b = SlotUse(100, {"matrix": 50}, 1, 2, 30, 7), SlotUse(300, {"matrix": 30, "load": 300}, 0, 1, 10, 9)
    both = one_after_the_other([NOTHING, a, b])
    assert both == SlotUse(400, {"matrix": 80, "load": 300}, 1, 3, 40, 9)
    assert both.units == times(both, 2).units == {"matrix": 0.2, "load": 0.75}
    assert times(both, 0.5)[2:] == (0.5, 1.5, 20, 9) and times(both, 2).cycles == 800
    assert one_after_the_other([]) == NOTHING


def test_a_process_that_fails_is_said_in_a_line():
    with (
        pytest.raises(CompilerFailure, match=r"^ValueError: so it is$"),
        dumped(["-c", "raise ValueError('so it is')"]),
    ):
        pass
