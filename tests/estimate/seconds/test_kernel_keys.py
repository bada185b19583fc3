"""Equal instructions have equal keys, whatever they are called; what changes the code changes the key."""

from ringformer.estimate.compiled.program_text import Program
from ringformer.estimate.seconds.kernel_keys import KernelKeys

TEXT = """
%fused (p: f32[8,8], q: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8]{{1,0}} parameter(0)
  %q = f32[8,8]{{1,0}} parameter(1)
  %c = f32[] constant({constant})
  %d = f32[8,8]{{1,0}} broadcast(%c), dimensions={{}}
  %a = f32[8,8]{{1,0}} {opcode}(%p, %d), metadata={{op_name="{scope}/add"}}
  ROOT %b = f32[8,8]{{1,0}} multiply(%a, {second})
}}
ENTRY %main (x: f32[8,8], y: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0{space}}} parameter(0)
  %y = f32[8,8]{{1,0}} parameter(1)
  ROOT %f = f32[8,8]{{1,0}} fusion(%x, %y), kind=kLoop, calls=%fused, metadata={{op_name="{scope}"}}
}}
"""
USUAL = {"constant": "2", "opcode": "add", "scope": "one", "second": "%q", "space": ""}


def key(**changes):
    names = changes.pop("names", {})
    text = TEXT.format(**USUAL | changes)
    for old, new in names.items():
        text = text.replace(f"%{old}", f"%{new}")
    program = Program.parse(text)
    computation = program.computations[program.entry]
    return KernelKeys(program).key(program.entry, next(i for i in computation.values() if i.opcode == "fusion"))


def test_names_and_metadata_do_not_matter():
    assert key() == key(scope="another/while/body")
    assert key() == key(names={"fused": "fused_computation.7.clone", "a": "add.3", "x": "get-tuple-element.9"})


def test_what_is_computed_and_where_it_lies_does():
    keys = [key(), key(constant="3"), key(opcode="subtract"), key(second="%p"), key(space=":S(1)")]
    assert len(set(keys)) == len(keys)
