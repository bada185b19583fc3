"""Workloads of inference: rows that a model continues on a target, and the programs that this needs."""

from dataclasses import dataclass, replace

from jax.sharding import AbstractMesh

from ringformer.estimate.workloads.training import Workload
from ringformer.inference.cache.arrays import CacheDtype
from ringformer.inference.program_sizes import ProgramSizes, granule
from ringformer.ops.layouts import Layout
from ringformer.parallel.mesh import AXIS_NAMES

PREFILL = "prefill"
FIRST_CHUNK = "prefill of the first chunk"
DECODE = "decode step"
"""PREFILL reads the last chunk of a context into the cache (without chunks, the whole context); FIRST_CHUNK reads the
first of several, with nothing before it; DECODE generates one token of each row with a full cache."""
INFERENCE = (PREFILL, FIRST_CHUNK, DECODE)
LOADING = "layout of the weights"
"""Program that converts the weights from shards of a checkpoint to shares for decoding. It runs before there is a
cache, with the largest parameter on the device in both layouts."""


@dataclass(frozen=True)
class InferenceWorkload(Workload):
    """`batch_size` rows, each with a cache for `seq_len` tokens, prompt and continuation together."""

    prefill_chunk: int | None = None
    """Tokens of a row that prefill reads at once; None: all."""
    cache_dtype: CacheDtype = "compute"

    @property
    def masks(self) -> bool:
        """False, because a row is one document."""
        return False

    @property
    def chunk(self) -> int:
        return self.prefill_chunk or self.seq_len

    @property
    def chunks(self) -> int:
        """Number of chunks of a context."""
        return self.seq_len // self.chunk

    @property
    def local_tokens(self) -> int:
        """Tokens of a chunk on a device; dp splits rows, and fsdp does not split inference."""
        dp, _, tp, sp = self.mesh_shape
        return self.batch_size // dp * self.chunk // (tp * sp)

    @property
    def ring_tokens(self) -> int:
        """Tokens of a chunk of one row on a rank of the ring."""
        return self.chunk * self.model.ulysses // self.mesh_shape[3]

    @property
    def layout(self) -> Layout:
        return self.model.layout if self.mesh_shape[3] > 1 else "contiguous"

    @property
    def sizes(self) -> ProgramSizes:
        """Sizes of a session's programs."""
        _, _, tp, sp = self.mesh_shape
        return ProgramSizes(sp, granule(self.layout, tp, sp), self.seq_len, self.prefill_chunk)

    def attended_slots(self, number: int) -> int:
        """Number of cache slots of a rank that chunk `number` (from 0) attends to; if all layers have windows, those
        that the longest reaches."""
        slots = number * self.chunk // self.sizes.ranks
        if all(self.windows):
            return min(slots, -(-max(self.windows) // self.sizes.ranks))
        return slots

    def check(self) -> None:
        """Raise ValueError for a mesh, batch or chunk that is invalid for every session."""
        dp = self.mesh_shape[0]
        model = self.model if self.model.on_ring else replace(self.model, attention="ring")
        model.check_mesh(AbstractMesh(self.mesh_shape, AXIS_NAMES))
        if self.batch_size % dp:
            raise ValueError(f"{self.batch_size} rows on a mesh with dp={dp}: --batch_size must be a multiple of dp")
        unit = self.sizes.granule
        if self.seq_len % self.chunk or self.chunk % unit:
            raise ValueError(
                f"chunks of {self.chunk} tokens do not work on mesh {self.mesh_dim}: use a multiple of {unit} that "
                f"divides the context of {self.seq_len}, such as a power of two"
            )
