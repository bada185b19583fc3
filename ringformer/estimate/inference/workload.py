"""What an estimate of inference is of: rows that a model continues on a target, and the programs that it takes."""

from dataclasses import dataclass, replace

from jax.sharding import AbstractMesh

from ringformer.estimate.workload import Workload
from ringformer.inference.program_sizes import ProgramSizes, granule
from ringformer.models.kernel_choice import with_kernel
from ringformer.ops.layouts import Layout
from ringformer.parallel.mesh import AXIS_NAMES

PREFILL, FIRST_CHUNK, DECODE = "prefill", "prefill of the first chunk", "decode step"
"""The last chunk of a context into its cache, which is the whole of it without chunks; the first of several, before
which nothing came; one token of each row against a full cache."""
INFERENCE = (PREFILL, FIRST_CHUNK, DECODE)
LOADING = "layout of the weights"
"""Before there is a cache: from the shards of a checkpoint to the shares of decoding, the largest parameter in both."""


@dataclass(frozen=True)
class InferenceWorkload(Workload):
    """`batch_size` rows with a cache for `seq_len` tokens each, prompt and continuation together."""

    prefill_chunk: int | None = None
    """Tokens of a row that are taken in at once; None: all."""

    @property
    def chunk(self) -> int:
        return self.prefill_chunk or self.seq_len

    @property
    def chunks(self) -> int:
        """That a context is taken in in."""
        return self.seq_len // self.chunk

    @property
    def local_tokens(self) -> int:
        """Tokens of a chunk on a device, which fsdp and dp do not divide."""
        dp, _, tp, sp = self.mesh_shape
        return self.batch_size // dp * self.chunk // (tp * sp)

    @property
    def layout(self) -> Layout:
        return self.model.layout if self.mesh_shape[3] > 1 else "contiguous"

    @property
    def sizes(self) -> ProgramSizes:
        """Those of a session."""
        _, _, tp, sp = self.mesh_shape
        return ProgramSizes(sp, granule(self.layout, tp, sp), self.seq_len, self.prefill_chunk)

    def attended_slots(self, number: int) -> int:
        """Slots of a rank's cache that chunk `number`, from 0, attends to."""
        return self.sizes.cached(self.model, self.chunk, number * self.chunk // self.sizes.ranks)[0]

    def check(self) -> None:
        """Raise ValueError for what no session can have."""
        dp = self.mesh_shape[0]
        replace(self.model, attention="ring").check_mesh(AbstractMesh(self.mesh_shape, AXIS_NAMES))
        if self.batch_size % dp:
            raise ValueError(f"{self.batch_size} rows on a mesh with dp={dp}: --batch_size must be a multiple of dp")
        unit = self.sizes.granule
        if self.seq_len % self.chunk or self.chunk % unit:
            raise ValueError(
                f"chunks of {self.chunk} tokens: on mesh {self.mesh_dim} they must be multiples of {unit} and divide "
                f"the context of {self.seq_len}; powers of two do"
            )

    def with_kernel(self) -> tuple["InferenceWorkload", str]:
        """As in training; chunks are of the tokens of a prefill's chunk."""
        chip = self.target.chip
        model, why = with_kernel(self.model, chip.kind, chip, self.chunk // self.mesh_shape[3])
        return replace(self, model=model), why
