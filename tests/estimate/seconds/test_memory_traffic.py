"""Bytes to and from HBM of instructions of known answer."""

import pytest

from ringformer.estimate.compiled.program_text import Program
from ringformer.estimate.seconds.memory_traffic import hbm_bytes

ARRAY, SLICE = 64 * 8 * 4, 8 * 8 * 4
TEXT = """
%fused (p: f32[64,8], q: f32[8,8], i: s32[]) -> (f32[64,8], f32[8,8]) {{
  %p = f32[64,8]{{1,0}} parameter(0)
  %q = f32[8,8]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  %v = f32[64,8]{{1,0}} bitcast(%p)
  %s = f32[8,8]{{1,0}} dynamic-slice(%v, %i, %z), dynamic_slice_sizes={{8,8}}
  %a = f32[8,8]{{1,0}} add(%s, %q)
  %u = f32[64,8]{{1,0}} dynamic-update-slice(%p, %a, %i, %z)
  ROOT %t = (f32[64,8]{{1,0}}, f32[8,8]{{1,0}}) tuple(%u, %a)
}}
ENTRY %main (x: f32[64,8], y: f32[8,8], i: s32[]) -> f32[64,8] {{
  %x = f32[64,8]{{1,0}} parameter(0)
  %y = f32[8,8]{{1,0{y}}} parameter(1)
  %i = s32[]{{:S(6)}} parameter(2)
  %z = s32[]{{:S(6)}} constant(0)
  %f = (f32[64,8]{{1,0}}, f32[8,8]{{1,0{a}}}) fusion(%x, %y, %i), kind=kLoop, calls=%fused
  %d = f32[8,8]{{1,0:S(1)}} dynamic-slice(%x, %i, %z), dynamic_slice_sizes={{8,8}}
  %n = f32[64,8]{{1,0}} negate(%x)
  %c = (f32[64,8]{{1,0:S(1)}}, f32[64,8]{{1,0}}, u32[]{{:S(2)}}) copy-start(%n)
  ROOT %e = f32[64,8]{{1,0:S(1)}} copy-done(%c)
}}
"""


def moved(name, y="", a=""):
    program = Program.parse(TEXT.format(y=y, a=a))
    return hbm_bytes(program, program.entry, program.computations[program.entry][name])


@pytest.mark.parametrize(("y", "a", "slices"), [("", "", 4), (":S(1)", "", 3), (":S(1)", ":S(1)", 2)])
def test_a_fusion_reads_slices_and_writes_updates(y, a, slices):
    """A slice of x and all of y are read; x is updated in place and the sum written: what lies on chip is free."""
    assert moved("f", y, a) == slices * SLICE


def test_other_instructions():
    assert moved("d") == SLICE  # into on-chip memory
    assert moved("n") == 2 * ARRAY
    assert (moved("c"), moved("e"), moved("x")) == (ARRAY, 0, 0)


PRODUCT = """
%in_place (p: f32[2,64,8], q: f32[8,8]) -> (f32[64,8], s8[4096]) {
  %q = f32[8,8]{1,0} parameter(1)
  %p = f32[2,64,8]{2,1,0} parameter(0)
  %s = f32[1,64,8]{2,1,0} slice(%p), slice={[1:2], [0:64], [0:8]}
  %b = f32[64,8]{1,0} bitcast(%s)
  ROOT %r = (f32[64,8]{1,0}, s8[4096]{0}) custom-call(%b, %q), custom_call_target="__cublas$lt$matmul"
}
ENTRY %main (x: f32[2,64,8], y: f32[8,8], z: f32[64,8]) -> f32[64,8] {
  %x = f32[2,64,8]{2,1,0} parameter(0)
  %y = f32[8,8]{1,0} parameter(1)
  %z = f32[64,8]{1,0} parameter(2)
  %m = (f32[64,8]{1,0}, s8[4096]{0}) custom-call(%z, %y), custom_call_target="__cublas$lt$matmul"
  %f = (f32[64,8]{1,0}, s8[4096]{0}) fusion(%x, %y), kind=kCustom, calls=%in_place
  ROOT %g = f32[64,8]{1,0} get-tuple-element(%f), index=0
}
"""


@pytest.mark.parametrize("name", ["m", "f"])
def test_a_product_of_cublas_reads_its_operands_and_writes_its_result(name):
    """A workspace is memory, not traffic; an operand that is part of an array is read where it lies."""
    program = Program.parse(PRODUCT)
    found = hbm_bytes(program, program.entry, program.computations[program.entry][name])
    assert found == 2 * ARRAY + SLICE
