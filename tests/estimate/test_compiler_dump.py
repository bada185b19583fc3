"""What a buffer assignment's text says of memory."""

from ringformer.estimate.compiler_dump import Memory, read_memory

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
