"""Tests for peak_buffers: real compilations for TPU targets whose largest buffer is known by construction."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

import ringformer
from ringformer.estimate.compiled.peak_buffers import PeakBuffers, peak_buffers, read_peak_buffers
from ringformer.estimate.workloads.targets import find_target
from ringformer.ops import derivative_guards, varying_axes

T, F, D = 16384, 8192, 256


def _wide(x, w, v):
    wide = jnp.tanh(x @ w)  # [T, F], needed again by the backward of the next line: 512 MiB, more than a chip's VMEM
    return jnp.sum((wide @ v) ** 2)


WIDE_LINE = inspect.getsourcelines(_wide)[1] + 1


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> tuple[Path, jax.stages.Compiled]:
    """The gradient of `_wide`, compiled for one chip, and the folder of its dump."""
    folder = tmp_path_factory.mktemp("dump")
    chip = SingleDeviceSharding(find_target("v5e:2x2").devices()[0])
    shapes = (T, D), (D, F), (F, D)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=chip) for shape in shapes]
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
    return folder, jax.jit(jax.grad(_wide, (0, 1, 2))).lower(*arguments).compile(compiler_options=options)


@pytest.fixture(scope="module")
def read(compiled) -> PeakBuffers:
    buffers = read_peak_buffers(compiled[0])
    assert buffers is not None
    return buffers


@pytest.mark.slow
def test_the_largest_buffer_is_the_one_that_was_made_large(read):
    first = read.largest[0]
    assert (first.type, first.bytes) == (f"f32[{T},{F}]", 4 * T * F)
    assert Path(first.source.partition(":")[0]).name == Path(__file__).name
    assert int(first.source.partition(":")[2]) == WIDE_LINE
    assert not first.is_argument
    assert read.largest[1].bytes < first.bytes, "two of them at once would be a worse program than XLA makes"


@pytest.mark.slow
def test_arguments_have_the_names_that_they_have_in_the_program(read):
    assert {b.op_name for b in read.largest if b.is_argument} == {"x", "w", "v"}


def test_what_is_alive_is_the_compilers_peak_without_the_holes_of_its_heap(read, compiled):
    memory = compiled[1].memory_analysis()
    taken = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert 0.95 * taken < read.bytes <= taken


def test_values_of_one_place_are_one_buffer(read):
    """A loop's argument, its body's parameter and its result lie in one place under three names."""
    assert len({b.instruction for b in read.largest}) == len(read.largest)
    assert sum(b.bytes for b in read.largest) <= read.bytes


ASSIGNMENT = """BufferAssignment:
allocation 0: size 64, page 0, parameter 0, shape |f32[16]| at ShapeIndex {}:
 value: <1 p @0> (size=64,offset=0): f32[16]{0:T(128)}
allocation 1: size 4096, page 0, thread-local:
 value: <2 add @0> (size=4096,offset=0): s32[]
allocation 2: size 300, page 0, preallocated-temp:
 value: <3 early @0> (size=200,offset=0): f32[50]{0}
 value: <4 late{0} @0> (size=100,offset=0): f32[25]{0}
 value: <5 also_late{1} (phi) @1> (size=100,offset=0): f32[25]{0}
 value: <6 beside @0> (size=120,offset=200): f32[30]{0}
allocation 3: size 9999, color 1, page 0, preallocated-temp:
 value: <7 on_chip @0> (size=9999,offset=0): f32[2000]{0:S(1)}

Total bytes used: 1 (1B)
"""
RANGES = """HloLiveRange (max 9):
  InstructionSequence:
    0:p
  BufferLiveRange:
    p{}:0-9
    add{}:2-2
    early{}:1-3
    late{0}:5-8
    also_late{1}:6-9
    beside{}:4-7
    on_chip{}:1-9
  Live ranges at 6 (peak):
"""
PROGRAM = """HloModule jit_f

FileNames
1 "/home/me/lib/python3.11/site-packages/optax/update.py"
2 "/home/me/model.py"
3 "PACKAGE/estimate/compile_step.py"
4 "/home/me/run.py"

FileLocations
1 {file_name_id=4 line=1}
2 {file_name_id=3 line=88}
3 {file_name_id=2 line=7}
4 {file_name_id=1 line=99}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=4}
5 {file_location_id=4 parent_frame_id=3}

ENTRY %main (p: f32[16]) -> f32[25] {
  %p = f32[16]{0} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %late = (f32[25]{0}, f32[25]{0}) fusion(%p), calls=%f, metadata={op_name="jit(f)/late" stack_frame_id=4}
  %beside = f32[30]{0} copy(%other), backend_config={}
  %other = f32[30]{0} fusion(%p), calls=%f, metadata={op_name="jit(f)/other" stack_frame_id=5}
  ROOT %r = f32[25]{0} get-tuple-element(%late), index=0
}
""".replace("PACKAGE", str(Path(ringformer.__file__).parent))


def test_the_peak_is_the_moment_at_which_places_take_most():
    read = peak_buffers(ASSIGNMENT, RANGES, PROGRAM)
    assert read.bytes == 64 + 100 + 120, "early is gone, late and also_late share a place, the chip's own is not HBM"
    assert [b.bytes for b in read.largest] == [120, 100, 64]


def test_sources_are_the_innermost_line_that_is_not_a_librarys():
    beside, late, argument = peak_buffers(ASSIGNMENT, RANGES, PROGRAM).largest
    assert (late.instruction, late.source) == ("late{0}", "/home/me/model.py:7"), "optax is called from there"
    assert (beside.op_name, beside.source) == ("jit(f)/other", ""), "who lowers the program is not in it"
    assert (argument.op_name, argument.is_argument) == ("state.params['w']", True)


def test_wrappers_are_seen_through():
    for module in (derivative_guards, varying_axes):
        program = PROGRAM.replace("/home/me/lib/python3.11/site-packages/optax/update.py", module.__file__)
        assert peak_buffers(ASSIGNMENT, RANGES, program).largest[1].source == "/home/me/model.py:7"


def test_only_the_largest_are_listed():
    assert [b.bytes for b in peak_buffers(ASSIGNMENT, RANGES, PROGRAM, count=1).largest] == [120]


def test_a_compiler_that_dumps_no_live_ranges_is_no_error(tmp_path):
    assert read_peak_buffers(tmp_path) is None
