"""What a buffer assignment's text says of memory, and which options a compiler is asked to write it with."""

import jax
import pytest

from ringformer.estimate.compiled.dump import AS_COMPILED_PROGRAMS_PRINT, Memory, compile_printing, read_memory

TEXT = """BufferAssignment:
allocation 0: size 4096, page 0, thread-local:
 value: <1 a @0> (size=4096,offset=0): f32[1024]
allocation 1: size 1000, page 0, parameter 5, shape |f32[250]| at ShapeIndex {}, maybe-live-out:
allocation 2: size 200, page 0, parameter 4, shape |f32[50]| at ShapeIndex {}:
allocation 3: size 40, page 0, maybe-live-out:
allocation 4: size 512, page 0, output shape is |(f32[])|, maybe-live-out:
allocation 5: size 16, page 0, constant:
allocation 6: size 7000, color 5, page 0, preallocated-temp:
allocation 7: size 3000, color 1, page 0, preallocated-temp:
allocation 8: size 80000, page 0, preallocated-temp:
"""


def test_the_memory_of_the_device_and_of_its_host():
    """On-chip memory (color 1), what a call needs for itself and constants are no part of it."""
    assert read_memory(TEXT) == Memory(arguments=1200, outputs=552, temporaries=80000, host=7000)


GPU_TEXTS = {
    "jax 0.10.2": """BufferAssignment:
allocation 0: size 196608, parameter 9, shape |f32[3,256,64]| at ShapeIndex {}, maybe-live-out:
 value: <182 copy.5 @0> (size=196608,offset=0): f32[3,256,64]{2,1,0}
allocation 44: size 4, parameter 1, shape |s32[]| at ShapeIndex {}:
allocation 80: size 344, output shape is |(s32[], f32[64,256])|, maybe-live-out:
allocation 82: size 16, maybe-live-out:
allocation 83: size 8, thread-local:
allocation 940: size 4, constant:
allocation 989: size 3145728, color 5, preallocated-temp:
allocation 990: size 52563480, preallocated-temp:
""",
    "jax 0.12.0": """BufferAssignment:
allocation 0: size 196608, page 0, parameter 9, shape |f32[3,256,64]| at ShapeIndex {}, maybe-live-out:
 value: <182 copy.5 @0> (size=196608,offset=0): f32[3,256,64]{2,1,0}
allocation 44: size 4, page 0, parameter 1, shape |s32[]| at ShapeIndex {}:
allocation 80: size 344, page 0, output shape is |(s32[], f32[64,256])|, maybe-live-out:
allocation 82: size 16, page 0, maybe-live-out:
allocation 83: size 8, page 0, thread-local:
allocation 940: size 4, page 0, constant:
allocation 989: size 3145728, color 5, page 0, preallocated-temp:
allocation 990: size 52563480, page 0, preallocated-temp:
""",
}
"""Cut from dumps of a small step with offload for A100s."""


@pytest.mark.parametrize("version", GPU_TEXTS)
def test_the_memory_of_a_gpu_in_the_text_of_every_version(version):
    assert read_memory(GPU_TEXTS[version]) == Memory(196612, 360, 52563480, 3145728)


class OlderCompiler:
    """Lowered for a compiler that refuses the options it does not know, by name, as XLA's does."""

    def __init__(self, known):
        self.known, self.asked = set(known), []

    def compile(self, compiler_options):
        for name in compiler_options:
            if name not in self.known:
                raise jax.errors.JaxRuntimeError(f"INVALID_ARGUMENT: No such compile option: '{name}'")
        self.asked.append(dict(compiler_options))


def test_how_to_print_is_asked_of_a_compiler_that_knows():
    """What it is to compile with is never left out."""
    needed = {"xla_gpu_autotune_level": "0"}
    older = OlderCompiler({*needed, *AS_COMPILED_PROGRAMS_PRINT} - {"xla_dump_compact_gte"})
    compile_printing(older, needed, AS_COMPILED_PROGRAMS_PRINT)
    assert older.asked == [needed | {"xla_dump_hlo_as_text": True, "xla_syntax_sugar_async_ops": True}]
    newer = OlderCompiler({*needed, *AS_COMPILED_PROGRAMS_PRINT})
    compile_printing(newer, needed, AS_COMPILED_PROGRAMS_PRINT)
    assert newer.asked == [needed | AS_COMPILED_PROGRAMS_PRINT]
    with pytest.raises(jax.errors.JaxRuntimeError, match="'xla_gpu_autotune_level'"):
        compile_printing(OlderCompiler(AS_COMPILED_PROGRAMS_PRINT), needed, AS_COMPILED_PROGRAMS_PRINT)
