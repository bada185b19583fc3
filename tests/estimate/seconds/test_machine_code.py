"""Cycles from machine code: programs of known answer, and the compiler's own estimate for its matrix products."""

import os
import re
import subprocess
import sys

import pytest

from ringformer.estimate.compiled.program_text import Program
from ringformer.estimate.seconds.kernel_keys import KernelKeys
from ringformer.estimate.seconds.machine_code import Code, dump_flags, dumped_kernels, read_cycles
from ringformer.estimate.workloads.targets import find_target

HEAD = "= control target key start\nLH: loop header\nLB: loop body\n= control target key end\n\n"
PLAIN = "{} : > {{ %1 = vnop }} /* any number: 0x9 bundleno */"
PRODUCT = "{} : > {{ %3 = vmatmul.bf16.gmra.mxu0 %v1 }}"
TEST = "{} : > {{ %p{} = scmp.ge.s32.totalorder %s1, {} /* loop exit test */ }}"
BRANCH = "{} : > {{ %2 = sbr.rel (!%p{}) target bundleno = {} (0x0), region = 3 }}"
END = "{} : {{}} /* End region 0 */"


def bundles(*lines):
    """The text of a dump of these bundles."""
    numbered = [line[0].format(f"   {hex(i) if i else 0}  ", *line[1:]) for i, line in enumerate(lines)]
    return HEAD + "\n".join(numbered) + "\n"


def test_a_program_without_loops_takes_a_cycle_a_bundle():
    text = bundles([PLAIN], [PLAIN], [END])
    assert read_cycles(text) == Code.read(text).bundles == 3 and not Code.read(text).loops


def test_loops_multiply():
    """A loop of 5 turns of bundles 1 to 6, in it one of 7 turns of bundles 2 to 4; a branch forward is no loop."""
    text = bundles(
        [PLAIN], [BRANCH, 9, 6], [PLAIN], [TEST, 1, 7], [BRANCH, 1, 2], [TEST, 2, 5], [BRANCH, 2, 1], [PLAIN], [END]
    )
    code = Code.read(text)
    assert code.bundles == 9 and [trips for _, trips in code.loops.values()] == [7, 5]
    assert read_cycles(text) == 3 + 5 * (3 + 7 * 3)


def test_a_loop_without_a_stated_count_is_said():
    text = bundles([PLAIN], [BRANCH, 1, 0], [END])
    assert read_cycles(text) == 3 and list(Code.read(text).loops.values()) == [(1, None)]


def test_a_program_that_is_not_written_to_its_end_is_none():
    assert read_cycles(bundles([PLAIN], [PLAIN])) is None


MATMUL = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.targets import only_compilers
only_compilers()
mesh = jax.sharding.Mesh(find_target("{target}").devices()[:1], "x")
x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
print(jax.jit(lambda a, b: a @ b).lower(x, x).compile().as_text())
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e:2x2", "v6e:2x2"])
def test_a_matrix_product_takes_what_its_compiler_estimates(tmp_path, target):
    """At least what its FLOPs take at the units' full rate, and within 40% of XLA's own estimate."""
    environment = os.environ | {"LIBTPU_INIT_ARGS": dump_flags(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", MATMUL.format(target=target)]
    text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    program, files = Program.parse(text), dumped_kernels(tmp_path)
    (product,) = (
        i for i in program.computations[program.entry].values() if program.instruction_flops(program.entry, i)
    )
    code = files[product.name].read_text()
    cycles, trips = read_cycles(code), [trips for _, trips in Code.read(code).loops.values()]
    cores = find_target(target).chip.tensor_cores
    assert None not in trips and KernelKeys(program).key(program.entry, product)
    assert 2 * 4096**3 / (cores.count * cores.matrix_flops_per_cycle) <= cycles
    estimated = int(re.search(r'estimated_cycles":"(\d+)"', product.text)[1])
    assert cycles == pytest.approx(estimated, rel=0.4)
